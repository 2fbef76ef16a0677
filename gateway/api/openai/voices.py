"""OpenAI's custom voices: created from a consent and a sample, then used by speech requests.

In addition to OpenAI's API, voices can be listed and fetched, a recording can be a data URI, an
https URL or an upload, and ``transcript`` holds the words of the sample. Recordings are never
returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypedDict

from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from pydantic import Field, StringConstraints

from gateway.api.http.answers import DeletedView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.forms import documented_body, receive
from gateway.api.http.guards import may_store
from gateway.api.http.request import ApiRequest
from gateway.api.openai.files import ItemView, OpenAIListView, list_view
from gateway.checks.strict import StrictModel
from gateway.errors import InvalidRequest
from gateway.files.sources import Source, SourceField
from gateway.voices.store import NAME_MAX, Kind, NewRecording, Recording

PAGE_MAX: Final = 100
TRANSCRIPT_MAX: Final = 4096

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=NAME_MAX)]
LanguageTag = Annotated[
    str, StringConstraints(max_length=35, pattern=r"^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*$")
]


class ConsentBody(StrictModel):
    """Body of ``POST /v1/audio/voice_consents``."""

    name: Name
    language: LanguageTag
    recording: SourceField


class ConsentChange(StrictModel):
    """Body of ``POST /v1/audio/voice_consents/{id}``."""

    name: Name


class VoiceBody(StrictModel):
    """Body of ``POST /v1/audio/voices``."""

    type: Literal["audio_sample"] = "audio_sample"
    name: Name
    consent: str
    audio_sample: SourceField
    transcript: Annotated[str, Field(max_length=TRANSCRIPT_MAX)] = ""
    description: Annotated[str, Field(max_length=TRANSCRIPT_MAX)] = ""


class ConsentView(TypedDict):
    """A recorded consent to the use of a voice."""

    id: str
    object: Literal["audio.voice_consent"]
    created_at: int
    language: str | None
    name: str


class VoiceView(TypedDict):
    id: str
    object: Literal["audio.voice"]
    created_at: int
    name: str
    type: Literal["audio_sample"]
    consent: str | None
    transcript: str
    description: str


class VoiceConsentsController(Controller):
    path = "/v1/audio/voice_consents"
    tags = ["OpenAI"]

    @post(
        status_code=200,
        opt={"scope": "inference", "stores_body": True, "least": "owner"},
        guards=[may_store],
        operation_id="CreateVoiceConsent",
        operation_class=documented_body(ConsentBody),
        summary="Store a recording in which a speaker consents to the use of their voice",
    )
    async def create(self, request: ApiRequest) -> Response[ConsentView]:
        received = await receive(request, repeated={})
        try:
            data = received.read(ConsentBody)
            new = NewRecording(data.name, language=data.language)
            source = Source("audio", data.recording, "recording")
            return json_response(consent_view(await _create(request, new, source)))
        finally:
            await received.close()

    @get(
        opt={"scope": "read"},
        operation_id="ListVoiceConsents",
        summary="List consents, newest first",
    )
    async def index(
        self,
        request: ApiRequest,
        after: FromQuery[str | None] = None,
        limit: FromQuery[int] = 20,
    ) -> Response[OpenAIListView[ConsentView]]:
        return await _list(request, "consent", consent_view, after=after, limit=limit)

    @get(
        "/{consent_id:str}",
        opt={"scope": "read"},
        operation_id="GetVoiceConsent",
        summary="Get a consent's details",
    )
    async def show(self, request: ApiRequest, consent_id: FromPath[str]) -> Response[ConsentView]:
        account_id = request.key.account_id
        return json_response(
            consent_view(await request.services.voices.find(account_id, "consent", consent_id))
        )

    @post(
        "/{consent_id:str}",
        status_code=200,
        opt={"scope": "inference", "least": "owner"},
        operation_id="UpdateVoiceConsent",
        summary="Rename a consent",
    )
    async def update(
        self,
        request: ApiRequest,
        consent_id: FromPath[str],
        data: JSONBody[ConsentChange],
    ) -> Response[ConsentView]:
        account_id = request.key.account_id
        changed = await request.services.voices.rename(account_id, "consent", consent_id, data.name)
        return json_response(consent_view(changed))

    @delete(
        "/{consent_id:str}",
        status_code=200,
        opt={"scope": "inference", "least": "owner"},
        operation_id="DeleteVoiceConsent",
        summary="Withdraw a consent: it is deleted with all voices that depend on it",
    )
    async def remove(self, request: ApiRequest, consent_id: FromPath[str]) -> Response[DeletedView]:
        await request.services.voices.delete(request.key.account_id, "consent", consent_id)
        return json_response({"id": consent_id, "object": "audio.voice_consent", "deleted": True})


class VoicesController(Controller):
    path = "/v1/audio/voices"
    tags = ["OpenAI"]

    @post(
        status_code=200,
        opt={"scope": "inference", "stores_body": True, "least": "owner"},
        guards=[may_store],
        operation_id="CreateVoice",
        operation_class=documented_body(VoiceBody),
        summary="Store a voice: a recording of it, and the speaker's consent",
    )
    async def create(self, request: ApiRequest) -> Response[VoiceView]:
        received = await receive(request, repeated={})
        try:
            _refuse_prompts(received.fields)
            data = received.read(VoiceBody)
            new = NewRecording(
                data.name,
                consent_id=data.consent,
                transcript=data.transcript,
                description=data.description,
            )
            source = Source("audio", data.audio_sample, "audio_sample")
            return json_response(voice_view(await _create(request, new, source)))
        finally:
            await received.close()

    @get(opt={"scope": "read"}, operation_id="ListVoices", summary="List voices, newest first")
    async def index(
        self,
        request: ApiRequest,
        after: FromQuery[str | None] = None,
        limit: FromQuery[int] = 20,
    ) -> Response[OpenAIListView[VoiceView]]:
        return await _list(request, "voice", voice_view, after=after, limit=limit)

    @get(
        "/{voice_id:str}",
        opt={"scope": "read"},
        operation_id="GetVoice",
        summary="Get a voice's details",
    )
    async def show(self, request: ApiRequest, voice_id: FromPath[str]) -> Response[VoiceView]:
        account_id = request.key.account_id
        return json_response(
            voice_view(await request.services.voices.find(account_id, "voice", voice_id))
        )

    @delete(
        "/{voice_id:str}",
        status_code=200,
        opt={"scope": "inference", "least": "owner"},
        operation_id="DeleteVoice",
        summary="Delete a voice immediately and permanently; its consent stays",
    )
    async def remove(self, request: ApiRequest, voice_id: FromPath[str]) -> Response[DeletedView]:
        await request.services.voices.delete(request.key.account_id, "voice", voice_id)
        return json_response({"id": voice_id, "object": "audio.voice.deleted", "deleted": True})


def consent_view(consent: Recording) -> ConsentView:
    return {
        "id": consent.id,
        "object": "audio.voice_consent",
        "created_at": int(consent.created_at.timestamp()),
        "language": consent.language,
        "name": consent.name,
    }


def voice_view(voice: Recording) -> VoiceView:
    return {
        "id": voice.id,
        "object": "audio.voice",
        "created_at": int(voice.created_at.timestamp()),
        "name": voice.name,
        "type": "audio_sample",
        "consent": voice.consent_id,
        "transcript": voice.transcript,
        "description": voice.description,
    }


async def _create(request: ApiRequest, new: NewRecording, source: Source) -> Recording:
    return await request.services.voices.create(request.key.account_id, new, source)


async def _list(
    request: ApiRequest,
    kind: Kind,
    view: Callable[[Recording], ItemView],
    *,
    after: str | None,
    limit: int,
) -> Response[OpenAIListView[ItemView]]:
    check_limit(limit, PAGE_MAX)
    page = await request.services.voices.list(
        request.key.account_id, kind, limit=limit, after=after
    )
    return json_response(list_view([view(each) for each in page.items], more=page.more))


def _refuse_prompts(fields: dict[str, Any]) -> None:
    """Refuse to design a voice from a prompt, which is another kind of voice in OpenAI's API."""
    if fields.get("type") == "prompt" or "prompt" in fields:
        raise InvalidRequest(
            "unsupported_parameter",
            "Voices are created from recordings, not from prompts; send audio_sample and consent.",
            param="type",
        )
