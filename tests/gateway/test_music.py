"""Music from the shipped model in a real worker."""

from __future__ import annotations

import base64
import json
from decimal import Decimal

import httpx
import pytest

from tests.gateway.test_generated_audio import finished, seconds
from tests.stack import Stack, ended
from workers.engines.music.midi import read_midi
from workers.engines.music.notes import Key

PRICE = Decimal("0.1")
"""Of a second."""


def test_music_is_generated_stored_and_charged_by_its_seconds(speech_stack: Stack) -> None:
    caller = speech_stack.caller()

    found = finished(
        caller,
        "band",
        prompt="a happy waltz with flute",
        key="D major",
        tempo=150,
        seconds=4,
        format="flac",
        seed=1,
    )

    sound, score = found["output"]["media"]
    data = httpx.get(sound["url"]).content
    assert seconds(data) == pytest.approx(sound["duration_ms"] / 1000, abs=0.01)
    assert 3000 < sound["duration_ms"] <= 4000
    notes = httpx.get(score["url"])
    assert notes.headers["content-type"] == "audio/midi"
    piece = read_midi(notes.content)
    assert (piece.key, piece.tempo, piece.metre) == (Key(2, "major"), 150, "3/4")
    assert (sound.get("role", "output"), score["role"]) == ("output", "score")
    assert Decimal(found["cost"]) == PRICE * sound["duration_ms"] / 1000
    receipt = caller.http.get(f"/v1/requests/{found['id']}/receipt").json()
    assert receipt["usage"]["audio_ms"] == sound["duration_ms"]
    assert speech_stack.findings() == []


def test_music_is_streamed_while_it_is_generated(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    asked = {"prompt": "a tense waltz at 180 bpm", "seconds": 4, "format": "wav", "seed": 2}
    made = caller.http.post("/v1/requests", json={"model": "band", "input": asked})

    events = caller.http.get(f"/v1/requests/{made.json()['id']}/events").text

    heard, names = b"", []
    for block in events.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        names.append(fields.get("event"))
        if fields.get("event") == "sound":
            piece = json.loads(fields["data"])
            assert piece["start"] == len(heard)
            heard += base64.b64decode(piece["data"])
    assert names.index("sound") < names.index("progress") < names.index("succeeded")
    found = ended(caller, made.json()["id"])
    length = found["output"]["media"][0]["duration_ms"] / 1000
    assert seconds(heard) == pytest.approx(length, abs=0.01)


def test_invalid_musical_key_is_refused_and_not_charged(speech_stack: Stack) -> None:
    caller = speech_stack.caller()

    answer = caller.http.post(
        "/v1/requests",
        json={"model": "band", "input": {"prompt": "a waltz", "key": "H major", "seconds": 4}},
    )
    found = ended(caller, answer.json()["id"])

    assert found["status"] == "failed"
    assert "names such as C major" in found["error"]["message"]
    assert Decimal(found["cost"]) == 0
