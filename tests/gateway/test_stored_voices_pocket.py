"""The shipped model in a worker synthesises a stored voice like its recording."""

from __future__ import annotations

import openai
import pytest
import torch

from tests.artist import wav
from tests.gateway.test_files import client
from tests.stack import Stack
from workers.engines.speech.spectra import RATE, pitch_of
from workers.media.recordings import read_audio

SAID = "The old house on the hill has a green door."
OTHER = "We watched the ships as they left the harbor."


def pitch(sound: bytes) -> float:
    """The median, in Hz."""
    heard = read_audio(sound, rate=RATE, seconds_max=60)
    found, voiced = pitch_of(torch.from_numpy(heard.samples[0]))
    return float(found[voiced > 0].median())


def test_stored_voice_has_the_pitch_of_its_recording_and_costs_by_characters(
    speech_stack: Stack,
) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)

    def spoken(voice: str | dict[str, str], text: str) -> bytes:
        answer = api.audio.speech.with_raw_response.create(
            model="reader",
            input=text,
            voice=voice,
            response_format="wav",  # type: ignore[arg-type]
        )
        assert answer.headers["x-request-cost"] == f"{len(text) / 1000:g}"
        return answer.content

    for name in ("ivo", "lena"):
        recording = (f"{name}.wav", spoken(name, SAID))
        given = api.audio.voice_consents.create(name=name, language="en-US", recording=recording)
        kept = api.audio.voices.create(name=name, audio_sample=recording, consent=given.id)

        copy = spoken({"id": kept.id}, OTHER)

        assert pitch(copy) == pytest.approx(pitch(recording[1]), rel=0.2)
    assert speech_stack.findings() == []


def test_recording_without_speech_is_refused_and_not_charged(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)
    silence = ("silence.wav", wav(2000))
    given = api.audio.voice_consents.create(name="x", language="en-US", recording=silence)
    kept = api.audio.voices.create(name="x", audio_sample=silence, consent=given.id)

    with pytest.raises(openai.BadRequestError) as caught:
        api.audio.speech.create(model="reader", input=SAID, voice={"id": kept.id})

    assert "too little speech" in caught.value.message
    assert caller.http.get("/v1/balance").json()["held"] == "0"
    assert speech_stack.findings() == []
