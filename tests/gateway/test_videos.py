"""Videos by the unmodified OpenAI client: created, polled, fetched, listed, remixed, deleted."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.artist import Artist, mp4, png
from tests.gateway.test_files import client
from tests.gateway.test_media import DATA_URI, PICTURE, stored
from tests.stack import Stack, ended, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


def test_video_is_generated_while_its_client_polls(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    made = api.videos.create_and_poll(
        model="film",
        prompt="a ball that falls",
        seconds="4",
        size="128x72",  # type: ignore[arg-type]  # the types name OpenAI's own sizes
        poll_interval_ms=100,
    )

    assert (made.status, made.progress, made.object) == ("completed", 100, "video")
    assert (made.seconds, made.size, made.prompt) == ("4", "128x72", "a ball that falls")
    assert made.usage["cost"] == 0.4  # type: ignore[attr-defined]  # ours
    assert made.expires_at == (made.completed_at or 0) + 24 * 3600
    assert api.videos.download_content(made.id).content == mp4()
    thumbnail = api.videos.download_content(made.id, variant="thumbnail")
    assert thumbnail.content == png(8, 8)
    with pytest.raises(openai.NotFoundError, match="no spritesheet"):
        api.videos.download_content(made.id, variant="spritesheet")
    raw = api.videos.with_raw_response.retrieve(made.id)
    assert raw.headers["x-request-cost"] == "0.4"
    assert "openai-poll-after-ms" not in raw.headers


def test_progress_and_polling_interval_are_reported(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    raw = api.videos.with_raw_response.create(model="film", prompt="!slow")
    made = raw.parse()

    assert made.status in ("queued", "in_progress")
    assert made.seconds == "2"
    assert int(raw.headers["openai-poll-after-ms"]) >= 500
    wait_for(lambda: api.videos.retrieve(made.id).progress == 25, "a quarter")
    with pytest.raises(openai.NotFoundError, match="only a completed video"):
        api.videos.download_content(made.id)
    assert api.videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.videos.retrieve(made.id)
    wait_for(lambda: media_stack.held(caller) == 0, "the hold")
    assert caller.http.get("/v1/balance").json()["posted"] == "1"


def test_first_frame_is_sent_in_the_form_or_in_json(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    form = api.videos.create_and_poll(
        model="film", prompt="x", input_reference=PICTURE, extra_body={"seed": 5, "fps": 12}
    )
    json = caller.http.post(
        "/v1/videos",
        json={"model": "film", "prompt": "x", "input_reference": {"image_url": DATA_URI}},
    ).json()

    for video_id, seed in ((form.id, 5), (json["id"], None)):
        request_id = video_id.replace("video_", "req_")
        found = ended(caller, request_id)
        assert found["task"] == "image-to-video"
        assert artist.attached[request_id] == [PICTURE]
        job = next(job for job in artist.jobs if job.request_id == request_id)
        assert seed is None or (job.input["seed"], job.input["fps"]) == (5, 12)


def test_failed_request_has_a_reason_and_is_not_charged(media_stack: Stack) -> None:
    caller = media_stack.caller()

    made = client(media_stack, caller).videos.create_and_poll(model="film", prompt="!fail")

    assert made.status == "failed"
    assert made.error is not None
    assert (made.error.code, made.error.message) == ("engine_error", "The brush broke.")
    assert made.usage["cost"] == 0  # type: ignore[attr-defined]  # ours


def test_cancelled_video_is_reported_as_failed(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    made = api.videos.create(model="film", prompt="!slow")

    caller.http.post(f"/v1/requests/{made.id.replace('video_', 'req_')}/cancel")

    wait_for(lambda: api.videos.retrieve(made.id).status == "failed", "the end")
    error = api.videos.retrieve(made.id).error
    assert error is not None
    assert error.code == "cancelled"


def test_pages_list_every_video_once(media_stack: Stack) -> None:
    caller = media_stack.caller(credit="5")
    api = client(media_stack, caller)
    api.images.generate(model="pocket", prompt="no video")
    made = [api.videos.create_and_poll(model="film", prompt=str(n)).id for n in range(5)]

    assert [one.id for one in api.videos.list(limit=2)] == made[::-1]
    assert [one.id for one in api.videos.list(limit=2, order="asc")] == made
    with pytest.raises(openai.NotFoundError):
        api.videos.list(after="video_x")
    other = client(media_stack, media_stack.caller())
    assert list(other.videos.list()) == []
    with pytest.raises(openai.NotFoundError):
        other.videos.retrieve(made[0])


def test_deleting_a_video_deletes_its_attachments(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    made = api.videos.create_and_poll(model="film", prompt="x", input_reference=PICTURE)
    shown = caller.http.get(f"/v1/requests/{made.id.replace('video_', 'req_')}").json()
    url = shown["output"]["media"][0]["url"]
    assert httpx.get(url).is_success

    assert api.videos.delete(made.id).deleted

    assert stored(media_stack, caller) == []
    assert httpx.get(url).status_code == 410
    with pytest.raises(openai.NotFoundError):
        api.videos.retrieve(made.id)
    assert list(api.videos.list()) == []
    receipt = caller.http.get(f"/v1/requests/{shown['id']}/receipt").json()
    assert receipt["cost"] == "0.2"


@pytest.mark.parametrize("how", ["remix", "edit", "form"])
def test_remix_has_another_prompt_and_the_same_settings(
    how: str, media_stack: Stack, artist: Artist
) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    first = api.videos.create_and_poll(
        model="film", prompt="a ball", input_reference=PICTURE, extra_body={"seed": 7, "steps": 3}
    )

    if how == "remix":
        remix = api.videos.remix(first.id, prompt="a cube")
    else:
        # OpenAI's client in Python takes a file alone here; others send the id that it documents.
        asked = {"prompt": "a cube", "video": {"id": first.id}}
        form = {"prompt": (None, "a cube"), "video[id]": (None, first.id)}
        answer = caller.http.post(
            "/v1/videos/edits", **({"json": asked} if how == "edit" else {"files": form})
        )
        remix = openai.types.Video.construct(**answer.raise_for_status().json())

    assert (remix.remixed_from_video_id, remix.prompt) == (first.id, "a cube")
    request_id = remix.id.replace("video_", "req_")
    assert ended(caller, request_id)["status"] == "succeeded"
    one, other = (
        next(job for job in artist.jobs if job.request_id == id.replace("video_", "req_"))
        for id in (first.id, remix.id)
    )
    assert {**one.input, "prompt": "a cube"} == other.input
    assert artist.attached[request_id] == [PICTURE]
    assert one.attachments[0].key != other.attachments[0].key


def test_unsupported_video_tasks_are_refused(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    for wrong, order in (
        ("send the id of one", lambda: api.videos.edit(prompt="x", video=mp4())),
        ("extend a video", lambda: api.videos.extend(prompt="x", seconds="4", video=mp4())),
        ("a character", lambda: api.videos.create_character(name="Ann", video=mp4())),
    ):
        with pytest.raises(openai.BadRequestError, match=wrong) as refused:
            order()
        assert (refused.value.code, refused.value.param) == ("task_not_supported", "video")
    with pytest.raises(openai.NotFoundError, match="No such character: 'char_1'"):
        api.videos.get_character("char_1")
    with pytest.raises(openai.BadRequestError, match="video"):
        api.post("/videos/edits", body={"prompt": "x"}, cast_to=object)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": "x", "seconds": "9"}, "invalid_value", "seconds"),
        ({"prompt": "x", "seconds": "long"}, "invalid_value", "seconds"),
        ({"prompt": "x", "size": "720x1280"}, "invalid_value", "size"),
        ({"prompt": "x", "fps": 60}, "invalid_value", "fps"),
        ({"prompt": "x", "colour": "red"}, "unknown_parameter", "colour"),
        ({"prompt": "x", "model": "pocket"}, "task_not_supported", "model"),
        ({"prompt": "x", "video": DATA_URI}, "invalid_value", "video"),
    ],
)
@pytest.mark.parametrize("form", [True, False])
def test_unsupported_option_is_refused_by_name(
    body: dict[str, Any], code: str, param: str, form: bool, media_stack: Stack
) -> None:
    caller = media_stack.caller()
    asked = {"model": "film", **body}

    if form:
        fields = {name: (None, str(value)) for name, value in asked.items()}
        answer = caller.http.post("/v1/videos", files=fields)
    else:
        answer = caller.http.post("/v1/videos", json=asked)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), answer.text
    assert media_stack.held(caller) == 0
