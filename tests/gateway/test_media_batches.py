"""Images and videos in batches, with the unmodified OpenAI client: half price, exact charges."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import httpx
import openai

from tests.artist import Artist, mp4, png, wav
from tests.gateway.test_batches import client, ended, jsonl, line, results
from tests.gateway.test_media import DATA_URI, PICTURE, stored
from tests.stack import Caller, Stack, wait_for

GENERATIONS, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
SPEECH, REQUESTS = "/v1/audio/speech", "/v1/requests"


def draw(custom_id: str, prompt: str = "x", **more: Any) -> dict[str, Any]:
    body = {"model": "pocket", "prompt": prompt, **more}
    return line(custom_id, body, url=GENERATIONS)


def submit(api: openai.OpenAI, path: Any, *lines: dict[str, Any]) -> Any:
    file = api.files.create(file=("lines.jsonl", jsonl(*lines)), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h")


def body_of(row: dict[str, Any]) -> dict[str, Any]:
    assert row["response"]["status_code"] == 200
    body: dict[str, Any] = row["response"]["body"]
    return body


def balance(caller: Caller) -> Decimal:
    found = caller.http.get("/v1/balance").json()
    assert found["held"] == "0"
    return Decimal(found["posted"])


def test_images_in_a_batch_equal_live_ones_at_half_the_price(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    asked = {"size": "128x64", "seed": 3, "n": 2}
    live = json.loads(
        caller.http.post(GENERATIONS, json=draw("x", quality="high", **asked)["body"]).text,
        parse_float=Decimal,
    )

    made = submit(
        api,
        GENERATIONS,
        draw("both", quality="high", **asked),
        draw("bytes", response_format="b64_json", **asked),
        draw("address", response_format="url", **asked),
    )

    batch = ended(api, made.id)
    assert batch.status == "completed", batch.errors
    assert (batch.model, batch.request_counts.completed) == ("pocket", 3)
    found = results(api, batch.output_file_id)
    both = body_of(found["both"])
    changed = ("id", "created", "data", "usage")
    assert {**both, **dict.fromkeys(changed)} == {**live, **dict.fromkeys(changed)}
    assert list(both["data"][0]) == list(live["data"][0]) == ["url", "b64_json", "seed"]
    for name, keys in (
        ("both", {"url", "b64_json", "seed"}),
        ("bytes", {"b64_json", "seed"}),
        ("address", {"url", "seed"}),
    ):
        for number, picture in enumerate(body_of(found[name])["data"]):
            assert set(picture) == keys
            assert picture["seed"] == 3 + number
            if "b64_json" in keys:
                assert base64.b64decode(picture["b64_json"]) == png(128, 64, 3 + number)
            if "url" in keys:
                assert httpx.get(picture["url"]).content == png(128, 64, 3 + number)
    assert both["usage"]["cost"] == Decimal("0.03") == live["usage"]["cost"] / 2
    assert body_of(found["bytes"])["usage"]["cost"] == Decimal("0.01")
    receipt = caller.http.get(f"/v1/requests/{both['id']}/receipt").json()
    assert (receipt["service_class"], receipt["cost"]) == ("batch", "0.03")
    assert balance(caller) == 1 - Decimal("0.06") - Decimal("0.05")
    assert media_stack.findings() == []


def test_catalog_has_batch_prices_of_images_and_videos(media_stack: Stack) -> None:
    http = media_stack.caller().http

    pocket, film = (http.get(f"/v1/catalog/{name}").json()["batch"] for name in ("pocket", "film"))

    assert [row["amount"] for row in pocket["price"]] == ["0.005", "0.015"]
    assert [row["amount"] for row in film["price"]] == ["0.05"]


def test_urls_in_a_result_file_are_valid_until_its_outputs_expire(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    batch = ended(api, submit(api, GENERATIONS, draw("a", response_format="url")).id)

    (picture,) = body_of(results(api, batch.output_file_id)["a"])["data"]
    expires_at = int(httpx.URL(picture["url"]).params["expires"])
    assert 0 <= expires_at - (batch.expires_at + 86_400) <= 60


def test_images_can_be_edited_in_a_batch(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    upload = caller.http.post("/v1/uploads", content=png(5, 5)).json()["id"]
    bodies = {
        "masked": {"images": [{"image_url": DATA_URI}], "mask": {"image_url": DATA_URI}},
        "several": {"images": [{"file_id": upload}, {"image_url": DATA_URI}]},
        "gone": {"image": {"file_id": f"file-{'0' * 32}"}},
    }
    lines = [
        line(name, {"model": "pocket", "prompt": "x", **body}, url=EDITS)
        for name, body in bodies.items()
    ]

    batch = ended(api, submit(api, EDITS, *lines).id)

    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    found = results(api, batch.output_file_id)
    assert artist.attached[body_of(found["masked"])["id"]] == [PICTURE, PICTURE]
    assert artist.attached[body_of(found["several"])["id"]] == [png(5, 5), PICTURE]
    receipt = caller.http.get(f"/v1/requests/{body_of(found['masked'])['id']}/receipt").json()
    assert receipt["task"] == "image-edit"
    gone = results(api, batch.error_file_id)["gone"]
    assert (gone["response"]["status_code"], gone["error"]["code"]) == (404, "file_not_found")
    assert balance(caller) == 1 - Decimal("0.01")
    assert media_stack.findings() == []
    used = caller.http.get("/v1/usage", params={"tag:batch_id": batch.id}).json()["data"]
    assert [(row["usage"]["images"], row["cost"]) for row in used] == [(2, "0.01")]


def test_video_of_a_batch_is_downloaded_like_a_live_one(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    body = {"model": "film", "prompt": "a ball", "seconds": "3", "size": "128x72"}

    batch = ended(api, submit(api, VIDEOS, line("a", body, url=VIDEOS)).id)

    assert batch.status == "completed", batch.errors
    video = body_of(results(api, batch.output_file_id)["a"])
    assert (video["object"], video["status"], video["progress"]) == ("video", "completed", 100)
    assert (video["prompt"], video["seconds"], video["size"]) == ("a ball", "3", "128x72")
    assert video["usage"]["cost"] == Decimal("0.15")
    assert video["expires_at"] == batch.expires_at + 86_400
    shown = json.loads(caller.http.get(f"/v1/videos/{video['id']}").text, parse_float=Decimal)
    assert shown == video
    assert caller.http.get(f"/v1/videos/{video['id']}/content").content == mp4()
    assert balance(caller) == 1 - Decimal("0.15")


def test_failed_image_is_reported_in_its_line_and_failed_line_in_the_error_file(
    media_stack: Stack,
) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    batch = ended(
        api,
        submit(
            api, GENERATIONS, draw("partly", "!second", n=3, seed=1), draw("not at all", "!fail")
        ).id,
    )

    partly = body_of(results(api, batch.output_file_id)["partly"])
    assert [picture["seed"] for picture in partly["data"]] == [1, 3]
    assert partly["failed"] == [{"index": 1, "message": "The brush broke."}]
    assert (partly["usage"]["images"], partly["usage"]["cost"]) == (2, Decimal("0.01"))
    failed = results(api, batch.error_file_id)["not at all"]
    assert (failed["response"]["status_code"], failed["error"]["code"]) == (424, "engine_error")
    assert balance(caller) == 1 - Decimal("0.01")
    assert media_stack.findings() == []


def test_one_invalid_line_fails_the_batch_before_anything_runs(
    media_stack: Stack, artist: Artist
) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    drawn = len(artist.jobs)

    batch = ended(
        api,
        submit(
            api,
            GENERATIONS,
            draw("good"),
            draw("size", size="100x100"),
            draw("n", n=9),
            draw("stream", stream=True),
            draw("previews", previews=1),
            draw("style", style="vivid"),
            draw("other", model="film"),
            draw("steps", steps=11),
        ).id,
    )
    edits = ended(
        api, submit(api, EDITS, line("a", {"model": "pocket", "prompt": "x"}, url=EDITS)).id
    )
    videos = ended(
        api,
        submit(
            api,
            VIDEOS,
            line("a", {"model": "film", "prompt": "x", "seconds": 9}, url=VIDEOS),
            line("b", {"model": "pocket", "prompt": "x"}, url=VIDEOS),
        ).id,
    )

    assert batch.status == edits.status == videos.status == "failed"
    assert [(each.line, each.code, each.param) for each in batch.errors.data] == [
        (2, "invalid_value", "body.size"),
        (3, "invalid_value", "body.n"),
        (4, "unsupported_parameter", "body.stream"),
        (5, "unsupported_parameter", "body.previews"),
        (6, "unsupported_parameter", "body.style"),
        (7, "task_not_supported", "body.model"),
        (8, "invalid_value", "body.steps"),
    ]
    assert [(each.code, each.param) for each in edits.errors.data] == [
        ("missing_required_parameter", "body.image")
    ]
    assert [(each.code, each.param) for each in videos.errors.data] == [
        ("invalid_value", "body.seconds"),
        ("task_not_supported", "body.model"),
    ]
    assert len(artist.jobs) == drawn
    assert balance(caller) == 1


def test_cancelled_batch_keeps_finished_images(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    slow = [draw(f"slow {number}", "!slow") for number in range(5)]
    made = submit(api, GENERATIONS, draw("first", seed=5), *slow)
    wait_for(lambda: api.batches.retrieve(made.id).request_counts.completed == 1, "one line")

    api.batches.cancel(made.id)

    batch = ended(api, made.id)
    assert batch.status == "cancelled"
    (picture,) = body_of(results(api, batch.output_file_id)["first"])["data"]
    assert base64.b64decode(picture["b64_json"]) == png(64, 64, 5)
    rest = results(api, batch.error_file_id)
    assert {row["error"]["code"] for row in rest.values()} == {"batch_cancelled"}
    assert len(rest) == 5
    assert balance(caller) == 1 - Decimal("0.005")
    assert media_stack.findings() == []


def test_image_deleted_before_the_file_is_written_is_given_by_url(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    made = submit(
        api, GENERATIONS, draw("first", response_format="b64_json"), draw("slow", "!slow")
    )
    wait_for(lambda: api.batches.retrieve(made.id).request_counts.completed == 1, "one line")
    (drawn,) = caller.http.get("/v1/requests?status=succeeded").json()["data"]
    (blob,) = (path for path in stored(media_stack, caller) if drawn["id"] in path.parts)
    blob.unlink()
    api.batches.cancel(made.id)

    batch = ended(api, made.id)

    (picture,) = body_of(results(api, batch.output_file_id)["first"])["data"]
    assert set(picture) == {"url", "seed"}
    assert httpx.get(picture["url"]).status_code in (404, 410)


def test_line_can_have_as_large_images_as_a_live_request(
    media_stack: Stack, artist: Artist
) -> None:
    api = client(media_stack, media_stack.caller())
    picture = PICTURE + bytes(850_000)
    uri = "data:image/png;base64," + base64.b64encode(picture).decode()
    body = {"model": "pocket", "prompt": "x", "images": [uri] * 3, "mask": uri}
    assert len(json.dumps(body)) > 4 * 1024 * 1024, "must exceed the limit of a text body"

    batch = ended(api, submit(api, EDITS, line("a", body, url=EDITS)).id)

    found = results(api, batch.output_file_id)
    assert artist.attached[body_of(found["a"])["id"]] == [picture] * 4


def test_speech_in_a_batch_is_the_live_one_at_half_the_price(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    body = {"model": "mimic", "input": "Good morning.", "voice": "ann", "response_format": "wav"}
    live = caller.http.post(SPEECH, json=body)

    made = submit(api, SPEECH, line("hello", body, url=SPEECH))

    batch = ended(api, made.id)
    assert batch.status == "completed", batch.errors
    found = body_of(results(api, batch.output_file_id)["hello"])
    (audio,) = found["data"]
    assert base64.b64decode(audio["b64_json"]) == httpx.get(audio["url"]).content == live.content
    assert (audio["content_type"], audio["seconds"]) == ("audio/wav", Decimal("1.0"))
    assert found["usage"]["cost"] == Decimal(live.headers["x-request-cost"]) / 2
    assert balance(caller) == 1 - Decimal(live.headers["x-request-cost"]) * 3 / 2


def test_mistake_in_a_line_of_speech_is_named_as_the_endpoint_names_it(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    body = {"model": "mimic", "input": "x" * 101, "voice": "ann"}

    made = submit(
        api,
        SPEECH,
        line("long", body, url=SPEECH),
        line("sse", {**body, "input": "x", "stream_format": "sse"}, url=SPEECH),
    )

    batch = ended(api, made.id)
    assert batch.status == "failed"
    assert [(one.line, one.param) for one in batch.errors.data] == [
        (1, "body.input"),
        (2, "body.stream_format"),
    ]


def test_music_and_failures_of_the_native_endpoint_in_a_batch(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    def native(custom_id: str, model: str, **value: Any) -> dict[str, Any]:
        return line(custom_id, {"model": model, "input": value}, url=REQUESTS)

    made = submit(
        api,
        REQUESTS,
        native("waltz", "tune", prompt="a waltz", seconds=3),
        native("half", "pocket", prompt="!second", n=2),
        native("none", "tune", prompt="!fail"),
    )

    batch = ended(api, made.id)
    assert (batch.status, batch.request_counts.failed) == ("completed", 1), batch.errors
    found = results(api, batch.output_file_id)
    waltz = body_of(found["waltz"])
    (audio,) = waltz["output"]["media"]
    assert base64.b64decode(audio["b64_json"]) == httpx.get(audio["url"]).content == wav(3000)
    assert (waltz["object"], waltz["status"], waltz["cost"]) == ("request", "succeeded", "0.15")
    drawn, missing = body_of(found["half"])["output"]["media"]
    assert {"url", "b64_json"} <= drawn.keys()
    assert missing["error"] == "The brush broke."
    assert not {"url", "b64_json", "stored"} & missing.keys()
    (failed,) = results(api, batch.error_file_id).values()
    assert failed["error"]["code"] == "engine_error"
    assert balance(caller) == 1 - Decimal("0.15") - Decimal("0.005")
