"""Voices of people: recorded, with the speaker's consent, and then spoken with.

Nothing is stored without a recording in which the speaker says the sentence of the consent, and
without the tick of the person who stores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from litestar import Controller, Response, get, post
from litestar.datastructures import FormMultiDict, UploadFile

from gateway.api.http.forms import reader_of
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.playground.origins import PLAYGROUND
from gateway.console.playground.parts import Field
from gateway.console.queries import FormValues, problems_of
from gateway.console.rendering import page
from gateway.console.scope import ChooseAccount
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError
from gateway.files.sources import SentSource, Source
from gateway.voices.store import NewRecording, Recording

CLONING: Final[Task] = "voice-clone"
CONSENT: Final = "consent"
"""The field of the tick."""
SENTENCE: Final = (
    "I am the owner of this voice, and I consent to {account} using this recording to create "
    "synthetic speech in my voice."
)
"""What the speaker says in the recorded consent."""
SHOWN: Final = 100
"""Stored voices that a form offers, the newest."""


class VoicePages(Controller):
    path = "/playground/voices"

    @get("/", guards=[needs("voices.write")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _voice_page(request, visitor, values={"language": "en"})

    @post("/", guards=[needs("voices.write")])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form = await request.form()
        entered = FormValues(form)
        try:
            voice = await _create(request, _account(visitor), form, entered)
        except TollgateError as error:
            return await _voice_page(request, visitor, values=entered.values(), error=error)
        return see_other(f"{PLAYGROUND}?{urlencode({'task': CLONING, 'voice': voice.id})}")


async def _create(
    request: ApiRequest, account_id: int, form: FormMultiDict, entered: FormValues
) -> Recording:
    """Store a consent and a voice. Raise ``TollgateError``; then neither is stored."""
    _check_tick(entered)
    consent, sample = _sent(form, "consent_recording"), _sent(form, "recording")
    name = entered.text("name")
    if name is None:
        raise _missing("name", "Name the voice.")
    services = request.services
    await services.room.check(account_id, size=0)
    given = await services.voices.create(
        account_id,
        NewRecording(name, language=entered.text("language") or "en"),
        replace(consent, param="consent_recording"),
    )
    try:
        new = NewRecording(name, consent_id=given.id, transcript=entered.text("transcript") or "")
        return await services.voices.create(account_id, new, sample)
    except TollgateError:
        await services.voices.delete(account_id, "consent", given.id)
        raise


def check_consent(task: Task, form: FormMultiDict) -> None:
    """Raise ``InvalidRequest`` if an order imitates a recorded voice without the tick."""
    recording = form.get("recording")
    if task == CLONING and isinstance(recording, UploadFile) and recording.filename:
        _check_tick(FormValues(form))


def _check_tick(entered: FormValues) -> None:
    if entered.text(CONSENT) is None:
        raise _missing(
            CONSENT, "Tick that this is your voice, or that you have the speaker's consent."
        )


def _sent(form: FormMultiDict, name: str) -> Source:
    file = form.get(name)
    if not isinstance(file, UploadFile) or not file.filename:
        raise _missing(name, "Record it, or choose a file.")
    return Source("audio", SentSource(reader_of(file), file.filename), name)


def _missing(param: str, message: str) -> InvalidRequest:
    return InvalidRequest("missing_required_parameter", message, param=param)


def _account(visitor: Visitor) -> int:
    if visitor.account_id is None:
        raise ChooseAccount()
    return visitor.account_id


async def with_stored_voices(
    request: ApiRequest, visitor: Visitor, entry: CatalogEntry, fields: Sequence[Field]
) -> list[Field]:
    """Return a form's fields with the account's stored voices among those to choose from."""
    able = CLONING in (entry.task, *entry.also) and any(each.name == "voice" for each in fields)
    if not able or not visitor.may("voices.read"):
        return list(fields)
    stored = await request.services.voices.list(_account(visitor), "voice", limit=SHOWN)
    names = {voice.id: voice.name for voice in stored.items}
    return [
        replace(each, options=(*names, *each.options), names=names)
        if each.name == "voice"
        else each
        for each in fields
    ]


async def _voice_page(
    request: ApiRequest,
    visitor: Visitor,
    *,
    values: Mapping[str, str],
    error: TollgateError | None = None,
) -> Response[str]:
    account_id = _account(visitor)
    entries = request.services.live.entries(account_id)
    clones = any(CLONING in (each.task, *each.also) for each in entries)
    return await page(
        request,
        visitor,
        "playground/voice.html",
        title="A voice to speak with",
        status=error.http_status if error else 200,
        microphone=True,
        back=f"{PLAYGROUND}?{urlencode({'task': CLONING})}" if clones else PLAYGROUND,
        sentence=SENTENCE.format(account=visitor.account),
        values=values,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


HANDLERS: Final[list[Any]] = [VoicePages]
