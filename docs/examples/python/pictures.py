"""Generate a picture, edit it, and save both, through OpenAI's client."""

import base64
import os
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ["TOLLGATE_API_KEY"],
)
drawn = client.images.generate(
    model="pocket-image",
    prompt="a red circle above a blue square",
    extra_body={"scale": 4},  # 64x64, drawn four times as large
)
Path("picture.png").write_bytes(base64.b64decode(drawn.data[0].b64_json))
print(f"saved picture.png for ${drawn.usage.cost}")

with open("picture.png", "rb") as picture:
    edited = client.images.edit(
        model="pocket-image", image=picture, prompt="make the circle yellow"
    )
Path("edited.png").write_bytes(base64.b64decode(edited.data[0].b64_json))
print(f"saved edited.png for ${edited.usage.cost}")
