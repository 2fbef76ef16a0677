"""Run two models in one order: a text is spoken, and a portrait moves its mouth to it."""

from pathlib import Path

from tollgate import api, checked, data_uri, run, save

portrait = Path(__file__).parents[2] / "img" / "portrait.png"

film = run(
    "pocket-talking-head",
    image=data_uri(portrait, "image/png"),
    text="Good morning.",
    voice="ada",
)
save(film, "talking.mp4")
receipt = checked(api.get(f"/v1/requests/{film['id']}/receipt"))
for step in receipt["steps"]:
    print(f"  {step['name']} by {step['model']}: ${step['cost']}")
