"""Speech and music from a real engine in a real worker, small and of random weights."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import av
import httpx
import pytest

from tests.artist import wav
from tests.stack import Caller, Stack, ended, order
from tests.workers.speech.test_tokens import recording as somebody

TEXT = "Hello there. I have 2 dogs, and more. Good night!"
PRICE = Decimal("0.001")
"""Of a character."""


def finished(caller: Caller, model: str, **value: Any) -> dict[str, Any]:
    answer = caller.http.post("/v1/requests", json={"model": model, "input": value})
    assert answer.status_code == 202, answer.text
    found = ended(caller, answer.json()["id"])
    assert found["status"] == "succeeded", found
    return found


def seconds(data: bytes, format: str = "", *, rate: int = 8000) -> float:
    """How long a sound really is; bare samples are read as those of our tiny model."""
    options = {"sample_rate": str(rate), "ch_layout": "mono"} if format == "pcm" else {}
    name = "s16le" if format == "pcm" else None
    with av.open(io.BytesIO(data), format=name, options=options) as container:
        frames = list(container.decode(audio=0))
    return sum(frame.samples / frame.sample_rate for frame in frames)


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac", "aac", "pcm"])
def test_speech_is_synthesised_stored_and_charged_by_its_characters(
    format: str, speech_stack: Stack
) -> None:
    caller = speech_stack.caller()

    found = finished(caller, "tiny-speech", text=TEXT, format=format, seed=3)

    (medium,) = found["output"]["media"]
    data = httpx.get(medium["url"]).content
    assert seconds(data, format) == pytest.approx(medium["duration_ms"] / 1000, abs=0.3)
    assert (medium["kind"], medium["seed"], medium["bytes"]) == ("audio", 3, len(data))
    receipt = caller.http.get(f"/v1/requests/{found['id']}/receipt").json()
    assert receipt["usage"]["characters"] == len(TEXT)
    assert receipt["usage"]["audio_ms"] == medium["duration_ms"]
    assert Decimal(receipt["cost"]) == len(TEXT) * PRICE
    assert receipt["media"][0]["url"]
    assert 0 < receipt["performance"]["first_audio_ms"] <= receipt["performance"]["total_ms"]
    assert receipt["performance"]["real_time_factor"] > 0
    assert speech_stack.findings() == []


def test_characters_are_counted_after_unicode_normalisation(speech_stack: Stack) -> None:
    caller = speech_stack.caller()

    found = finished(caller, "tiny-speech", text="Cafe\u0301.")

    assert Decimal(found["cost"]) == 5 * PRICE


def test_speed_and_rate_are_followed(speech_stack: Stack) -> None:
    caller = speech_stack.caller()

    def length(**more: Any) -> int:
        asked = {"text": TEXT, "seed": 1, "format": "wav", **more}
        (medium,) = finished(caller, "tiny-speech", **asked)["output"]["media"]
        assert medium["sample_rate"] == more.get("sample_rate", 8000)
        return int(medium["duration_ms"])

    slow, plain, fast = length(speed=0.5), length(sample_rate=16_000), length(speed=2)
    assert slow > 1.3 * plain > 1.3 * fast


def test_audio_ends_at_the_length_covered_by_the_hold(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    body = {"model": "brief-speech", "input": {"text": TEXT * 5, "format": "wav"}}

    quote = caller.http.post("/v1/quote", json=body).json()
    found = finished(caller, "brief-speech", **body["input"])

    (medium,) = found["output"]["media"]
    assert (medium["duration_ms"], medium["cut"]) == (1000, True)
    assert found["cost"] == quote["max_cost"] == "0.1"
    assert seconds(httpx.get(medium["url"]).content) == pytest.approx(1)


def test_quote_covers_the_longest_audio_of_a_text(speech_stack: Stack) -> None:
    caller = speech_stack.caller()

    def quote(**value: Any) -> Decimal:
        body = {"model": "timed-speech", "input": {"text": "Good night!", **value}}
        return Decimal(caller.http.post("/v1/quote", json=body).json()["max_cost"])

    # 15 seconds, and one for each of eleven characters; the entry stops at 60.
    assert (quote(), quote(speed=2), quote(speed=0.25)) == (
        Decimal("2.6"),
        Decimal("1.3"),
        Decimal("6"),
    )


def test_audio_events_can_be_followed(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    asked = {"text": TEXT, "format": "wav", "seed": 2}
    made = caller.http.post("/v1/requests", json={"model": "tiny-speech", "input": asked})

    events = caller.http.get(f"/v1/requests/{made.json()['id']}/events").text

    heard, last = b"", ""
    for block in events.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        last = fields.get("event", last)
        if fields.get("event") == "sound":
            piece = json.loads(fields["data"])
            assert piece["start"] == len(heard)
            heard += base64.b64decode(piece["data"])
    assert last == "succeeded"
    found = caller.http.get(f"/v1/requests/{made.json()['id']}").json()
    length = found["output"]["media"][0]["duration_ms"] / 1000
    assert seconds(heard) == pytest.approx(length, abs=0.01)


def test_audio_is_streamed_from_its_start_also_after_its_end(speech_stack: Stack) -> None:
    caller = speech_stack.caller(credit="10")
    asked = {"text": TEXT * 20, "format": "mp3", "seed": 2}
    made = caller.http.post("/v1/requests", json={"model": "tiny-speech", "input": asked}).json()
    path = f"/v1/requests/{made['id']}/sound"

    with caller.http.stream("GET", path) as answer:
        heard = b"".join(answer.iter_bytes())
    again = caller.http.get(path)

    (medium,) = ended(caller, made["id"])["output"]["media"]
    assert seconds(heard) == pytest.approx(medium["duration_ms"] / 1000, abs=0.3)
    assert again.headers["content-type"] == answer.headers["content-type"] == "audio/mpeg"
    assert len(again.content) == medium["bytes"]
    assert again.headers["x-request-cost"] == str(len(TEXT) * 20 * PRICE).rstrip("0")


def test_request_without_audio_cannot_be_streamed_as_audio(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "echo", "hello")

    answer = caller.http.get(f"/v1/requests/{request_id}/sound")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_sound")


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "  "}, "input.text", "text is empty"),
    ({}, "input.text", "Missing required parameter"),
    ({"text": "x" * 2001}, "input.text", "reads 2000 characters"),
    ({"text": "x", "voice": "eve"}, "input.voice", "its voices are ann, bob"),
    ({"text": "x", "language": "de"}, "input.language", "its languages are en"),
    ({"text": "x", "speed": 9}, "input.speed", "less than or equal to 4"),
    ({"text": "x", "format": "midi"}, "input.format", "'wav', 'mp3'"),
    ({"text": "x", "sample_rate": 100}, "input.sample_rate", "8000"),
    ({"text": "x", "parameters": {"vol": 3}}, "input.parameters.vol", "runs here"),
    ({"text": "x", "recording": "data:audio/wav;base64,"}, "input.recording", "cannot clone"),
    ({"text": "x", "transcript": "y"}, "input.transcript", "requires a recording"),
    ({"text": "x", "pitch": 2}, "input.pitch", "Unknown parameter"),
]


@pytest.mark.parametrize(("value", "param", "said"), REFUSALS)
def test_invalid_speech_inputs_are_refused_without_a_hold(
    value: Mapping[str, Any], param: str, said: str, speech_stack: Stack
) -> None:
    caller = speech_stack.caller()

    answer = caller.http.post("/v1/requests", json={"model": "tiny-speech", "input": value})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert said in error["message"]
    assert caller.http.get("/v1/requests").json()["data"] == []


def test_voices_of_the_engine_are_in_the_catalog(speech_stack: Stack) -> None:
    caller = speech_stack.caller()

    view = caller.http.get("/v1/catalog/tiny-speech").json()

    assert (view["voices"], view["languages"]) == (["ann", "bob"], ["en"])
    ann, bob = (
        finished(caller, "tiny-speech", text="Hello.", voice=voice, seed=1, format="pcm")
        for voice in ("ann", {"id": "bob"})
    )
    assert ann["output"]["media"][0]["sha256"] != bob["output"]["media"][0]["sha256"]


def test_recording_is_cloned(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    recording, _ = somebody(8000)
    asked = {"transcript": "what i say", "format": "wav", "seed": 3}
    uri = "data:audio/wav;base64," + base64.b64encode(recording).decode()

    found = finished(caller, "tiny-clone", text="Hello there.", recording=uri, **asked)
    plain = finished(caller, "tiny-clone", text="Hello there.", format="wav", seed=3)
    sent = caller.http.post(
        "/v1/audio/speech",
        data={"model": "tiny-clone", "input": "Hello there.", **asked},
        files={"recording": ("voice.wav", recording)},
    )

    assert (found["task"], plain["task"]) == ("voice-clone", "text-to-speech")
    assert Decimal(found["cost"]) == len("Hello there.") * PRICE
    sounds = [httpx.get(one["output"]["media"][0]["url"]).content for one in (found, plain)]
    assert samples(sounds[0]) != samples(sounds[1])
    assert sent.status_code == 200, sent.text
    assert samples(sent.content) == samples(sounds[0])


def samples(data: bytes) -> bytes:
    """Return the audio of a WAV without its header, which contains the id of its request."""
    with av.open(io.BytesIO(data)) as container:
        return b"".join(frame.to_ndarray().tobytes() for frame in container.decode(audio=0))


def test_music_has_the_requested_length_and_is_charged_by_the_second(
    media_stack: Stack,
) -> None:
    caller = media_stack.caller()
    value = {"prompt": "a waltz", "key": "C major", "tempo": 90, "mood": "calm", "seed": 4}

    found = finished(caller, "tune", **value, seconds=1.5)
    left_open = finished(caller, "tune", **value)

    (medium,) = found["output"]["media"]
    assert httpx.get(medium["url"]).content == wav(1500)
    heard = caller.http.get(f"/v1/requests/{found['id']}/sound")
    assert (heard.content, heard.headers["content-type"]) == (wav(1500), "audio/wav")
    assert (found["cost"], left_open["cost"]) == ("0.15", "0.2")
    assert (medium["duration_ms"], medium["seed"]) == (1500, 4)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"tempo": 90}, "input.prompt"),
        ({"prompt": "a waltz", "seconds": 61}, "input.seconds"),
        ({"prompt": "a waltz", "text": "hello"}, "input.text"),
    ],
)
def test_unsupported_music_options_are_refused(
    value: dict[str, Any], param: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()

    answer = caller.http.post("/v1/requests", json={"model": "tune", "input": value})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
