"""ElevenLabs' voices: those of models, and those that an account stores.

A voice is stored with the speaker's consent, as in every dialect. ElevenLabs' API has no field for
it, so it is sent as another file whose name begins with ``consent``, or as the label ``consent``
with the id of an existing consent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypedDict

from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway.api.elevenlabs.bodies import AddedBody
from gateway.api.elevenlabs.views import SoundVoiceView, premade_views, stored_view
from gateway.api.http.answers import json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.dialects import ELEVENLABS
from gateway.api.http.forms import documented_body, receive
from gateway.api.http.guards import may_store
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.errors import Conflict, InvalidRequest, NotFound, TollgateError
from gateway.files.sources import SentSource, Source
from gateway.voices.store import NewRecording, Recording, is_voice_id

PAGE_MAX: Final = 100
CONSENT: Final = "consent"
UNDETERMINED: Final = "und"
"""BCP 47 tag of an unspecified language."""
SENT_WITH_VOICE: Final = "Sent with its voice."
"""Description of a consent that is deleted with its voice."""


class SoundVoicesView(TypedDict):
    voices: list[SoundVoiceView]


class FoundVoicesView(SoundVoicesView):
    has_more: bool
    total_count: int
    next_page_token: str | None


class AddedVoiceView(TypedDict):
    voice_id: str
    requires_verification: bool


class DoneView(TypedDict):
    status: Literal["ok"]


class ElevenLabsVoicesController(Controller):
    path = ELEVENLABS
    tags = ["ElevenLabs"]

    @get(
        "/v1/voices",
        opt={"scope": "read"},
        operation_id="ElevenLabsListVoices",
        summary="List the voices of models and of the account",
    )
    async def index(self, request: ApiRequest) -> Response[SoundVoicesView]:
        return json_response({"voices": await _views(request)})

    @get(
        "/v2/voices",
        opt={"scope": "read"},
        operation_id="ElevenLabsSearchVoices",
        summary="Search voices by name, in pages",
    )
    async def search(
        self,
        request: ApiRequest,
        search: FromQuery[str] = "",
        category: FromQuery[str | None] = None,
        page_size: FromQuery[int] = 10,
        next_page_token: FromQuery[int] = 0,
    ) -> Response[FoundVoicesView]:
        check_limit(page_size, PAGE_MAX, param="page_size")
        found = [
            view
            for view in await _views(request)
            if search.lower() in view["name"].lower() and category in (None, view["category"])
        ]
        end = max(0, next_page_token) + page_size
        return json_response(
            {
                "voices": found[end - page_size : end],
                "has_more": end < len(found),
                "total_count": len(found),
                "next_page_token": str(end) if end < len(found) else None,
            }
        )

    @post(
        "/v1/voices/add",
        status_code=200,
        opt={"scope": "inference", "stores_body": True, "least": "owner"},
        guards=[may_store],
        operation_id="ElevenLabsAddVoice",
        operation_class=documented_body(AddedBody),
        summary="Store a voice: a recording of it, and the speaker's consent",
        description="`files` are the recording and a second one, whose name begins with `consent`, "
        "in which the speaker consents; or `labels` has the id of a consent as `consent`.",
    )
    async def add(self, request: ApiRequest) -> Response[AddedVoiceView]:
        received = await receive(request, repeated={"files": "files"})
        try:
            files = received.fields.get("files")
            if isinstance(files, SentSource):
                received.fields["files"] = [files]
            voice = await _add(request, received.read(AddedBody))
        finally:
            await received.close()
        return json_response({"voice_id": voice.id, "requires_verification": False})

    @get(
        "/v1/voices/{voice_id:str}",
        opt={"scope": "read"},
        operation_id="ElevenLabsGetVoice",
        summary="Get a voice's details",
    )
    async def show(self, request: ApiRequest, voice_id: FromPath[str]) -> Response[SoundVoiceView]:
        if is_voice_id(voice_id):
            account_id = request.key.account_id
            voice = await request.services.voices.find(account_id, "voice", voice_id)
            return json_response(stored_view(voice, _entries(request)))
        for view in premade_views(_entries(request)):
            if view["voice_id"] == voice_id:
                return json_response(view)
        raise NotFound("voice_not_found", f"No such voice: {voice_id!r}.", param="voice_id")

    @delete(
        "/v1/voices/{voice_id:str}",
        status_code=200,
        opt={"scope": "inference", "least": "owner"},
        operation_id="ElevenLabsDeleteVoice",
        summary="Delete a voice of the account, and the consent that was sent with it",
    )
    async def remove(self, request: ApiRequest, voice_id: FromPath[str]) -> Response[DoneView]:
        voices, account_id = request.services.voices, request.key.account_id
        voice = await voices.find(account_id, "voice", voice_id)
        assert voice.consent_id is not None
        consent = await voices.find(account_id, "consent", voice.consent_id)
        if consent.description == SENT_WITH_VOICE:
            await voices.delete(account_id, "consent", consent.id)
        else:
            await voices.delete(account_id, "voice", voice.id)
        return json_response({"status": "ok"})


async def _add(request: ApiRequest, data: AddedBody) -> Recording:
    """Store a voice and a consent sent with it. On a ``TollgateError`` neither is stored."""
    voices, account_id = request.services.voices, request.key.account_id
    sample, consent = _sorted(data)
    labels = data.labels or {}
    consent_id = labels.get(CONSENT, "")
    if consent is not None:
        language = labels.get("language") or UNDETERMINED
        new = NewRecording(data.name, language=language, description=SENT_WITH_VOICE)
        consent_id = (await voices.create(account_id, new, Source("audio", consent, "files"))).id
    new = NewRecording(
        data.name,
        consent_id=consent_id,
        transcript=labels.get("transcript", ""),
        description=data.description or "",
    )
    try:
        return await voices.create(account_id, new, Source("audio", sample, "files"))
    except TollgateError as error:
        if consent is not None:
            await voices.delete(account_id, "consent", consent_id)
        if isinstance(error, Conflict):
            # ElevenLabs' clients retry after a 409.
            raise InvalidRequest(error.code, error.message, param=error.param) from None
        raise


def _sorted(data: AddedBody) -> tuple[SentSource, SentSource | None]:
    """Tell the sample from the consent by their file names. Raise ``InvalidRequest``."""
    consents = [one for one in data.files if one.filename.lower().startswith(CONSENT)]
    samples = [one for one in data.files if one not in consents]
    if len(samples) != 1:
        raise InvalidRequest(
            "invalid_value",
            f"files has {len(samples)} recordings; a voice needs exactly one, so join them or "
            "choose the best.",
            param="files",
        )
    if len(consents) + (CONSENT in (data.labels or {})) != 1:
        raise InvalidRequest(
            "voice_consent_required",
            "A voice requires the speaker's consent: send another file whose name begins with "
            "'consent', in which the speaker consents, or the label 'consent' with the id of an "
            "existing consent.",
            param="files",
        )
    return samples[0], consents[0] if consents else None


async def _views(request: ApiRequest) -> list[SoundVoiceView]:
    voices, account_id = request.services.voices, request.key.account_id
    entries, stored, after = _entries(request), list[Recording](), None
    while True:
        page = await voices.list(account_id, "voice", limit=PAGE_MAX, after=after)
        stored += page.items
        if not page.more:
            break
        after = page.items[-1].id
    return [*(stored_view(voice, entries) for voice in stored), *premade_views(entries)]


def _entries(request: ApiRequest) -> Sequence[CatalogEntry]:
    return request.entries()
