"""A gateway as the upstream of another by the request queue: both charge for the same usage."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.artist import Artist, mp4, png
from tests.databases import Databases
from tests.gateway.test_gmi import QUEUE
from tests.gateway.test_media import DATA_URI, PICTURE, finished, place, stored
from tests.stack import Caller, Stack, ended, running, wait_for

SOLD = """\
  - name: resold-pocket
    task: text-to-image
    also: [image-to-image, image-edit]
    upstream: {{dialect: gmi, url: "{url}", model: pocket, credential: BEHIND_KEY}}
    options: {{poll_min_s: 0.05, poll_max_s: 0.2}}
    sizes: ["64x64", "128x64"]
    qualities: {{low: {{}}, high: {{}}}}
    limits: {{images: 4, sources: 3}}
    price:
      - {{unit: image, amount: "0.02"}}
      - {{unit: image, amount: "0.06", when: {{quality: high}}}}
  - name: resold-film
    task: text-to-video
    also: [image-to-video]
    upstream: {{dialect: gmi, url: "{url}", model: film, credential: BEHIND_KEY}}
    options: {{poll_min_s: 0.05, poll_max_s: 0.2}}
    sizes: ["64x64", "128x72"]
    limits: {{seconds: 8}}
    default_parameters: {{seconds: 2}}
    price: [{{unit: video_second, amount: "0.2"}}]
"""


@pytest.fixture(scope="module")
def behind(shared_media_stack: tuple[Stack, Artist]) -> Caller:
    """The account that the front gateway has at the one behind it."""
    return shared_media_stack[0].caller(credit="10")


@pytest.fixture(scope="module")
def front(
    shared_media_stack: tuple[Stack, Artist],
    behind: Caller,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: str,
    valkey: str,
) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("front")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEHIND_KEY", behind.secret)
        with running(
            directory / "home",
            Databases("sqlite", directory, postgres).make(),
            valkey,
            namespace=f"t{uuid.uuid4().hex[:8]}",
            more_models=SOLD.format(url=shared_media_stack[0].url),
        ) as made:
            yield made


def last(caller: Caller) -> dict[str, Any]:
    """The newest request of an account."""
    answer = caller.http.get(f"{QUEUE}/requests", params={"limit": 1})
    found: dict[str, Any] = json.loads(answer.text, parse_float=Decimal)["requests"][0]
    return found


def receipt(caller: Caller, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    return found


def test_images_pass_through_both_gateways_with_the_same_counts(
    front: Stack, behind: Caller, artist: Artist
) -> None:
    caller = front.caller()

    found = finished(
        caller,
        "resold-pocket",
        prompt="a red circle",
        images=[DATA_URI, DATA_URI],
        n=2,
        seed=5,
        size="128x64",
        quality="high",
        steps=3,
    )
    there = last(behind)

    assert found["status"] == "succeeded", found
    pictures = [httpx.get(medium["url"]).content for medium in found["output"]["media"]]
    assert pictures == [png(128, 64, 5), png(128, 64, 6)]
    assert artist.attached[there["request_id"]] == [PICTURE, PICTURE]
    said = there["payload"]
    assert (said["prompt"], said["n"], said["steps"]) == ("a red circle", 2, 3)
    ours, theirs = receipt(caller, found["id"]), receipt(behind, there["request_id"])
    assert ours["usage"]["images"] == theirs["usage"]["images"] == 2
    assert (ours["cost"], theirs["cost"]) == ("0.12", "0.06")
    assert there["usage"]["cost"] == Decimal("0.06")
    assert front.findings() == []


def test_video_passes_through_both_gateways_with_the_same_length(
    front: Stack, behind: Caller, artist: Artist
) -> None:
    caller = front.caller()

    found = finished(
        caller, "resold-film", prompt="a ball", image=DATA_URI, seconds=4, size="128x72", fps=12
    )
    there = last(behind)

    assert found["status"] == "succeeded", found
    media = {medium["role"]: medium for medium in found["output"]["media"]}
    assert httpx.get(media["output"]["url"]).content == mp4()
    assert httpx.get(media["thumbnail"]["url"]).content == png(8, 8)
    assert media["output"]["duration_ms"] == 4000
    assert artist.attached[there["request_id"]] == [PICTURE]
    assert (there["payload"]["size"], there["payload"]["fps"]) == ("128x72", 12)
    ours, theirs = receipt(caller, found["id"]), receipt(behind, there["request_id"])
    assert ours["usage"]["video_ms"] == theirs["usage"]["video_ms"] == 4000
    assert (ours["cost"], theirs["cost"]) == ("0.8", "0.4")


def test_cancelling_in_front_cancels_behind(front: Stack, behind: Caller) -> None:
    caller = front.caller()
    request_id = place(caller, "resold-film", prompt="!slow").json()["id"]
    wait_for(lambda: last(behind)["payload"].get("prompt") == "!slow", "the order")

    caller.http.delete(f"{QUEUE}/requests/{request_id}")

    assert ended(caller, request_id)["status"] == "cancelled"
    wait_for(lambda: last(behind)["status"] == "cancelled", "the cancel behind")
    assert last(behind)["usage"]["cost"] == 0


def test_failure_behind_is_reported_in_front_and_free_on_both_sides(
    front: Stack, behind: Caller
) -> None:
    caller = front.caller()

    failed = finished(caller, "resold-pocket", prompt="!fail")
    refused = finished(caller, "resold-pocket", prompt="x", steps=99)

    assert failed["error"]["code"] == "upstream_error"
    assert "The brush broke." in failed["error"]["message"]
    assert refused["error"]["code"] == "upstream_rejected"
    assert "steps is 99" in refused["error"]["message"]
    assert failed["cost"] == refused["cost"] == "0"
    assert caller.http.get("/v1/balance").json()["posted"] == "1"


def test_gmi_code_works_the_same_against_both_gateways(front: Stack, behind: Caller) -> None:
    """The queue in front of the queue: what only the model behind knows by name goes through."""
    caller = front.caller()
    payload = {
        "prompt": "x",
        "num_inference_steps": 4,
        "guidance_scale": "3.5",
        "aspect_ratio": "2:1",
        "output_format": "webp",
        "scheduler": "ddim",
    }

    answer = caller.http.post(
        f"{QUEUE}/requests",
        json={"model": "resold-pocket", "payload": payload},
        headers={"Prefer": "wait"},
    )
    there = last(behind)

    assert answer.json()["status"] == "success", answer.text
    assert httpx.get(answer.json()["outcome"]["image_url"]).is_success
    said = there["payload"]
    assert (said["steps"], said["guidance"], said["format"]) == (4, 3.5, "webp")
    assert (said["size"], said["scheduler"]) == ("128x64", "ddim")
    assert stored(front, caller)
