"""Images from a real engine in a real worker, small and of random weights."""

from __future__ import annotations

import base64
import io
import uuid
import warnings
from collections.abc import Iterator

import httpx
import openai
import pytest
from PIL import Image

from tests.artist import png
from tests.databases import Databases
from tests.gateway.test_files import client
from tests.stack import Stack, running
from tests.workers.diffusion.checkpoints import make_checkpoint

MODEL = """\
  - name: tiny-image
    task: text-to-image
    also: [image-to-image]
    engine: diffusion
    checkpoint: {checkpoint}
    options: {{threads: 1}}
    sizes: ["32x32", "64x32"]
    qualities: {{low: {{steps: 2}}, high: {{steps: 4}}}}
    default_parameters: {{quality: low}}
    limits: {{images: 2, steps: 8}}
    price:
      - {{unit: image, amount: "0.01"}}
      - {{unit: image, amount: "0.02", when: {{size: 64x32}}}}
      - {{unit: step, amount: "0.001"}}
"""


@pytest.fixture(scope="module")
def drawing_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("drawing")
    with warnings.catch_warnings():
        # The library would have its own older settings written otherwise.
        warnings.simplefilter("ignore", FutureWarning)
        checkpoint = make_checkpoint("StableDiffusionPipeline", directory / "tiny")
    with running(
        directory / "home",
        Databases("sqlite", directory, postgres).make(),
        valkey,
        namespace=f"t{uuid.uuid4().hex[:8]}",
        more_models=MODEL.format(checkpoint=checkpoint),
    ) as made:
        yield made


def test_images_are_generated_streamed_and_charged_by_usage(drawing_stack: Stack) -> None:
    caller = drawing_stack.caller()
    api = client(drawing_stack, caller)

    events = list(
        api.images.generate(
            model="tiny-image",
            prompt="a red circle",
            n=2,
            size="64x32",
            quality="high",
            stream=True,
            partial_images=1,
            extra_body={"seed": 1},
        )
    )

    assert [event.type.rpartition(".")[2] for event in events][-2:] == ["completed"] * 2
    done = [event for event in events if event.type.endswith("completed")]
    pictures = [Image.open(io.BytesIO(base64.b64decode(event.b64_json))) for event in done]
    assert [picture.size for picture in pictures] == [(64, 32)] * 2
    assert pictures[0].tobytes() != pictures[1].tobytes()
    # Two images of this size, with four steps each.
    assert done[-1].usage.cost == 0.048  # type: ignore[union-attr]  # ours
    previews = [event for event in events if event.type.endswith("partial_image")]
    assert len(previews) == 2


def test_source_reaches_the_engine_and_the_seed_reproduces_the_image(drawing_stack: Stack) -> None:
    caller = drawing_stack.caller()
    value = {"prompt": "a blue square", "seed": 4, "strength": 0.6, "steps": 4}
    source = "data:image/png;base64," + base64.b64encode(png(32, 32, 200)).decode()
    body = {"model": "tiny-image", **value, "image": source, "response_format": "url"}

    answers = [
        caller.http.post("/v1/images/edits", json={**body, "user": name}) for name in ("a", "b")
    ]
    without = caller.http.post(
        "/v1/images/generations",
        json={"model": "tiny-image", "prompt": "a blue square", "seed": 4, "steps": 4},
    )

    drawn = [
        # Not the bytes: they name their request.
        Image.open(io.BytesIO(httpx.get(answer.json()["data"][0]["url"]).content)).tobytes()
        for answer in (*answers, without)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    found = caller.http.get(f"/v1/requests/{answers[0].json()['id']}").json()
    assert found["task"] == "image-to-image"


def test_edit_changes_only_what_is_transparent_in_the_mask(
    drawing_stack: Stack,
) -> None:
    caller = drawing_stack.caller()
    api = client(drawing_stack, caller)
    colours = [(60 + 3 * x, 200 - 2 * y, 90) for y in range(32) for x in range(32)]
    source = Image.new("RGB", (32, 32))
    source.putdata(colours)
    erased = source.convert("RGBA")
    erased.paste((0, 0, 0, 0), (16, 0, 32, 32))

    edited = api.images.edit(
        model="tiny-image", image=_png(source), mask=_png(erased), prompt="a red circle", n=1
    )

    assert edited.data is not None
    drawn = Image.open(io.BytesIO(base64.b64decode(edited.data[0].b64_json or "")))
    left, right = (0, 0, 16, 32), (16, 0, 32, 32)
    assert drawn.convert("RGB").crop(left).tobytes() == source.crop(left).tobytes()
    assert drawn.convert("RGB").crop(right).tobytes() != source.crop(right).tobytes()
    (listed,) = caller.http.get("/v1/requests").json()["data"]
    assert (listed["task"], listed["cost"]) == ("image-to-image", "0.012")


def test_mask_of_another_shape_is_refused_and_not_charged(drawing_stack: Stack) -> None:
    caller = drawing_stack.caller()

    with pytest.raises(openai.BadRequestError) as refused:
        client(drawing_stack, caller).images.edit(
            model="tiny-image", image=png(32, 32), mask=png(32, 16), prompt="x"
        )

    assert refused.value.param == "mask"
    assert "The mask is 32x16 and the image 32x32" in str(refused.value)
    assert drawing_stack.held(caller) == 0
    assert caller.http.get("/v1/balance").json()["posted"] == "1"


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_undecodable_image_is_refused_and_not_charged(drawing_stack: Stack) -> None:
    caller = drawing_stack.caller()
    broken = "data:image/png;base64," + base64.b64encode(png(32, 32)[:45]).decode()

    answer = caller.http.post(
        "/v1/images/edits", json={"model": "tiny-image", "prompt": "a", "image": broken}
    )

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_input"
    assert drawing_stack.held(caller) == 0
    assert caller.http.get("/v1/balance").json()["posted"] == "1"
