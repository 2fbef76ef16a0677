"""Give a program a key that can spend a tenth of a cent, ask prices first, and stop at its end.

Needs `TOLLGATE_ADMIN_KEY` as well, because it creates the key.
"""

import os

import httpx
from openai import APIStatusError, OpenAI

URL = os.environ.get("TOLLGATE_URL", "http://127.0.0.1:8000")
ACCOUNT = os.environ.get("TOLLGATE_ACCOUNT", "default")
ORDER = {"model": "pocket-image", "prompt": "a green star"}

admin = httpx.Client(
    base_url=URL, headers={"Authorization": f"Bearer {os.environ['TOLLGATE_ADMIN_KEY']}"}
)
made = admin.post(
    f"/v1/admin/accounts/{ACCOUNT}/keys", json={"name": "guarded", "spend_limit": "0.001"}
).raise_for_status()
secret = made.json()["secret"]

quoted = httpx.post(
    f"{URL}/v1/quote",
    headers={"Authorization": f"Bearer {secret}"},
    json={"model": ORDER["model"], "input": {"prompt": ORDER["prompt"]}},
)
print(f"a picture costs at most ${quoted.raise_for_status().json()['max_cost']}")

client = OpenAI(base_url=f"{URL}/v1", api_key=secret)
pictures = 0
try:
    while True:
        client.images.generate(**ORDER)
        pictures += 1
except APIStatusError as error:
    if error.status_code != 402:
        raise
    print(f"stopped after {pictures} pictures: {error.body['message']}")
