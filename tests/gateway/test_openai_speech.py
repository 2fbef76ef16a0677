"""Speech by the unmodified OpenAI client: as a file, as streamed bytes, as events."""

from __future__ import annotations

import base64
import json
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.test_files import client
from tests.gateway.test_generated_audio import PRICE, TEXT, seconds
from tests.stack import Caller, Stack, ended

LONG = "Good night to all of you who are still awake. " * 40
TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def receipt(caller: Caller, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    return found


@pytest.mark.parametrize("format", TYPES)
def test_every_format_can_be_decoded_and_has_the_billed_length(
    format: Any, speech_stack: Stack
) -> None:
    caller = speech_stack.caller()

    answer = client(speech_stack, caller).audio.speech.with_raw_response.create(
        model="tiny-speech", input=TEXT, voice="ann", response_format=format
    )

    # Bare samples come at the one rate that OpenAI has for them.
    rate = 24_000 if format == "pcm" else 8_000
    usage = receipt(caller, answer.headers["x-request-id"])["usage"]
    length = seconds(answer.content, format, rate=rate)
    assert length == pytest.approx(usage["audio_ms"] / 1000, abs=0.3)
    assert answer.headers["content-type"] == TYPES[format]
    assert Decimal(answer.headers["x-request-cost"]) == len(TEXT) * PRICE


def test_first_audio_arrives_before_synthesis_ends(speech_stack: Stack) -> None:
    caller = speech_stack.caller(credit="10")
    api = client(speech_stack, caller)

    with api.audio.speech.with_streaming_response.create(
        model="tiny-speech", input=LONG, voice="bob", response_format="wav", extra_body={"seed": 5}
    ) as answer:
        chunks = answer.iter_bytes(1024)
        heard = next(chunks)
        request_id = answer.headers["x-request-id"]
        status = caller.http.get(f"/v1/requests/{request_id}").json()["status"]
        heard += b"".join(chunks)

    assert status == "running"
    assert Decimal(answer.headers["x-request-cost"]) == len(LONG) * PRICE
    found = receipt(caller, request_id)
    assert Decimal(found["cost"]) == len(LONG) * PRICE
    assert seconds(heard) == pytest.approx(found["usage"]["audio_ms"] / 1000, abs=0.01)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for block in filter(None, answer.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: "), parse_float=Decimal))
        assert name == f"event: {found[-1].get('type', 'error')}"
    return found


def test_events_carry_the_audio_and_end_with_its_usage(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    body = {"model": "tiny-speech", "input": TEXT, "voice": {"id": "ann"}, "seed": 5}

    sent = caller.http.post(
        "/v1/audio/speech", json={**body, "response_format": "wav", "stream_format": "sse"}
    )

    *pieces, done = events(sent)
    assert {piece["type"] for piece in pieces} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(piece["audio"]) for piece in pieces)
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["cost"] == len(TEXT) * PRICE
    assert done["usage"]["characters"] == len(TEXT)
    assert seconds(sound) == pytest.approx(float(done["usage"]["seconds"]), abs=0.01)


def test_cost_that_depends_on_the_length_is_not_in_the_headers(speech_stack: Stack) -> None:
    caller = speech_stack.caller(credit="10")

    answer = caller.http.post("/v1/audio/speech", json={"model": "timed-speech", "input": TEXT})

    assert answer.status_code == 200, answer.text
    assert "x-request-cost" not in answer.headers
    found = receipt(caller, answer.headers["x-request-id"])
    assert Decimal(found["cost"]) == Decimal(found["usage"]["audio_ms"]) / 1000 / 10


def test_client_that_disconnects_is_charged_for_what_was_synthesised(speech_stack: Stack) -> None:
    caller = speech_stack.caller(credit="10")
    api = client(speech_stack, caller)

    with api.audio.speech.with_streaming_response.create(
        model="tiny-speech", input=LONG, voice="ann"
    ) as answer:
        next(answer.iter_bytes(256))
        request_id = answer.headers["x-request-id"]

    found = ended(caller, request_id)
    usage = receipt(caller, request_id)["usage"]
    assert found["status"] == "cancelled"
    assert 0 < usage["characters"] < len(LONG)
    assert Decimal(found["cost"]) == usage["characters"] * PRICE
    assert Decimal(caller.http.get("/v1/balance").json()["posted"]) == 10 - Decimal(found["cost"])
    assert speech_stack.held(caller) == 0
    assert speech_stack.findings() == []


def test_repeated_request_gets_the_same_audio_without_a_charge(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    body = {"model": "tiny-speech", "input": TEXT, "voice": "ann", "response_format": "wav"}

    answers = [
        caller.http.post("/v1/audio/speech", json=body, headers={"Idempotency-Key": "once"})
        for _ in range(2)
    ]

    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    lengths = [seconds(answer.content) for answer in answers]
    assert lengths[0] == pytest.approx(lengths[1], abs=0.01)
    assert answers[1].headers["content-type"] == "audio/wav"
    posted = Decimal(caller.http.get("/v1/balance").json()["posted"])
    assert posted == 1 - len(TEXT) * PRICE


def test_late_client_gets_the_audio_from_the_start(speech_stack: Stack) -> None:
    caller = speech_stack.caller(credit="10")
    asked = {
        "json": {"model": "tiny-speech", "input": LONG, "response_format": "pcm"},
        "headers": {"Idempotency-Key": "once"},
    }

    with caller.http.stream("POST", "/v1/audio/speech", **asked) as first:
        chunks = first.iter_bytes(1024)
        heard = next(chunks)
        with caller.http.stream("POST", "/v1/audio/speech", **asked) as second:
            again = second.read()
        heard += b"".join(chunks)

    assert heard == again
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    posted = Decimal(caller.http.get("/v1/balance").json()["posted"])
    assert posted == 10 - len(LONG) * PRICE


def test_model_stats_have_ttfa_and_real_time_factor(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    body = {"model": "tiny-speech", "input": "Hello.", "voice": "ann"}
    for _ in range(5):
        assert caller.http.post("/v1/audio/speech", json=body).is_success

    stats = caller.http.get("/v1/models/tiny-speech/stats").json()
    metrics = caller.http.get("/metrics").text

    assert stats["first_audio_ms"]["p50"] > 0
    assert stats["real_time_factor"]["p99"] > 0
    assert stats["characters"] >= 30
    assert 'tollgate_real_time_factor_count{model="tiny-speech"}' in metrics


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"input": " "}, 400, "invalid_value", "input"),
        ({}, 400, "missing_required_parameter", "input"),
        ({"input": "x" * 2001}, 400, "invalid_value", "input"),
        ({"input": "x", "text": "y"}, 400, "unknown_parameter", "text"),
        ({"input": "x", "voice": "alloy"}, 400, "invalid_value", "voice"),
        ({"input": "x", "response_format": "midi"}, 400, "invalid_value", "response_format"),
        ({"input": "x", "speed": 5}, 400, "invalid_value", "speed"),
        ({"input": "x", "model": "echo"}, 400, "task_not_supported", "model"),
        ({"input": "x", "model": "none"}, 404, "model_not_found", "model"),
        ({"input": "привет"}, 400, "invalid_input", "input"),
        ({"input": "x", "instructions": "w"}, 400, "unsupported_parameter", "instructions"),
    ],
)
def test_invalid_requests_are_reported_with_openais_names_and_not_charged(
    body: dict[str, Any], status: int, code: str, param: str, speech_stack: Stack
) -> None:
    caller = speech_stack.caller(credit="10")

    for form in ("audio", "sse"):
        asked = {"model": "tiny-speech", "voice": "default", "stream_format": form, **body}
        answer = caller.http.post("/v1/audio/speech", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)

    assert caller.http.get("/v1/balance").json()["posted"] == "10"
    assert speech_stack.held(caller) == 0


def test_clients_own_exception_is_raised(speech_stack: Stack) -> None:
    api = client(speech_stack, speech_stack.caller(credit="0.0001"))

    with pytest.raises(openai.APIStatusError) as caught:
        api.audio.speech.create(model="tiny-speech", input=TEXT, voice="ann")

    assert (caught.value.status_code, caught.value.code) == (402, "insufficient_credit")
