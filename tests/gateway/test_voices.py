"""Voices and consents by the unmodified OpenAI client: stored, listed, private, deleted."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.audio import Voice, VoiceConsent

from tests.artist import mp4, png, wav
from tests.gateway.test_files import client
from tests.stack import Stack

SAMPLE = ("anna.wav", wav(1000))


def consent(api: openai.OpenAI, name: str = "Anna's consent") -> VoiceConsent:
    return api.audio.voice_consents.create(name=name, language="en-US", recording=SAMPLE)


def voice(api: openai.OpenAI, name: str = "Anna", consent_id: str | None = None) -> Voice:
    return api.audio.voices.create(
        name=name, audio_sample=SAMPLE, consent=consent_id or consent(api).id
    )


def test_consent_is_stored_renamed_and_deleted(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())

    made = consent(api)

    assert (made.object, made.name, made.language) == (
        "audio.voice_consent",
        "Anna's consent",
        "en-US",
    )
    assert made.id.startswith("cons_")
    assert api.audio.voice_consents.retrieve(made.id) == made
    renamed = api.audio.voice_consents.update(made.id, name="Anna, 2026")
    assert (renamed.id, renamed.name) == (made.id, "Anna, 2026")
    assert [each.name for each in api.audio.voice_consents.list()] == ["Anna, 2026"]
    assert api.audio.voice_consents.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        api.audio.voice_consents.retrieve(made.id)
    assert caught.value.code == "consent_not_found"


def test_deleting_a_voice_keeps_its_consent(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    given = consent(api)

    made = voice(api, consent_id=given.id)

    assert (made.object, made.name, made.type) == ("audio.voice", "Anna", "audio_sample")
    assert made.id.startswith("voice_")
    shown = caller.http.get(f"/v1/audio/voices/{made.id}").json()
    assert shown == made.to_dict()
    assert shown["consent"] == given.id
    assert caller.http.get("/v1/audio/voices").json()["data"] == [shown]
    deleted = api.audio.voices.delete(made.id)
    assert (deleted.deleted, deleted.object) == (True, "audio.voice.deleted")
    with pytest.raises(openai.NotFoundError) as caught:
        api.audio.voices.delete(made.id)
    assert caught.value.code == "voice_not_found"
    assert api.audio.voice_consents.retrieve(given.id) == given


def test_withdrawing_a_consent_deletes_its_voices(media_stack: Stack) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    given = consent(api)
    first, second = (voice(api, name, given.id) for name in ("a", "b"))
    other = voice(api, "c")
    lying = media_stack.directory / "blobs" / str(caller.account_id)

    api.audio.voice_consents.delete(given.id)

    listed = caller.http.get("/v1/audio/voices").json()["data"]
    assert [each["id"] for each in listed] == [other.id]
    left = {path.name for path in lying.iterdir() if any(path.rglob("*"))}
    assert left.isdisjoint({first.id, second.id, given.id})
    assert {other.id} <= left


def test_voices_and_consents_are_private_to_the_account(media_stack: Stack) -> None:
    owner, stranger = media_stack.caller(), media_stack.caller()
    api, other = client(media_stack, owner), client(media_stack, stranger)
    given = consent(api)
    made = voice(api, consent_id=given.id)

    attempts: list[Callable[[], Any]] = [
        lambda: other.audio.voice_consents.retrieve(given.id),
        lambda: other.audio.voice_consents.update(given.id, name="mine"),
        lambda: other.audio.voice_consents.delete(given.id),
        lambda: other.audio.voices.delete(made.id),
        lambda: other.audio.voices.create(name="x", audio_sample=SAMPLE, consent=given.id),
        lambda: other.audio.voice_consents.list(after=given.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    for path in (f"/v1/audio/voices/{made.id}", f"/v1/audio/voices?after={made.id}"):
        answer = stranger.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "voice_not_found")
    assert stranger.http.get("/v1/audio/voices").json()["data"] == []
    assert other.audio.voice_consents.list().data == []
    assert voice(other, "Anna").name == made.name, "names are an account's own"
    assert api.audio.voice_consents.retrieve(given.id) == given
    assert owner.http.get(f"/v1/audio/voices/{made.id}").is_success


def test_consents_are_listed_in_pages(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())
    made = [consent(api, str(number)).id for number in range(5)]

    assert [each.id for each in api.audio.voice_consents.list(limit=2)] == made[::-1]
    page = api.audio.voice_consents.list(limit=2, after=made[3])
    assert ([each.id for each in page.data], page.has_more) == ([made[2], made[1]], True)
    with pytest.raises(openai.BadRequestError, match="between 1 and 100"):
        api.audio.voice_consents.list(limit=101)


def test_number_of_voices_is_limited_per_account(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())
    given = consent(api)
    made = [voice(api, str(number), given.id) for number in range(5)]

    with pytest.raises(openai.BadRequestError, match="its limit is 5") as caught:
        voice(api, "one more", given.id)

    assert caught.value.code == "too_many_voices"
    api.audio.voices.delete(made[0].id)
    assert voice(api, "one more", given.id).name == "one more"


def test_names_of_voices_are_unique(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())
    first = voice(api)

    with pytest.raises(openai.ConflictError, match="'Anna'") as caught:
        voice(api)

    assert caught.value.code == "voice_exists"
    api.audio.voices.delete(first.id)
    assert voice(api).id != first.id


NOT_NAMES = ["An\nna", "An\x1bna", "An\u202ena", "A" * 101]


@pytest.mark.parametrize("name", NOT_NAMES, ids=["newline", "escape", "turned", "long"])
def test_a_name_that_is_too_long_or_has_control_characters_is_refused(
    media_stack: Stack, name: str
) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    given = consent(api, "Änna\u200c \U0001f469\u200d\U0001f3a4")

    for call in (
        lambda: consent(api, name),
        lambda: api.audio.voice_consents.update(given.id, name=name),
        lambda: voice(api, name, given.id),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.param == "name"
    kept = [("files", SAMPLE), ("files", ("consent.wav", SAMPLE[1]))]
    answer = caller.http.post("/elevenlabs/v1/voices/add", data={"name": name}, files=kept)

    assert answer.status_code == 400, answer.text
    assert "name" in answer.json()["detail"]["message"]
    assert [each.name for each in api.audio.voice_consents.list()] == [given.name]
    assert caller.http.get("/v1/audio/voices").json()["data"] == []


def test_voice_without_a_consent_is_refused_and_nothing_remains(media_stack: Stack) -> None:
    caller = media_stack.caller()
    lying = media_stack.directory / "blobs" / str(caller.account_id)

    for fields, code in (
        ({"name": "Anna"}, "missing_required_parameter"),
        ({"name": "Anna", "consent": "cons_1234"}, "consent_not_found"),
        ({"name": "Anna", "consent": f"cons_{'0' * 32}"}, "consent_not_found"),
    ):
        answer = caller.http.post("/v1/audio/voices", data=fields, files={"audio_sample": SAMPLE})
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, "consent")
    assert not lying.exists()


@pytest.mark.parametrize(
    ("sample", "status", "code"),
    [
        (b"", 400, "empty_file"),
        (b"no sound at all", 400, "unsupported_media_type"),
        (png(4, 4), 400, "unsupported_media_type"),
        (b"\0\0\0\x14ftypqt  " + b"\0" * 64, 400, "unsupported_media_type"),
        (wav(10_000), 413, "source_too_large"),
    ],
)
def test_invalid_or_too_large_recording_is_refused_and_nothing_remains(
    sample: bytes, status: int, code: str, media_stack: Stack
) -> None:
    caller = media_stack.caller()
    api = client(media_stack, caller)
    lying = media_stack.directory / "blobs" / str(caller.account_id)
    given = consent(api)
    before = sorted(lying.iterdir())

    with pytest.raises(openai.APIStatusError) as caught:
        api.audio.voices.create(name="x", audio_sample=("x.wav", sample), consent=given.id)

    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert sorted(lying.iterdir()) == before
    assert caller.http.get("/v1/audio/voices").json()["data"] == []
    assert voice(api, "x", given.id).name == "x"


def test_recording_can_be_audio_in_a_video_container(media_stack: Stack) -> None:
    """As browsers and phones record it."""
    api = client(media_stack, media_stack.caller())
    webm = b"\x1a\x45\xdf\xa3\x9fB\x86\x81\x01B\x82\x84webm" + b"\0" * 64

    for name, sample in (("a.mp4", mp4()), ("b.webm", webm)):
        assert api.audio.voice_consents.create(name=name, language="de", recording=(name, sample))


def test_recording_can_be_any_kind_of_source(media_stack: Stack) -> None:
    caller = media_stack.caller()
    uri = f"data:audio/wav;base64,{base64.b64encode(wav(1000)).decode()}"
    upload = caller.http.post("/v1/uploads", files={"file": SAMPLE}).json()["id"]

    given = caller.http.post(
        "/v1/audio/voice_consents", json={"name": "c", "language": "en", "recording": uri}
    ).json()
    made = caller.http.post(
        "/v1/audio/voices",
        json={
            "name": "v",
            "consent": given["id"],
            "audio_sample": {"upload": upload},
            "transcript": "Good morning.",
        },
    )

    assert made.is_success, made.text
    assert made.json()["transcript"] == "Good morning."


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"name": ""}, "invalid_value", "name"),
        ({"name": "x" * 101}, "invalid_value", "name"),
        ({"language": "english, mostly"}, "invalid_value", "language"),
        ({"colour": "red"}, "unknown_parameter", "colour"),
    ],
)
def test_invalid_form_field_is_refused_by_name(
    fields: dict[str, str], code: str, param: str, media_stack: Stack
) -> None:
    asked = {"name": "c", "language": "en", **fields}

    answer = media_stack.caller().http.post(
        "/v1/audio/voice_consents", data=asked, files={"recording": SAMPLE}
    )

    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


def test_voice_from_a_prompt_is_refused(media_stack: Stack) -> None:
    api = client(media_stack, media_stack.caller())

    with pytest.raises(openai.BadRequestError, match="not from prompts") as caught:
        api.audio.voices.create(name="x", type="prompt", prompt="deep and slow")

    assert caught.value.code == "unsupported_parameter"


def test_read_only_key_cannot_store_voices(media_stack: Stack) -> None:
    caller = media_stack.caller(scopes=("read",))

    answer = caller.http.post(
        "/v1/audio/voice_consents",
        data={"name": "c", "language": "en"},
        files={"recording": SAMPLE},
    )

    assert answer.status_code == 403
    assert caller.http.get("/v1/audio/voices").json()["data"] == []
