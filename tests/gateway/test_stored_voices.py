"""Speech in a stored voice, in every dialect: the recording is attached, or the request refused."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import numpy as np
import openai
import pytest

from gateway.files.retention import MediaStore
from gateway.sql.database import Database
from tests.artist import SPOKEN_MAX_S, Artist, wav
from tests.gateway.test_files import client
from tests.gateway.test_voices import consent, voice
from tests.stack import Caller, Stack, ended
from workers.contract.blobs import Blobs
from workers.media.audio import encode_audio
from workers.media.pixels import Audio

TEXT = "Good morning!"
COST = "0.013"


def keep(stack: Stack, caller: Caller, sample: bytes, **more: Any) -> str:
    """Keep a voice; return its id."""
    api = client(stack, caller)
    made = caller.http.post(
        "/v1/audio/voices",
        data={"name": "Anna", "consent": consent(api).id, **more},
        files={"audio_sample": ("anna.wav", sample)},
    )
    assert made.is_success, made.text
    return str(made.json()["id"])


def spoken(caller: Caller, **value: Any) -> dict[str, Any]:
    body = {"model": "mimic", "input": {"text": TEXT, **value}}
    answer = caller.http.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    return ended(caller, answer.json()["id"])


def test_stored_voice_is_attached_without_a_copy(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    voice_id = keep(media_stack, caller, wav(1500), transcript="Hello.")

    found = spoken(caller, voice=voice_id)

    assert (found["status"], found["task"], found["cost"]) == ("succeeded", "voice-clone", COST)
    (job,) = (job for job in artist.jobs if job.request_id == found["id"])
    assert artist.attached[found["id"]] == [wav(1500)]
    assert job.attachments[0].key.split("/")[1] == voice_id, "copied for nobody"
    assert (job.input["recording"], job.input["transcript"]) == (True, "Hello.")
    again = spoken(caller, voice={"id": voice_id}, transcript="Hello, you.")
    (job,) = (job for job in artist.jobs if job.request_id == again["id"])
    assert job.input["transcript"] == "Hello, you."
    assert media_stack.findings() == []


def test_deleting_a_requests_blobs_keeps_the_voice(media_stack: Stack) -> None:
    caller = media_stack.caller()
    voice_id = keep(media_stack, caller, wav(1500))
    first = spoken(caller, voice=voice_id)

    async def clear() -> None:
        database = Database(media_stack.database_url)
        blobs = Blobs(media_stack.environment()["BLOB_URL"])
        store = MediaStore(database, blobs, retention=timedelta(hours=1))
        await store.discard(caller.account_id, first["id"])
        await database.close()

    asyncio.run(clear())

    assert spoken(caller, voice=voice_id)["status"] == "succeeded"


def test_openai_client_can_use_a_custom_voice(media_stack: Stack, artist: Artist) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    made = voice(api)

    custom, own = (
        api.audio.speech.with_raw_response.create(
            model="mimic", input=TEXT, voice=chosen, response_format="wav"
        )
        for chosen in ({"id": made.id}, "ann")
    )

    assert custom.content == wav(1000)
    assert artist.attached[custom.headers["x-request-id"]] == [wav(1000)]
    assert artist.attached[own.headers["x-request-id"]] == []
    assert custom.headers["x-request-cost"] == own.headers["x-request-cost"] == COST


def test_another_accounts_voice_does_not_exist(media_stack: Stack) -> None:
    owner, stranger = media_stack.caller(), media_stack.caller()
    voice_id = keep(media_stack, owner, wav(1000))

    native = stranger.http.post(
        "/v1/requests", json={"model": "mimic", "input": {"text": TEXT, "voice": voice_id}}
    )
    assert (native.status_code, native.json()["error"]["code"]) == (404, "voice_not_found")
    assert native.json()["error"]["param"] == "input.voice"
    with pytest.raises(openai.NotFoundError) as caught:
        client(media_stack, stranger).audio.speech.create(
            model="mimic", input=TEXT, voice={"id": voice_id}
        )
    assert (caught.value.code, caught.value.param) == ("voice_not_found", "voice")
    assert stranger.http.get("/v1/requests").json()["data"] == []
    assert media_stack.held(stranger) == 0
    lying = media_stack.directory / "blobs" / str(stranger.account_id)
    assert not any(path.is_file() for path in lying.rglob("*"))


def test_a_deleted_voice_does_not_exist(media_stack: Stack) -> None:
    caller = media_stack.caller()
    voice_id = keep(media_stack, caller, wav(1000))
    client(media_stack, caller).audio.voices.delete(voice_id)

    answer = caller.http.post(
        "/v1/requests", json={"model": "mimic", "input": {"text": TEXT, "voice": voice_id}}
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "voice_not_found")


def bomb() -> bytes:
    """Five minutes of silence, in as many bytes as some seconds of speech."""
    data = encode_audio(Audio(np.zeros((1, 8000 * 300), np.float32), 8000), "flac")
    assert len(data) < 100_000
    return data


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (b"RIFF\x10\0\0\0WAVE" + b"\x07" * 64, "damaged"),
        (b"fLaC" + b"\0" * 200, "damaged"),
        (b"OggS\0\x02" + b"\xff" * 500, "damaged"),
        (wav((SPOKEN_MAX_S + 1) * 1000), "longer than 5 seconds"),
        (wav(0), "empty"),
        (bomb(), "longer than 5 seconds"),
    ],
)
def test_unusable_recording_fails_the_request_without_a_charge(
    sample: bytes, said: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()
    voice_id = keep(media_stack, caller, sample)

    found = spoken(caller, voice=voice_id)

    assert (found["status"], found["cost"]) == ("failed", "0")
    assert (found["error"]["code"], found["error"]["param"]) == ("invalid_input", "recording")
    assert said in found["error"]["message"]
    assert media_stack.held(caller) == 0
    assert media_stack.findings() == []


@pytest.mark.parametrize(
    ("model", "value", "param", "said"),
    [
        ("tune", {"prompt": "x", "voice": "V"}, "input.voice", "Unknown parameter"),
        ("mimic", {"voice": "V", "recording": "data:audio/wav;base64,"}, "input.voice", "either"),
        ("mimic", {"voice": "voice_1234"}, "input.voice", "its voices are ann, bob"),
    ],
)
def test_voice_that_the_model_cannot_use_is_refused_by_name(
    model: str, value: dict[str, Any], param: str, said: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()
    voice_id = keep(media_stack, caller, wav(1000))
    asked = {name: voice_id if given == "V" else given for name, given in value.items()}
    text = {} if model == "tune" else {"text": TEXT}

    answer = caller.http.post("/v1/requests", json={"model": model, "input": {**text, **asked}})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert said in error["message"]


def test_a_model_with_only_its_own_voices_refuses_stored_ones(media_stack: Stack) -> None:
    caller = media_stack.caller()
    body = {"model": "reader", "input": {"text": TEXT, "voice": f"voice_{'0' * 32}"}}

    answer = caller.http.post("/v1/requests", json=body)

    assert answer.status_code == 400
    assert "only its own" in answer.json()["error"]["message"]


def test_quote_does_not_look_up_the_voice(media_stack: Stack) -> None:
    caller = media_stack.caller()
    body = {"model": "mimic", "input": {"text": TEXT, "voice": f"voice_{'0' * 32}"}}

    answer = caller.http.post("/v1/quote", json=body)

    assert answer.json()["max_cost"] == COST, answer.text
