"""Images and videos in the native API: inputs, attachments, outputs and their deletion."""

from __future__ import annotations

import asyncio
import base64
import http.server
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from gateway.files.retention import MediaStore
from gateway.sql.database import Database
from gateway.tables.core import outputs
from gateway.tables.files import media
from tests.artist import Artist, mp4, png
from tests.gateway.test_requests import events
from tests.stack import Caller, Stack, ended, wait_for
from workers.contract.blobs import Blobs

PICTURE = png(16, 16, 7)
DATA_URI = "data:image/png;base64," + base64.b64encode(PICTURE).decode()


def place(caller: Caller, model: str = "pocket", **value: Any) -> httpx.Response:
    return caller.http.post("/v1/requests", json={"model": model, "input": value})


def finished(caller: Caller, model: str = "pocket", **value: Any) -> dict[str, Any]:
    answer = place(caller, model, **value)
    assert answer.status_code == 202, answer.text
    return ended(caller, answer.json()["id"])


def stored(stack: Stack, caller: Caller) -> list[Path]:
    """Return all stored blobs of an account."""
    folder = stack.directory / "blobs" / str(caller.account_id)
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def site() -> Iterator[str]:
    """A server with an image, a redirect to it, an endless redirect and a too large file."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            places = {"/moved": "/picture.png", "/round": "/round"}
            if path in places:
                self.send_response(302)
                self.send_header("Location", places[path])
                self.end_headers()
                return
            data = {"/picture.png": PICTURE, "/text": b"hello" * 20, "/much": bytes(1_000_001)}
            self.send_response(200 if path in data else 404)
            self.send_header("Set-Cookie", "session=1")
            self.end_headers()
            self.wfile.write(data.get(path, b""))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_images_are_generated_charged_and_downloaded_without_a_key(media_stack: Stack) -> None:
    caller = media_stack.caller()

    found = finished(caller, prompt="a red circle", n=2, seed=5)

    assert (found["status"], found["cost"]) == ("succeeded", "0.02")
    first, second = found["output"]["media"]
    assert (first["index"], first["width"], first["seed"]) == (0, 64, 5)
    assert (second["index"], second["seed"]) == (1, 6)
    assert "blob" not in first
    assert first["url"].startswith(f"{media_stack.url}/v1/blobs/{found['id']}/")
    assert str(caller.account_id) not in first["url"].partition("?")[0].split("/")
    answer = httpx.get(first["url"])
    assert answer.content == png(64, 64, 5)
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    receipt = caller.http.get(f"/v1/requests/{found['id']}/receipt").json()
    assert [line["unit"] for line in receipt["lines"]] == ["image"]
    assert httpx.get(receipt["media"][1]["url"]).content == png(64, 64, 6)


def test_quality_selects_price_and_steps(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    value = {"prompt": "fine", "quality": "high", "size": "128x64", "n": 2}

    quoted = caller.http.post("/v1/quote", json={"model": "pocket", "input": value}).json()
    found = finished(caller, **value)

    assert (quoted["max_cost"], found["cost"]) == ("0.06", "0.06")
    job = next(job for job in artist.jobs if job.request_id == found["id"])
    assert (job.input["steps"], job.input["width"], job.input["guidance"]) == (8, 128, 4)
    assert (job.limits.images, job.limits.steps) == (2, 16)
    assert job.limits.attributes == {"size": "128x64", "quality": "high"}


def test_named_task_replaces_the_selected_one(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    body = {"model": "pocket", "input": {"prompt": "brighter", "image": DATA_URI}}

    first = caller.http.post("/v1/requests", json=body).json()["id"]
    named = caller.http.post("/v1/requests", json={**body, "task": "image-edit"}).json()["id"]
    found = [ended(caller, one)["task"] for one in (first, named)]
    refused = caller.http.post("/v1/requests", json={**body, "task": "image-relight"})
    unfit = caller.http.post(
        "/v1/requests", json={"model": "pocket", "input": {"prompt": "x"}, "task": "image-edit"}
    )

    assert found == ["image-to-image", "image-edit"]
    assert (
        refused.json()["error"]["message"]
        == "pocket does text-to-image, image-to-image, image-edit, image-blend, not image-relight."
    )
    assert unfit.json()["error"]["param"] == "input.image"


def test_images_are_blended_unless_only_one_is_sent(media_stack: Stack) -> None:
    caller = media_stack.caller()
    both = finished(caller, prompt="together", images=[DATA_URI, DATA_URI])
    one = {"prompt": "together", "images": [DATA_URI]}
    refused = caller.http.post(
        "/v1/requests", json={"model": "pocket", "input": one, "task": "image-blend"}
    )

    assert (both["task"], both["status"]) == ("image-blend", "succeeded")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.images")
    assert refused.json()["error"]["message"].endswith("needs 2 images; send them in input.images.")
    assert media_stack.held(caller) == 0


def test_outputs_are_returned_as_base64_on_request(media_stack: Stack) -> None:
    caller = media_stack.caller()
    found = finished(caller, prompt="x", seed=1)

    whole = caller.http.get(f"/v1/requests/{found['id']}?media=base64").json()

    (medium,) = whole["output"]["media"]
    assert base64.b64decode(medium["b64_json"]) == png(64, 64, 1)


def test_failed_image_among_several_is_reported_and_not_charged(media_stack: Stack) -> None:
    found = finished(media_stack.caller(), prompt="!second", n=3)

    assert (found["status"], found["cost"]) == ("succeeded", "0.02")
    assert [("url" in one, one.get("error")) for one in found["output"]["media"]] == [
        (True, None),
        (False, "The brush broke."),
        (True, None),
    ]


def test_previews_of_an_image_are_sent_as_events(media_stack: Stack) -> None:
    caller = media_stack.caller()
    found = finished(caller, prompt="x", previews=2)

    previews = [data for _, data in events(caller, found["id"]) if data["event"] == "preview"]

    assert [one["index"] for one in previews] == [0, 1]
    assert httpx.get(previews[1]["url"]).content == png(8, 8, 1)


def test_previews_of_a_video_are_sent_as_events(media_stack: Stack) -> None:
    caller = media_stack.caller()
    found = finished(caller, "film", prompt="x", seconds=2, previews=2)

    previews = [data for _, data in events(caller, found["id"]) if data["event"] == "preview"]

    assert [one["index"] for one in previews] == [0, 1]
    assert httpx.get(previews[1]["url"]).content == png(8, 8, 1)


@pytest.mark.parametrize(
    ("value", "param", "said"),
    [
        ({}, "input.prompt", "needs a text"),
        ({"prompt": "x", "n": 5}, "input.n", "at most 4"),
        ({"prompt": "x", "size": "65x64"}, "input.size", "64x64, 128x64"),
        ({"prompt": "x", "size": "big"}, "input.size", "pattern"),
        ({"prompt": "x", "width": 64}, "input.height", "must be sent together"),
        ({"prompt": "x", "width": 64, "height": 64, "size": "128x64"}, "input.size", "differs"),
        ({"prompt": "x", "steps": 11}, "input.steps", "at most 10"),
        ({"prompt": "x", "guidance": 10}, "input.guidance", "at most 9"),
        ({"prompt": "x", "scheduler": "magic"}, "input.scheduler", "euler, ddim"),
        ({"prompt": "x", "adapters": {"oils": 1}}, "input.adapters.oils", "no adapter oils"),
        ({"prompt": "x", "quality": "best"}, "input.quality", "low, high"),
        ({"prompt": "x", "resolution": "720p"}, "input.resolution", "does not support"),
        ({"prompt": "x", "scale": 3}, "input.scale", "upscales 2 times"),
        ({"prompt": "x", "mask": DATA_URI}, "input.mask", "requires an image"),
        ({"prompt": "x", "strength": 0.5}, "input.strength", "send an image"),
        ({"prompt": "x", "seconds": 2}, "input.seconds", "Unknown parameter"),
        ({"prompt": "x", "parameters": {"cfg": 1}}, "input.parameters.cfg", "runs here"),
        ({"prompt": "x", "images": [DATA_URI] * 4}, "input.images", "at most 3"),
        ({"prompt": "x", "image": "here"}, "input.image", "data URI"),
        ({"prompt": "x", "image": "data:image/png;base64,!!"}, "input.image", "base64"),
        ({"prompt": "x", "image": "data:image/png;base64,AAAA"}, "input.image", "unknown type"),
        ({"prompt": "x", "image": {"upload": "file-1"}}, "input.image", "Unknown file"),
    ],
)
def test_invalid_image_inputs_are_refused_by_name_without_a_hold(
    value: dict[str, Any], param: str, said: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()

    answer = place(caller, **value)

    error = answer.json()["error"]
    assert answer.status_code in (400, 404), answer.text
    assert error["param"] == param
    assert said in error["message"]
    assert media_stack.held(caller) == 0
    assert stored(media_stack, caller) == []


def test_image_can_be_a_data_uri_a_url_or_an_upload(
    media_stack: Stack, artist: Artist, site: str
) -> None:
    caller = media_stack.caller()
    sent = caller.http.post("/v1/uploads", content=png(4, 4))
    form = caller.http.post("/v1/uploads", files={"file": ("a.png", png(5, 5), "text/plain")})
    assert (sent.status_code, form.status_code) == (201, 201), form.text
    assert form.json()["content_type"] == "image/png"
    images = [DATA_URI, f"{site}/moved", {"upload": sent.json()["id"]}]

    found = finished(caller, prompt="x", images=images, mask=form.json()["id"])

    assert (found["task"], found["status"]) == ("image-edit", "succeeded")
    assert artist.attached[found["id"]] == [PICTURE, PICTURE, png(4, 4), png(5, 5)]
    job = next(job for job in artist.jobs if job.request_id == found["id"])
    assert (job.input["images"], job.input["mask"]) == (3, True)
    assert [ref.content_type for ref in job.attachments] == ["image/png"] * 4


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("/text", "unsupported_media_type", "png, jpeg, webp, gif"),
        ("/much", "source_too_large", "1000000 bytes"),
        ("/none", "source_unreachable", "status 404"),
        ("/round", "source_unreachable", "more than 5 redirects"),
        (":1/", "source_unreachable", "does not respond"),
    ],
)
def test_url_without_an_image_is_refused_and_leaves_nothing(
    path: str, code: str, said: str, media_stack: Stack, site: str
) -> None:
    caller = media_stack.caller()
    url = "http://127.0.0.1:1/" if path == ":1/" else site + path

    answer = place(caller, prompt="x", images=[DATA_URI, url])

    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, "input.images.1")
    assert said in error["message"]
    assert stored(media_stack, caller) == []


def test_fetched_image_of_a_request_without_credit_is_deleted(
    media_stack: Stack, artist: Artist
) -> None:
    caller = media_stack.caller(credit="0")
    seen = len(artist.jobs)

    answer = place(caller, prompt="x", image=DATA_URI)

    assert answer.status_code == 402
    assert stored(media_stack, caller) == []
    assert len(artist.jobs) == seen


def test_upload_is_private_to_its_account(media_stack: Stack) -> None:
    upload = media_stack.caller().http.post("/v1/uploads", content=PICTURE).json()["id"]

    answer = place(media_stack.caller(), prompt="x", image={"upload": upload})

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "file_not_found"


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [(b"", 400, "empty_file"), (b"MZ" * 50, 400, "unsupported_media_type"),
     (PICTURE + bytes(1_000_000), 413, "file_too_large")],
)  # fmt: skip
def test_upload_that_is_not_an_accepted_file_is_refused(
    content: bytes, status: int, code: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()

    answer = caller.http.post("/v1/uploads", content=content)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert stored(media_stack, caller) == []


def test_video_can_be_downloaded_in_ranges(media_stack: Stack) -> None:
    caller = media_stack.caller()

    found = finished(caller, "film", prompt="rain", seconds=1.5, size="128x72")

    assert (found["status"], found["cost"]) == ("succeeded", "0.15")
    video, thumbnail = found["output"]["media"]
    assert (video["kind"], video["duration_ms"], thumbnail["role"]) == ("video", 1500, "thumbnail")
    whole = mp4()
    for asked, start, end in [
        ("bytes=0-9", 0, 10),
        ("bytes=100-", 100, len(whole)),
        ("bytes=-7", len(whole) - 7, len(whole)),
        ("bytes=10-99999", 10, len(whole)),
    ]:
        part = httpx.get(video["url"], headers={"Range": asked})
        assert (part.status_code, part.content) == (206, whole[start:end])
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{len(whole)}"
    beyond = httpx.get(video["url"], headers={"Range": "bytes=99999-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(whole)}")
    head = httpx.head(video["url"])
    assert head.status_code == 200, head.headers
    assert (head.headers["content-length"], head.content) == (str(len(whole)), b"")
    assert httpx.get(video["url"]).content == whole


def test_url_opens_only_its_own_output_and_only_while_it_exists(
    media_stack: Stack,
) -> None:
    caller = media_stack.caller()
    found = finished(caller, prompt="x", n=2)
    first, second = (one["url"] for one in found["output"]["media"])
    path, query = first.split("?")

    forged = [
        second.split("?")[0] + "?" + query,
        path + "?" + query.replace("expires=1", "expires=2"),
        path,
        first[:-1] + ("A" if first[-1] != "A" else "B"),
        f"{media_stack.url}/v1/blobs/req_{'0' * 32}/x/0.png?{query}",
    ]
    assert [httpx.get(url).status_code for url in forged] == [403] * 5
    assert httpx.get(f"{media_stack.url}/v1/blobs/../../etc/passwd?{query}").status_code == 404

    for output in stored(media_stack, caller):
        output.unlink()
    assert httpx.get(first).status_code == 410


def pass_time(stack: Stack, request_id: str, *, expired: bool) -> None:
    """Make a request's blobs due for deletion and, if ``expired``, end their retention."""

    async def clear() -> None:
        database = Database(stack.database_url)
        now = datetime.now(UTC)
        with database.transaction() as connection:
            connection.execute(
                update(media).where(media.c.request_id == request_id).values(clear_at=now)
            )
            if expired:
                connection.execute(
                    update(outputs).where(outputs.c.request_id == request_id).values(expires_at=now)
                )
        blobs = Blobs(stack.environment()["BLOB_URL"])
        await MediaStore(database, blobs, retention=timedelta(hours=24)).delete_ended()
        await database.close()

    asyncio.run(clear())


def test_expired_request_leaves_only_its_receipt(media_stack: Stack) -> None:
    caller = media_stack.caller()
    found = finished(caller, prompt="x", image=DATA_URI)
    url = found["output"]["media"][0]["url"]
    assert len(stored(media_stack, caller)) == 2

    pass_time(media_stack, found["id"], expired=False)
    assert httpx.get(url).is_success
    pass_time(media_stack, found["id"], expired=True)

    assert stored(media_stack, caller) == []
    gone = httpx.get(url)
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "blob_expired")
    assert caller.http.get(f"/v1/requests/{found['id']}/receipt").json()["cost"] == "0.01"


def test_cancelled_image_request_is_not_charged(media_stack: Stack) -> None:
    caller = media_stack.caller()
    request_id = place(caller, prompt="!slow").json()["id"]

    caller.http.post(f"/v1/requests/{request_id}/cancel")

    assert ended(caller, request_id)["status"] == "cancelled"
    wait_for(lambda: media_stack.held(caller) == 0, "the hold")
