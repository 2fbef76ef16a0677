"""Images by the unmodified OpenAI client: generated, edited, varied, streamed, charged once."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from tests.artist import Artist, png
from tests.gateway.test_files import client
from tests.gateway.test_media import DATA_URI, PICTURE, stored
from tests.stack import Stack, wait_for


def test_image_is_returned_as_url_and_as_bytes(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())

    raw = api.images.with_raw_response.generate(
        model="pocket", prompt="a red circle", size="128x64", quality="high", extra_body={"seed": 3}
    )
    drawn = raw.parse()

    assert drawn.data is not None
    (image,) = drawn.data
    assert base64.b64decode(image.b64_json or "") == png(128, 64, 3)
    assert httpx.get(image.url or "").content == png(128, 64, 3)
    assert (drawn.size, drawn.quality, drawn.output_format) == ("128x64", "high", "png")
    assert drawn.usage is not None
    assert drawn.usage.cost == 0.03  # type: ignore[attr-defined]  # ours, beside OpenAI's
    assert drawn.usage.images == 1  # type: ignore[attr-defined]  # ours, beside OpenAI's
    assert raw.headers["x-request-cost"] == "0.03"
    assert raw.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("form", ["url", "b64_json"])
def test_response_format_selects_url_or_bytes(form: Any, media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())

    drawn = api.images.generate(model="pocket", prompt="x", n=2, size="auto", response_format=form)

    assert drawn.data is not None
    assert [(bool(one.url), bool(one.b64_json)) for one in drawn.data] == [
        (form == "url", form == "b64_json")
    ] * 2


def test_stream_has_previews_and_ends_with_the_cost(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())

    events = list(
        api.images.generate(
            model="pocket", prompt="x", stream=True, partial_images=2, extra_body={"seed": 9}
        )
    )

    assert [event.type for event in events] == [
        "image_generation.partial_image",
        "image_generation.partial_image",
        "image_generation.completed",
    ]
    shown = [getattr(event, "partial_image_index", None) for event in events]
    assert shown == [0, 1, None]
    assert base64.b64decode(events[1].b64_json) == png(8, 8, 1)
    assert base64.b64decode(events[2].b64_json) == png(64, 64, 9)
    assert events[2].usage.cost == 0.01  # type: ignore[union-attr]  # ours, beside OpenAI's


def test_image_is_edited_under_a_mask(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    raw = api.images.with_raw_response.edit(
        model="pocket", image=PICTURE, mask=png(16, 16, 255), prompt="make it blue", n=1
    )

    request_id = raw.headers["x-request-id"]
    assert artist.attached[request_id] == [PICTURE, png(16, 16, 255)]
    found = caller.http.get(f"/v1/requests/{request_id}").json()
    assert (found["task"], found["cost"]) == ("image-edit", "0.01")


def test_several_images_are_edited_as_a_stream(media_stack: Stack, artist: Artist) -> None:
    api = client(media_stack, media_stack.caller())
    pictures = [("a.png", PICTURE, "image/png"), ("b.png", png(3, 3), "image/png")]

    events = list(
        api.images.edit(
            model="pocket", image=pictures, prompt="blend", stream=True, partial_images=1
        )
    )

    assert [event.type for event in events] == [
        "image_edit.partial_image",
        "image_edit.completed",
    ]
    assert list(artist.attached.values())[-1] == [PICTURE, png(3, 3)]


def test_edit_can_be_sent_as_json(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    upload = caller.http.post("/v1/uploads", content=png(5, 5)).json()["id"]
    body = {
        "model": "pocket",
        "prompt": "x",
        "images": [{"image_url": DATA_URI}, {"file_id": upload}],
        "mask": {"image_url": DATA_URI},
    }

    answer = caller.http.post("/v1/images/edits", json=body)

    assert answer.status_code == 200, answer.text
    assert artist.attached[answer.json()["id"]] == [PICTURE, png(5, 5), PICTURE]


def test_image_is_varied(media_stack: Stack) -> None:
    caller = media_stack.caller()

    with pytest.deprecated_call():
        drawn = client(media_stack, caller).images.create_variation(
            model="pocket", image=PICTURE, n=2, response_format="url"
        )

    assert drawn.data is not None
    assert len(drawn.data) == 2
    (listed,) = caller.http.get("/v1/requests").json()["data"]
    assert listed["task"] == "image-to-image"


def test_failed_image_is_reported_beside_the_others_and_not_charged(
    media_stack: Stack,
) -> None:
    caller = media_stack.caller()
    body = {"model": "pocket", "prompt": "!second", "n": 3}

    answer = caller.http.post("/v1/images/generations", json=body)

    found = json.loads(answer.text, parse_float=Decimal)
    assert len(found["data"]) == 2
    assert found["failed"] == [{"index": 1, "message": "The brush broke."}]
    assert (found["usage"]["images"], found["usage"]["cost"]) == (2, Decimal("0.02"))


def test_failure_is_free_and_also_reported_in_a_stream(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    with pytest.raises(openai.APIStatusError) as caught:
        api.images.generate(model="pocket", prompt="!fail")
    assert (caught.value.status_code, caught.value.code) == (424, "engine_error")
    with pytest.raises(openai.APIError, match="The brush broke"):
        list(api.images.generate(model="pocket", prompt="!fail", stream=True))

    assert caller.http.get("/v1/balance").json()["posted"] == "1"
    assert media_stack.held(caller) == 0


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": "x", "model": None}, "invalid_value", "model"),
        ({"prompt": "x", "n": 9}, "invalid_value", "n"),
        ({"prompt": "x", "size": "999x999"}, "invalid_value", "size"),
        ({"prompt": "x", "quality": "medium"}, "invalid_value", "quality"),
        ({"prompt": "x", "output_format": "gif"}, "invalid_value", "output_format"),
        ({"prompt": "x", "background": "transparent"}, "unsupported_parameter", "background"),
        ({"prompt": "x", "style": "vivid"}, "unsupported_parameter", "style"),
        ({"prompt": "x", "partial_images": 1}, "invalid_value", "partial_images"),
        ({"prompt": "x", "colour": "red"}, "unknown_parameter", "colour"),
        ({"prompt": "x", "model": "film"}, "task_not_supported", "model"),
        ({"prompt": "x", "image": "x"}, "invalid_value", "image"),
    ],
)
def test_unsupported_option_is_refused_by_name(
    body: dict[str, Any], code: str, param: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()

    answer = caller.http.post("/v1/images/generations", json={"model": "pocket", **body})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), answer.text
    assert media_stack.held(caller) == 0


def test_older_names_of_qualities_are_understood(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())

    plain = api.images.generate(model="pocket", prompt="x", quality="standard")
    fine = api.images.generate(model="pocket", prompt="x", quality="hd")

    costs = [one.usage.cost for one in (plain, fine)]  # type: ignore[union-attr]  # ours
    assert costs == [0.01, 0.03]


def test_a_body_that_is_neither_form_nor_object_is_refused(media_stack: Stack) -> None:
    caller = media_stack.caller()

    for content in (b"", b"[]", b"{"):
        answer = caller.http.post("/v1/images/generations", content=content)
        assert answer.json()["error"]["code"] == "invalid_json"


def test_same_form_under_the_same_key_is_one_request(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    def edit(prompt: str) -> str:
        raw = api.images.with_raw_response.edit(
            model="pocket",
            image=PICTURE,
            prompt=prompt,
            extra_headers={"Idempotency-Key": "mine"},
        )
        return raw.headers["x-request-id"]

    assert edit("blue") == edit("blue")
    with pytest.raises(openai.ConflictError):
        edit("red")
    assert caller.http.get("/v1/balance").json()["posted"] == "0.99"
    assert len(stored(media_stack, caller)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_disconnects_cancels(stream: bool, media_stack: Stack) -> None:
    caller = media_stack.caller()
    body = {"model": "pocket", "prompt": "!slow", "stream": stream}

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{media_stack.url}/v1/images/generations",
            json=body,
            headers={"Authorization": f"Bearer {caller.secret}"},
            timeout=1,
        )

    def cancelled() -> bool:
        listed = caller.http.get("/v1/requests").json()["data"]
        return [one["status"] for one in listed] == ["cancelled"]

    wait_for(cancelled, "the cancel")
    assert media_stack.held(caller) == 0


def test_openapi_document_describes_the_bodies(media_stack: Stack) -> None:
    paths = media_stack.caller().http.get("/schema/openapi.json").json()["paths"]

    content = paths["/v1/images/edits"]["post"]["requestBody"]["content"]
    assert {"application/json", "multipart/form-data"} == set(content)
    assert "output_format" in json.dumps(content["application/json"])
