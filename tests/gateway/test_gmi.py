"""GMI Cloud's request queue, called as its clients do."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from tests.artist import Artist, mp4, png, wav
from tests.gateway.test_gmi_payloads import MINIMAX_SPEECH
from tests.gateway.test_media import DATA_URI, PICTURE, stored
from tests.stack import Caller, Stack, ended, order, wait_for

STATES = ("queued", "dispatched", "processing", "success")
QUEUE = "/api/v1/ie/requestqueue/apikey"


def place(caller: Caller, model: str = "pocket", **payload: Any) -> httpx.Response:
    return caller.http.post(f"{QUEUE}/requests", json={"model": model, "payload": payload})


def finished(caller: Caller, model: str = "pocket", **payload: Any) -> dict[str, Any]:
    answer = place(caller, model, **payload)
    assert answer.status_code == 200, answer.text
    return polled(caller, answer.json()["request_id"])


def polled(caller: Caller, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def over() -> bool:
        answer = caller.http.get(f"{QUEUE}/requests/{request_id}")
        found.update(json.loads(answer.text, parse_float=Decimal))
        return found["status"] in ("success", "failed", "cancelled")

    wait_for(over, request_id)
    return found


def uploaded(caller: Caller, file_type: str, content_type: str, data: bytes) -> str:
    answer = caller.http.post(f"{QUEUE}/upload-url", json={"file_type": file_type}).json()
    put = httpx.put(answer["upload_url"], content=data, headers={"Content-Type": content_type})
    assert put.status_code == 200, put.text
    return str(answer["public_url"])


def test_image_request_is_submitted_polled_and_fetched(media_stack: Stack) -> None:
    caller = media_stack.caller()

    raw = place(caller, prompt="a red circle", size="128x64", seed="3", quality="high")
    placed, found = raw.json(), polled(caller, raw.json()["request_id"])

    # It may be finished by the time of the answer, which then says so.
    assert placed.keys() >= {"request_id", "status", "created_at", "updated_at", "queued_at"}
    assert (placed["model"], placed["status"] in STATES) == ("pocket", True)
    assert abs(placed["created_at"] - time.time()) < 60
    assert raw.headers["x-request-id"] == placed["request_id"] == found["request_id"]
    outcome = found["outcome"]
    (medium,) = outcome["media_urls"]
    assert (found["status"], medium["id"]) == ("success", "0")
    assert medium["url"] == outcome["image_url"]
    assert httpx.get(medium["url"]).content == png(128, 64, 3)
    assert found["payload"] == {
        "prompt": "a red circle",
        "size": "128x64",
        "seed": 3,
        "quality": "high",
        "steps": 8,
        "guidance": 4,
    }
    assert (found["org_id"], found["is_public"]) == (str(caller.account_id), False)
    assert found["usage"] == {"images": 1, "steps": 8, "cost": Decimal("0.03")}
    answer = caller.http.get(f"{QUEUE}/requests/{found['request_id']}")
    assert answer.headers["x-request-cost"] == "0.03"


def test_video_has_thumbnail_and_length_and_passes_through_gmis_states(
    media_stack: Stack,
) -> None:
    caller = media_stack.caller()

    slow = place(caller, "film", prompt="!slow").json()["request_id"]
    found = finished(caller, "film", prompt="a ball", aspect_ratio="16:9", duration="4", fps=12)

    outcome = found["outcome"]
    assert httpx.get(outcome["video_url"]).content == mp4()
    assert httpx.get(outcome["thumbnail_image_url"]).content == png(8, 8)
    assert [one["url"] for one in outcome["media_urls"]] == [outcome["video_url"]]
    assert outcome["duration_ms"] == 4000
    assert (found["payload"]["size"], found["payload"]["duration"]) == ("128x72", 4)
    assert found["usage"]["cost"] == Decimal("0.4")
    wait_for(
        lambda: caller.http.get(f"{QUEUE}/requests/{slow}").json()["status"] == "processing",
        "its progress",
    )
    assert caller.http.get(f"{QUEUE}/requests/{slow}").json()["progress"] == 25
    caller.http.delete(f"{QUEUE}/requests/{slow}")


def test_client_that_prefers_to_wait_gets_the_outcome(media_stack: Stack) -> None:
    caller = media_stack.caller()

    def order_of(prompt: str, prefer: str) -> httpx.Response:
        return caller.http.post(
            f"{QUEUE}/requests",
            json={"model": "pocket", "payload": {"prompt": prompt}},
            headers={"Prefer": prefer},
        )

    quick = order_of("x", "respond-async, wait")
    slow = order_of("!slow", "wait=1")

    assert quick.json()["status"] == "success"
    assert quick.json()["outcome"]["image_url"]
    assert quick.headers["preference-applied"] == "wait"
    assert quick.headers["x-request-cost"] == "0.01"
    assert slow.status_code == 200
    assert slow.json()["status"] in STATES[:3]
    request_id = slow.json()["request_id"]
    assert caller.http.delete(f"{QUEUE}/requests/{request_id}").status_code == 200
    assert polled(caller, request_id)["status"] == "cancelled"


@pytest.mark.parametrize("way", ["delete", "cancel"])
def test_cancelled_request_is_not_charged(way: str, media_stack: Stack) -> None:
    caller = media_stack.caller()
    request_id = place(caller, prompt="!slow").json()["request_id"]

    if way == "delete":
        answer = caller.http.delete(f"{QUEUE}/requests/{request_id}")
    else:
        answer = caller.http.post(f"{QUEUE}/requests/{request_id}/cancel")

    assert answer.status_code == 200
    found = polled(caller, request_id)
    assert (found["status"], found["usage"]["cost"]) == ("cancelled", 0)
    again = caller.http.delete(f"{QUEUE}/requests/{request_id}").json()
    assert again["status"] == "cancelled"
    assert media_stack.held(caller) == 0


def test_failed_request_has_a_reason_and_is_not_charged(media_stack: Stack) -> None:
    caller = media_stack.caller()

    found = finished(caller, prompt="!fail")
    partly = finished(caller, prompt="!second", num_images=3)

    assert (found["status"], found["usage"]["cost"]) == ("failed", 0)
    assert found["error"] == found["outcome"]["error"] == "The brush broke."
    assert partly["status"] == "success"
    assert [one["id"] for one in partly["outcome"]["media_urls"]] == ["0", "2"]
    assert partly["outcome"]["failed"] == [{"id": "1", "reason": "The brush broke."}]
    assert partly["usage"]["cost"] == Decimal("0.02")


def test_fields_are_accepted_under_their_usual_names(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()

    found = finished(
        caller,
        prompt="x",
        image_url=DATA_URI,
        num_images="2",
        num_inference_steps="3",
        guidance_scale="2.5",
        strength=0.5,
        output_format="webp",
        seed=-1,
        mask=None,
    )
    clip = finished(caller, "film", prompt="x", first_frame={"url": DATA_URI}, n=1, seconds=1)

    job = next(job for job in artist.jobs if job.request_id == found["request_id"])
    named = {"n": 2, "steps": 3, "guidance": 2.5, "strength": 0.5, "format": "webp", "images": 1}
    assert job.input.items() >= named.items()
    assert artist.attached[found["request_id"]] == [PICTURE]
    (url,) = found["payload"]["image"]
    assert httpx.get(url).content == PICTURE
    film = next(job for job in artist.jobs if job.request_id == clip["request_id"])
    assert (film.task, film.input["duration_ms"]) == ("image-to-video", 1000)


@pytest.mark.parametrize(
    ("model", "payload", "said"),
    [
        ("pocket", {}, "payload is empty"),
        ("pocket", {"size": "64x64"}, "send prompt"),
        ("pocket", {"prompt": "x", "colour": "red"}, "Unknown parameter: colour"),
        ("pocket", {"prompt": "x", "num_images": 9}, "num_images: n is 9"),
        ("pocket", {"prompt": "x", "num_images": "many"}, "num_images: Invalid value for n"),
        ("pocket", {"prompt": "x", "n": 1, "num_images": 1}, "n and num_images are synonyms"),
        ("pocket", {"prompt": "x", "num_inference_steps": 99}, "num_inference_steps: steps is 99"),
        ("pocket", {"prompt": "x", "size": "2K"}, "Invalid value for size"),
        ("pocket", {"prompt": "x", "size": "999*999"}, "size is 999x999"),
        ("pocket", {"prompt": "x", "aspect_ratio": "9:16"}, "its sizes are 64x64, 128x64"),
        (
            "pocket",
            {"prompt": "x", "size": "64x64", "aspect_ratio": "2:1"},
            "aspect_ratio is '2:1', which contradicts the size 64x64",
        ),
        ("pocket", {"prompt": "x", "image_url": "x"}, "image_url: Invalid value for images.0"),
        ("film", {"prompt": "x", "n": 2}, "n is 2; a request to film generates exactly one"),
        ("film", {"prompt": "x", "duration": 99}, "duration: seconds is 99"),
        ("film", {"prompt": "x", "strength": 0.5}, "Unknown parameter: strength"),
    ],
)
def test_unsupported_values_are_refused_under_the_clients_key(
    model: str, payload: dict[str, Any], said: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()

    answer = caller.http.post(f"{QUEUE}/requests", json={"model": model, "payload": payload})

    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    assert said in answer.json()["error"]
    assert media_stack.held(caller) == 0
    assert stored(media_stack, caller) == []


def test_every_error_is_a_sentence(media_stack: Stack) -> None:
    caller = media_stack.caller()
    poor = media_stack.caller(credit="0")
    reader = media_stack.caller(scopes=["read"])
    url = f"{media_stack.url}{QUEUE}"
    body = {"model": "pocket", "payload": {"prompt": "x"}}
    named = {"Idempotency-Key": "mine"}

    first = caller.http.post(f"{QUEUE}/requests", json=body, headers=named).json()
    other = {**body, "payload": {"prompt": "y"}}
    again = caller.http.post(f"{QUEUE}/requests", json=body, headers=named).json()
    answers = {
        401: httpx.get(f"{url}/requests"),
        402: poor.http.post(f"{QUEUE}/requests", json=body),
        403: reader.http.post(f"{QUEUE}/requests", json=body),
        404: caller.http.post(f"{QUEUE}/requests", json={"model": "nobody", "payload": {}}),
        405: caller.http.put(f"{QUEUE}/requests"),
        409: caller.http.post(f"{QUEUE}/requests", json=other, headers=named),
        413: place(caller, prompt="x", image="data:image/png;base64," + "A" * 1_400_000),
        400: caller.http.post(f"{QUEUE}/requests", json={"model": "pocket"}),
    }
    nowhere = caller.http.get(f"{QUEUE}/nowhere")

    for status, answer in answers.items():
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
        assert isinstance(answer.json()["error"], str)
    assert (nowhere.status_code, list(nowhere.json())) == (404, ["error"])
    assert again["request_id"] == first["request_id"]
    # Elsewhere they are what they were.
    assert caller.http.get("/v1/nowhere").json()["error"]["code"] == "not_found"


def test_rate_limit_is_reported_in_the_usual_headers(media_stack: Stack) -> None:
    caller = media_stack.caller(requests_per_minute=1)

    first, second = place(caller, prompt="x"), place(caller, prompt="x")

    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert (second.status_code, list(second.json())) == (429, ["error"])
    assert 0 < int(second.headers["retry-after"]) <= 60


def test_requests_are_listed_in_pages_and_by_model(media_stack: Stack) -> None:
    caller = media_stack.caller(credit="5")
    assert caller.http.get(f"{QUEUE}/requests").json() == {"requests": [], "total": 0}
    made = [finished(caller, prompt=str(n))["request_id"] for n in range(3)]
    film = finished(caller, "film", prompt="x")["request_id"]

    def listed(**query: Any) -> tuple[list[str], int]:
        found = caller.http.get(f"{QUEUE}/requests", params=query).json()
        return [one["request_id"] for one in found["requests"]], found["total"]

    assert listed() == ([film, *made[::-1]], 4)
    assert listed(model_id="pocket", limit=2) == (made[:0:-1], 3)
    assert listed(model_id="pocket", limit=2, offset=2) == (made[:1], 3)
    assert listed(model_id="dall-e-3", offset=3) == ([], 3)
    assert listed(offset=99) == ([], 4)
    assert listed(model_id="nobody") == ([], 0)
    assert caller.http.get(f"{QUEUE}/requests", params={"limit": 0}).status_code == 400
    organisation = {"X-Organization-ID": "somebody"}
    assert caller.http.get(f"{QUEUE}/requests", headers=organisation).status_code == 200
    other = media_stack.caller()
    assert other.http.get(f"{QUEUE}/requests").json()["total"] == 0
    for call in ("GET", "DELETE"):
        assert other.http.request(call, f"{QUEUE}/requests/{film}").status_code == 404
    assert other.http.post(f"{QUEUE}/requests/{film}/cancel").status_code == 404
    assert caller.http.get(f"{QUEUE}/requests/nothing").status_code == 404


def test_request_is_the_same_in_every_dialect(media_stack: Stack) -> None:
    caller = media_stack.caller()
    native = caller.http.post("/v1/requests", json={"model": "pocket", "input": {"prompt": "a"}})

    there = polled(caller, native.json()["id"])
    here = ended(caller, finished(caller, prompt="b")["request_id"])

    assert (there["status"], there["payload"]["prompt"]) == ("success", "a")
    assert (here["status"], here["cost"]) == ("succeeded", "0.01")


def test_models_list_their_parameters_and_exact_price(media_stack: Stack) -> None:
    caller = media_stack.caller()

    names = caller.http.get(f"{QUEUE}/models").json()
    pocket = caller.http.get(f"{QUEUE}/models/pocket").json()
    film = caller.http.get(f"{QUEUE}/models/sora-2").json()

    assert names == {"model_ids": ["pocket", "film", "tune", "reader", "mimic"]}
    assert pocket["price_info"] == {
        "price": "0.01",
        "pricing_type": "image",
        "unit": "USD",
        "minimum": None,
        "lines": [
            {"unit": "image", "amount": "0.01", "per": 1, "when": None},
            {"unit": "image", "amount": "0.03", "per": 1, "when": {"quality": "high"}},
        ],
    }
    assert (pocket["model"], pocket["model_type"]) == ("pocket", "image")
    assert pocket["modalities"] == {"input": ["text", "image"], "output": ["image"]}
    assert abs(pocket["created_at"] - time.time()) < 3600
    by_name = {one["name"]: one for one in pocket["parameters"]}
    assert by_name["n"] == {
        "name": "n",
        "type": "integer",
        "required": False,
        "default": 1,
        "min": 1,
        "max": 4,
    }
    assert by_name["size"]["options"] == ["64x64", "128x64"]
    assert by_name["quality"]["default"] == "low"
    assert (by_name["steps"]["max"], by_name["guidance_scale"]["max"]) == (10, 9)
    assert by_name["image"]["max_items"] == 3
    video = {one["name"]: one for one in film["parameters"]}
    assert video["duration"] == {
        "name": "duration",
        "type": "number",
        "required": False,
        "default": 2,
        "above": 0,
        "max": 8,
    }
    assert video["aspect_ratio"]["options"] == ["1:1", "16:9"]
    assert caller.http.get(f"{QUEUE}/models/nobody").status_code == 404


def test_every_listed_parameter_is_accepted(media_stack: Stack) -> None:
    caller = media_stack.caller()
    given: dict[str, Any] = {"string": "x", "integer": 1, "number": 1, "array": [DATA_URI]}

    for model in ("pocket", "film"):
        payload = {"prompt": "x", "image": [DATA_URI]}
        for one in caller.http.get(f"{QUEUE}/models/{model}").json()["parameters"]:
            value = one.get("default", one.get("options", [given[one["type"]]])[0])
            payload[one["name"]] = DATA_URI if one["name"] == "mask" else value
        payload["aspect_ratio"] = "1:1"
        answer = place(caller, model, **payload)
        assert answer.status_code == 200, answer.text


def test_file_is_uploaded_to_a_presigned_url_and_referred_to_by_its_public_url(
    media_stack: Stack, artist: Artist
) -> None:
    caller = media_stack.caller()
    picture = uploaded(caller, "jpg", "image/jpg", PICTURE)

    found = finished(caller, prompt="x", image=[picture])
    native = caller.http.post(
        "/v1/requests", json={"model": "pocket", "input": {"prompt": "x", "image": picture}}
    )

    assert artist.attached[found["request_id"]] == [PICTURE]
    assert ended(caller, native.json()["id"])["status"] == "succeeded"
    assert httpx.get(picture).status_code == 405
    # That of another account is not found, and neither URL is fetched.
    stranger = media_stack.caller()
    refused = place(stranger, prompt="x", image=picture)
    assert (refused.status_code, "Unknown file" in refused.json()["error"]) == (400, True)
    assert stored(media_stack, stranger) == []


def test_presigned_url_accepts_one_file_of_its_kind(media_stack: Stack) -> None:
    caller = media_stack.caller()
    ask = {"file_type": "png"}
    address = caller.http.post(f"{QUEUE}/upload-url", json=ask).json()["upload_url"]
    parts = urlsplit(address)
    query = dict(parse_qsl(parts.query))

    def put(
        data: bytes = PICTURE, content_type: str = "image/png", path: str = parts.path, **other: Any
    ) -> httpx.Response:
        return httpx.put(
            f"{media_stack.url}{path}",
            params={**query, **other},
            content=data,
            headers={"Content-Type": content_type},
        )

    elsewhere = media_stack.caller().account_id
    for refused in (
        put(content_type="image/jpeg"),
        put(account=str(elsewhere)),
        put(expires="9999999999"),
        put(signature="x"),
        put(path=parts.path.replace(".png", ".mp4")),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "invalid_signature")
    assert put(data=mp4()).json()["error"]["code"] == "unsupported_media_type"
    assert put(data=PICTURE + bytes(1_000_000)).status_code == 413
    assert stored(media_stack, caller) == []

    assert put().status_code == put().status_code == 200
    assert put(data=png(3, 3)).json()["error"]["code"] == "file_exists"
    assert len(stored(media_stack, caller)) == 1
    wrong = caller.http.post(f"{QUEUE}/upload-url", json={"file_type": "exe"})
    assert (wrong.status_code, "png" in wrong.json()["error"]) == (400, True)


def test_text_is_not_in_this_queue(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "echo", "hello")

    assert caller.http.get(f"{QUEUE}/models").json() == {"model_ids": ["Veo3"]}
    assert caller.http.get(f"{QUEUE}/models/echo").status_code == 404
    assert place(caller, "echo", prompt="x").status_code == 404
    assert caller.http.get(f"{QUEUE}/requests/{request_id}").status_code == 404
    assert caller.http.get(f"{QUEUE}/requests").json()["total"] == 0


def test_openapi_document_contains_the_queue(stack: Stack) -> None:
    paths = stack.caller().http.get("/schema/openapi.json").json()["paths"]

    of_queue = {
        path.removeprefix(QUEUE): sorted(methods)
        for path, methods in paths.items()
        if path.startswith(QUEUE)
    }
    assert of_queue == {
        "/models": ["get"],
        "/models/{name}": ["get"],
        "/requests": ["get", "post"],
        "/requests/{request_id}": ["delete", "get"],
        "/requests/{request_id}/cancel": ["post"],
        "/upload-url": ["post"],
    }
    assert paths["/v1/uploads/{name}"]["put"]["security"] == [{}]


def test_speech_payload_of_another_model_is_accepted(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    asked = {**MINIMAX_SPEECH, "language_boost": "English"}

    found = finished(caller, "tiny-speech", **asked)

    (medium,) = found["outcome"]["media_urls"]
    assert (found["status"], medium["content_type"]) == ("success", "audio/wav")
    assert medium["url"] == found["outcome"]["audio_url"]
    sound = httpx.get(medium["url"]).content
    assert sound[:4] == b"RIFF"
    assert int.from_bytes(sound[24:28], "little") == 32_000
    assert found["outcome"]["duration_ms"] > 0
    assert found["payload"].items() >= {"text": "hello", "voice": "ann", "language": "en"}.items()
    assert found["usage"]["cost"] == Decimal("0.005")
    refused = place(caller, "tiny-speech", **{**asked, "emotion": "happy"})
    assert (refused.status_code, "emotion" in refused.json()["error"]) == (400, True)
    names = {one["name"] for one in speech_parameters(caller)}
    assert names >= {"text", "voice_id", "language", "speed", "format", "audio_sample_rate"}
    assert speech_stack.findings() == []


def speech_parameters(caller: Caller) -> list[dict[str, Any]]:
    return list(caller.http.get(f"{QUEUE}/models/tiny-speech").json()["parameters"])


def test_music_payload_of_another_model_is_accepted(media_stack: Stack) -> None:
    caller = media_stack.caller()

    found = finished(caller, "tune", prompt="a waltz", lyrics="[Instrumental]", duration="3")

    assert found["status"] == "success", found
    assert httpx.get(found["outcome"]["audio_url"]).content == wav(3000)
    assert found["payload"].items() >= {"prompt": "a waltz", "duration": 3}.items()
    assert found["usage"] == {"audio_seconds": 3, "characters": 7, "cost": Decimal("0.3")}
