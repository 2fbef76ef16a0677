"""ElevenLabs' API by its own unmodified client, against models of random weights."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeAlias

import av
import httpx
import pytest
from elevenlabs import VoiceSettings
from elevenlabs.client import ElevenLabs
from elevenlabs.core import ApiError

from gateway.accounts.limits import Limit
from gateway.api.elevenlabs.bodies import FORMATS, read_format
from gateway.errors import InvalidRequest
from tests.artist import wav
from tests.gateway.test_limits import limit
from tests.stack import Caller, Stack, ended, wait_for

TEXT = "Hello there. Good night!"
File: TypeAlias = tuple[str, bytes]
SAMPLE: File = ("anna.wav", wav(1500))
CONSENT: File = ("Consent of Anna.wav", wav(1000))


def client(stack: Stack, caller: Caller) -> ElevenLabs:
    http = httpx.Client(timeout=60)
    stack.clients.append(http)
    return ElevenLabs(base_url=f"{stack.url}/elevenlabs", api_key=caller.secret, httpx_client=http)


def refused(call: Any) -> tuple[int | None, dict[str, Any]]:
    with pytest.raises(ApiError) as caught:
        call()
    assert isinstance(caught.value.body, dict)
    return caught.value.status_code, caught.value.body["detail"]


def rate_of(parts: Iterator[bytes]) -> int:
    with av.open(io.BytesIO(b"".join(parts)), "r") as container:
        frames = list(container.decode(audio=0))
    assert frames
    return frames[0].sample_rate


def test_speech_is_synthesised_and_its_cost_is_in_a_header(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)

    with api.text_to_speech.with_raw_response.convert(
        "ann",
        text=TEXT,
        model_id="tiny-speech",
        output_format="wav_16000",
        seed=3,
        language_code="en",
        voice_settings=VoiceSettings(stability=0.5, similarity_boost=0.75, speed=1.1),
        previous_text="Before.",
        apply_text_normalization="auto",
    ) as answer:
        assert rate_of(answer.data) == 16_000

    assert answer.headers["content-type"] == "audio/wav"
    assert Decimal(answer.headers["x-request-cost"]) == len(TEXT) * Decimal("0.001")
    assert answer.headers["character-cost"] == str(len(TEXT))
    receipt = caller.http.get(f"/v1/requests/{answer.headers['request-id']}/receipt").json()
    assert receipt["usage"]["characters"] == len(TEXT)
    assert speech_stack.findings() == []


def test_too_many_concurrent_requests_are_refused_in_the_dialect(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    limit(speech_stack, Limit(caller.account_id, None, None, concurrent_max=1))
    body = {"model": "tiny-speech", "input": {"text": TEXT * 40}}
    running = caller.http.post("/v1/requests", json=body).json()["id"]

    status, detail = refused(
        lambda: b"".join(
            client(speech_stack, caller).text_to_speech.convert(
                "ann", text=TEXT, model_id="tiny-speech"
            )
        )
    )

    assert (status, detail["status"]) == (429, "too_many_concurrent_requests")
    caller.http.post(f"/v1/requests/{running}/cancel")
    assert ended(caller, running)["status"] in ("cancelled", "succeeded")


def test_speech_is_streamed_while_it_is_synthesised(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)

    assert rate_of(api.text_to_speech.stream("bob", text=TEXT, model_id="tiny-speech")) == 44_100
    with api.text_to_speech.with_raw_response.stream(
        "bob", text=TEXT, model_id="tiny-speech", output_format="mp3_22050_32"
    ) as answer:
        assert rate_of(answer.data) == 22_050

    assert answer.headers["content-type"] == "audio/mpeg"
    assert ended(caller, answer.headers["request-id"])["status"] == "succeeded"


@pytest.mark.parametrize("name", ["pcm_8000", "ulaw_8000", "opus_48000_64", "mp3_44100_192"])
def test_every_output_format_is_supported(name: str, speech_stack: Stack) -> None:
    api = client(speech_stack, speech_stack.caller())

    with api.text_to_speech.with_raw_response.convert(
        "ann", text=TEXT, model_id="tiny-speech", output_format=name, seed=1
    ) as answer:
        data = b"".join(answer.data)

    kinds = {"pcm": "audio/pcm", "ulaw": "audio/basic", "opus": "audio/ogg", "mp3": "audio/mpeg"}
    assert answer.headers["content-type"] == kinds[name.partition("_")[0]]
    assert len(data) > 500


def test_call_without_a_model_gets_the_first_that_has_the_voice(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)

    with api.text_to_speech.with_raw_response.convert("ann", text=TEXT) as answer:
        b"".join(answer.data)

    assert ended(caller, answer.headers["request-id"])["model"] == "tiny-speech"


def test_output_is_deleted_if_logging_is_disabled(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)

    with api.text_to_speech.with_raw_response.convert(
        "ann", text=TEXT, model_id="tiny-speech", enable_logging=False
    ) as answer:
        assert b"".join(answer.data)

    def found() -> dict[str, Any]:
        return dict(caller.http.get(f"/v1/requests/{answer.headers['request-id']}").json())

    wait_for(lambda: found()["output"] is None, "the output to be gone")
    assert found()["status"] == "succeeded"


def test_models_are_listed_with_their_tasks(speech_stack: Stack) -> None:
    api = client(speech_stack, speech_stack.caller())

    found = {model.model_id: model for model in api.models.list()}

    tiny = found["tiny-speech"]
    assert tiny.can_do_text_to_speech
    assert tiny.maximum_text_length_per_request == 2000
    assert [language.language_id for language in tiny.languages or ()] == ["en"]
    assert "echo" not in found


def test_voices_of_models_are_listed_once(speech_stack: Stack) -> None:
    api = client(speech_stack, speech_stack.caller())

    voices = {voice.voice_id: voice for voice in api.voices.get_all().voices}

    ann = voices["ann"]
    assert ann.high_quality_base_model_ids == ["tiny-speech", "timed-speech", "brief-speech"]
    assert (ann.category, api.voices.get("ann")) == ("premade", ann)
    assert voices["default"].high_quality_base_model_ids == ["tiny-clone"]
    first = api.voices.search(page_size=3)
    second = api.voices.search(page_size=3, next_page_token=first.next_page_token)
    assert (first.total_count, first.has_more, second.has_more) == (5, True, False)
    assert [*first.voices, *second.voices] == list(voices.values())
    assert [voice.name for voice in api.voices.search(search="BO").voices] == ["bob"]


def test_unsupported_options_are_refused_under_their_elevenlabs_names(speech_stack: Stack) -> None:
    caller = speech_stack.caller()
    api = client(speech_stack, caller)
    speak = api.text_to_speech.convert

    def said(**more: Any) -> tuple[int | None, str, str | None]:
        asked = {"voice_id": "ann", "text": TEXT, "model_id": "tiny-speech", **more}
        status, detail = refused(lambda: b"".join(speak(**asked)))
        assert detail["message"]
        return status, detail["status"], detail.get("param")

    assert said(voice_id="zoe") == (404, "voice_not_found", "voice_id")
    assert said(voice_id="zoe", model_id=None) == (404, "voice_not_found", "voice_id")
    assert said(model_id="nobody") == (404, "model_not_found", "model_id")
    assert said(output_format="mp3") == (400, "invalid_output_format", "output_format")
    assert said(text=" ") == (400, "invalid_value", "text")
    assert said(text="a" * 2001) == (400, "invalid_value", "text")
    assert said(language_code="de") == (400, "invalid_value", "language_code")
    assert said(voice_settings=VoiceSettings(speed=9)) == (
        400,
        "invalid_value",
        "voice_settings.speed",
    )
    assert said(seed=-1)[2] == "seed"
    assert said(apply_text_normalization="off")[2] == "apply_text_normalization"
    status, detail = refused(lambda: api.text_to_speech.convert_with_timestamps("ann", text=TEXT))
    assert (status, detail["status"]) == (400, "unsupported")
    assert caller.http.get("/v1/requests").json()["data"] == []


def test_key_and_credit_are_required(speech_stack: Stack) -> None:
    poor = client(speech_stack, speech_stack.caller(credit="0"))
    nobody = client(speech_stack, replace(speech_stack.caller(), secret="tg_wrong"))

    def speak(api: ElevenLabs) -> bytes:
        return b"".join(api.text_to_speech.convert("ann", text=TEXT, model_id="tiny-speech"))

    assert [(status, detail["status"]) for status, detail in (
        refused(lambda: speak(poor)), refused(lambda: speak(nobody))
    )] == [(402, "quota_exceeded"), (401, "invalid_api_key")]  # fmt: skip
    bare = httpx.get(f"{speech_stack.url}/elevenlabs/v1/models")
    assert (bare.status_code, bare.json()["detail"]["status"]) == (401, "invalid_api_key")
    assert "xi-api-key" in bare.json()["detail"]["message"]


@pytest.mark.parametrize("how", ["compose", "stream"])
def test_music_is_made(how: str, media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    with getattr(api.music.with_raw_response, how)(
        prompt="a slow waltz", music_length_ms=3_000, force_instrumental=True, seed=4
    ) as answer:
        assert b"".join(answer.data) == wav(3000)

    found = ended(caller, answer.headers["request-id"])
    assert (found["model"], found["cost"]) == ("tune", "0.3")
    if how == "compose":
        assert answer.headers["x-request-cost"] == "0.3"
    for wrong, param in (
        ({"prompt": "x", "music_length_ms": 1}, "music_length_ms"),
        ({"prompt": "x", "music_length_ms": 61_000}, "music_length_ms"),
        ({"prompt": "x", "finetune_id": "f"}, "finetune_id"),
        ({}, "prompt"),
    ):
        status, detail = refused(lambda wrong=wrong: b"".join(api.music.compose(**wrong)))
        assert (status, detail["param"]) == (400, param)


def test_voice_is_stored_with_its_consent(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    made = api.voices.ivc.create(
        name="Anna", files=[SAMPLE, CONSENT], description="Warm.", labels={"language": "en"}
    )

    assert not made.requires_verification
    voice = api.voices.get(made.voice_id)
    assert (voice.name, voice.category, voice.description) == ("Anna", "cloned", "Warm.")
    assert voice in api.voices.get_all().voices
    assert voice.high_quality_base_model_ids == ["mimic"]
    for speak in (api.text_to_speech.convert, api.text_to_speech.stream):
        # The fake model returns audio as long as the recording of the voice.
        assert b"".join(speak(made.voice_id, text=TEXT)) == wav(1500)
    (consent,) = caller.http.get("/v1/audio/voice_consents").json()["data"]
    assert (consent["language"], voice.labels) == ("en", {"consent": consent["id"]})
    assert api.voices.delete(made.voice_id).status == "ok"
    assert refused(lambda: api.voices.get(made.voice_id))[0] == 404
    status, detail = refused(lambda: b"".join(speak(made.voice_id, text=TEXT)))
    assert (status, detail["status"], detail["param"]) == (404, "voice_not_found", "voice_id")
    assert caller.http.get("/v1/audio/voice_consents").json()["data"] == []


def test_existing_consent_is_referred_to_and_outlives_the_voice(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    given = {"name": "Anna", "language": "en"}
    consent = caller.http.post(
        "/v1/audio/voice_consents", data=given, files={"recording": CONSENT}
    ).json()

    made = api.voices.ivc.create(name="Anna", files=[SAMPLE], labels={"consent": consent["id"]})

    api.voices.delete(made.voice_id)
    assert len(caller.http.get("/v1/audio/voice_consents").json()["data"]) == 1


def test_voice_without_consent_is_refused_and_nothing_is_stored(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)

    def added(**more: Any) -> tuple[int | None, str]:
        asked = {"name": "Anna", "files": [SAMPLE, CONSENT], **more}
        status, detail = refused(lambda: api.voices.ivc.create(**asked))
        return status, detail["status"]

    assert added(files=[SAMPLE]) == (400, "voice_consent_required")
    assert added(labels={"consent": "cons_1"}) == (400, "voice_consent_required")
    assert added(files=[SAMPLE], labels={"consent": "cons_1"}) == (404, "consent_not_found")
    assert added(files=[SAMPLE, SAMPLE, CONSENT]) == (400, "invalid_value")
    assert added(files=[("a.txt", b"hello"), CONSENT]) == (400, "unsupported_media_type")
    assert added(remove_background_noise=True) == (400, "invalid_value")
    assert caller.http.get("/v1/audio/voice_consents").json()["data"] == []
    api.voices.ivc.create(name="Anna", files=[SAMPLE, CONSENT])
    assert added() == (400, "voice_exists")
    assert len(caller.http.get("/v1/audio/voice_consents").json()["data"]) == 1


def test_format_names_are_parsed() -> None:
    made = read_format("mp3_22050_32")

    assert (made.format, made.sample_rate, made.bitrate) == ("mp3", 22_050, 32_000)
    assert read_format(None) == read_format("auto") == read_format("mp3_44100_128")
    assert len(FORMATS) == 32
    with pytest.raises(InvalidRequest, match="pcm_16000"):
        read_format("flac_44100")
