"""The playground's page: choose a task and a model, see the price, order, see what was made.

Everything works by posting the form, which leads to the page of the request. The page's script
sends the same form and reads the answer as a stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.datastructures import FormMultiDict
from litestar.params import FromPath
from litestar.response import Stream

from gateway.accounts.accounts import find_account
from gateway.accounts.keys import KeyInfo, find_console_key
from gateway.api.http.answers import event_stream, json_response
from gateway.api.http.audio_response import start_audio, stream_audio
from gateway.api.http.request import ApiRequest
from gateway.catalog.availability import availability
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import TASKS, makes
from gateway.console.answers import see_other
from gateway.console.assets import PORTRAIT, load_assets
from gateway.console.guards import needs
from gateway.console.playground.again import carried
from gateway.console.playground.beginnings import (
    Example,
    address,
    cheap_examples,
    example_values,
    named_values,
    shared_address,
)
from gateway.console.playground.code import code_of
from gateway.console.playground.fields import fields_of, forms_of
from gateway.console.playground.orders import (
    CHAT,
    Order,
    input_of,
    is_chat,
    is_text,
    most_of,
    quote_order,
    read_order,
    submit,
)
from gateway.console.playground.origins import KINDS, OURS, PREFIX, can_read, origins_in
from gateway.console.playground.parts import COMPLETION, RECORDED, Field, FormName, task_of
from gateway.console.playground.stream import OrderStream
from gateway.console.playground.voices import CLONING, check_consent, with_stored_voices
from gateway.console.queries import FormValues, Query, problems_of
from gateway.console.rendering import page
from gateway.console.scope import ChooseAccount
from gateway.console.views.formats import usd
from gateway.console.views.models import price_texts
from gateway.console.views.requests import RequestRow, request_row
from gateway.console.views.workflows import workflow_graph
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound, TollgateError, render_openai, unknown_model
from gateway.files.kept_inputs import KeptInput, kept_input
from gateway.requests.lookup import RequestFilter

NAMES: Final[Mapping[FormName, str]] = {
    "text-generation": "Chat",
    COMPLETION: "Completion",
    "text-to-image": "Images",
    "image-edit": "Edit",
    "image-to-image": "Vary",
    "image-blend": "Blend",
    "image-relight": "Relight",
    "image-restyle": "Restyle",
    "image-upscale": "Enlarge",
    "text-to-video": "Video",
    "image-to-video": "Video of a picture",
    "video-upscale": "Enlarge a video",
    "talking-head": "Talking head",
    "text-to-speech": "Speech",
    "voice-clone": "Speech by a voice",
    "text-to-music": "Music",
    "speech-to-text": "Transcripts",
    "text-embedding": "Embeddings",
    "rerank": "Ranking",
}
"""What people call the forms, in the order of their tabs."""
VOICE_SAMPLE: Final = "Good morning. This is how I sound."
"""What a voice says to be chosen by."""
HISTORY_HOURS: Final = 24
HISTORY_ROWS: Final = 8


class PlaygroundPages(Controller):
    path = "/playground"

    @get("/", guards=[needs("play.read")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        kind = next((each for each in KINDS if query.text(f"{PREFIX}{each}")), None)
        kept = await _kept(request, visitor, query.text("again"))
        wanted = query.text("task")
        if kept is not None and kept.task == CHAT and "prompt" in kept.input:
            wanted = COMPLETION
        entry, form = _chosen(request, visitor, query.text("model"), wanted, kind)
        fields = fields_of(entry, form)
        named = named_values(fields, query.values)
        named["beside"] = query.text("beside") or ""
        if (request_id := query.text("again")) is None:
            values = {**example_values(entry, form), **named}
            return await _form_page(request, visitor, entry, form, values=values)
        again = None
        if kept is not None:
            fields = await with_stored_voices(request, visitor, entry, fields)
            again = carried(request_id, kept.input, fields)
        values = {**(again.values if again else example_values(entry, form)), **named}
        lost = again.lost if again else None
        return await _form_page(request, visitor, entry, form, values=values, lost=lost, again=True)

    @post("/quote", status_code=200, guards=[needs("play.read")])
    async def quote(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, wants_page = await request.form(), _wants_page(request)
        try:
            order = await _order(request, visitor, form)
            quoted = {
                **quote_order(request, visitor, order),
                "available": usd(await _available(request, visitor)),
                "code": code_of(str(request.base_url).rstrip("/"), order.body),
            }
        except TollgateError as error:
            return await _refused(request, visitor, form, error)
        if not wants_page:
            return json_response(quoted)
        return await _entered_page(request, visitor, form, quoted=quoted)

    @post("/order", status_code=200, guards=[needs("play.write")])
    async def order(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any] | Stream:
        form, wants_page = await request.form(), _wants_page(request)
        try:
            order = await _order(request, visitor, form)
            check_consent(order.task, form)
            ticket = await submit(request, visitor, order, attended=not wants_page)
        except TollgateError as error:
            return await _refused(request, visitor, form, error)
        if not wants_page:
            offered = _offered(request, visitor)
            stream = OrderStream(request.services, ticket, offered, is_text=order.is_text)
            return event_stream(stream.events())
        ticket.close()
        return see_other(f"/console/requests/{ticket.request_id}")

    @get("/sound/{request_id:str}", guards=[needs("play.read")])
    async def sound(
        self, request: ApiRequest, visitor: CurrentVisitor, request_id: FromPath[str]
    ) -> Stream:
        """Stream the sound of an order from its start, also while it is made."""
        account_id = visitor.account_id
        if account_id is None or not visitor.may("contents.read", account_id):
            raise NotFound("not_found", "There is no such sound.")
        requests = request.services.requests
        found = await requests.lookup.find(account_id, request_id, whole=False)
        if makes(found.task) != "audio":
            raise NotFound("not_found", "There is no such sound.")
        ticket = requests.resume(account_id, found.request_id, found.accepted_at)
        return stream_audio(await start_audio(request, ticket))


def _wants_page(request: ApiRequest) -> bool:
    """Whether a form was sent by the browser itself, not by the page's script."""
    return "text/html" in request.headers.get("accept", "")


def _offered(request: ApiRequest, visitor: Visitor) -> Sequence[CatalogEntry]:
    """Return the models at the account's prices. Raise ``ChooseAccount`` if none is chosen."""
    if visitor.account_id is None:
        raise ChooseAccount()
    return request.services.live.entries(visitor.account_id)


async def _order(request: ApiRequest, visitor: Visitor, form: FormMultiDict) -> Order:
    entered = FormValues(form)
    entry, name = _chosen(request, visitor, entered.text("model"), entered.text("task"))
    return await read_order(request, visitor, entry, name, form)


def _chosen(
    request: ApiRequest,
    visitor: Visitor,
    model: str | None,
    form: str | None,
    kind: str | None = None,
) -> tuple[CatalogEntry, FormName]:
    """Return the model and the form that were chosen, or those to begin with, with a file of a
    ``kind``. Raise ``NotFound`` or ``InvalidRequest``."""
    entries = _offered(request, visitor)
    wanted = next((each for each in NAMES if each == form), None)
    if form is not None and wanted is None:
        raise InvalidRequest("invalid_value", f"Unknown task {form!r}.", param="task")
    if model is not None:
        entry = next((each for each in entries if each.name == model), None)
        if entry is None:
            raise unknown_model(model, listed="the list of models")
        return entry, wanted if wanted in forms_of(entry) else entry.task
    # A file is for a task that is about such files, rather than for a chat that reads them.
    ordered = sorted(
        NAMES, key=lambda each: kind is not None and kind not in TASKS[task_of(each)].reads
    )
    for each in [wanted] if wanted else ordered:
        able = [
            entry
            for entry in entries
            if each in forms_of(entry) and (kind is None or can_read(entry, each, kind))
        ]
        if able:
            return min(able, key=lambda entry: not _is_available(request, entry)), each
    raise InvalidRequest("model_not_found", f"No model does {form or 'anything'}.", param="task")


def _is_available(request: ApiRequest, entry: CatalogEntry) -> bool:
    return availability(entry, request.services.requests.health.announcements) is None


async def _refused(
    request: ApiRequest, visitor: Visitor, form: FormMultiDict, error: TollgateError
) -> Response[Any]:
    """Show why an order was refused, at its form, with what was entered."""
    headers = dict(error.headers)
    if not _wants_page(request):
        return json_response(render_openai(error), status=error.http_status, headers=headers)
    found = await _entered_page(request, visitor, form, error=error)
    found.headers.update(headers)
    return found


async def _entered_page(
    request: ApiRequest,
    visitor: Visitor,
    form: FormMultiDict,
    *,
    quoted: Mapping[str, Any] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    entered = FormValues(form)
    entry, name = _chosen(request, visitor, entered.text("model"), entered.text("task"))
    return await _form_page(
        request, visitor, entry, name, values=entered.values(), quoted=quoted, error=error
    )


async def _form_page(
    request: ApiRequest,
    visitor: Visitor,
    entry: CatalogEntry,
    form: FormName,
    *,
    values: Mapping[str, str],
    quoted: Mapping[str, Any] | None = None,
    error: TollgateError | None = None,
    again: bool = False,
    lost: Sequence[str] | None = None,
) -> Response[str]:
    """``lost`` names what was sent ``again`` and has no field; None: it was not kept."""
    entries = _offered(request, visitor)
    missing = availability(entry, request.services.requests.health.announcements)
    able = [each for each in entries if form in forms_of(each)]
    offered = [(each.name, _is_available(request, each)) for each in able]
    fields = await with_stored_voices(request, visitor, entry, fields_of(entry, form))
    scripts = _scripts(entry, form, fields)
    return await page(
        request,
        visitor,
        "playground/form.html",
        title=f"{NAMES[form]}: {entry.name}",
        status=200 if error is None else error.http_status,
        model=entry.name,
        task=form,
        tabs=[(each, name) for each, name in NAMES.items() if _any_does(entries, each)],
        offered=sorted(offered, key=lambda each: not each[1]),
        prices=price_texts(entry),
        why_missing=missing.reason if missing else None,
        fields=[each for each in fields if not each.aside],
        further=[each for each in fields if each.aside],
        opened=error is not None or any(each.aside and values.get(each.name) for each in fields),
        values=values,
        origins=origins_in(fields, values),
        share=shared_address(entry, form, fields, values),
        examples=_examples(request, visitor, entry, form),
        graph=workflow_graph(entry.workflow) if entry.workflow else None,
        sample=VOICE_SAMPLE,
        clones=form == CLONING and any(each.name == "recording" for each in fields),
        microphone="record" in scripts,
        available_nanos=await _available(request, visitor),
        tops_up=visitor.may("payments.write") and bool(request.services.settings.stripe_api_key),
        has_files=any(each.kind == "file" for each in fields),
        is_chat=is_chat(entry, form),
        is_text=is_text(entry, form),
        portrait=load_assets().url(PORTRAIT),
        with_portrait=address(entry, form, {f"{PREFIX}image": f"{OURS}/0"}),
        sees="image" in entry.input,
        seeing=[each.name for each in able if "image" in each.input],
        scripts=scripts,
        beside=_beside(entry, offered),
        compared=(values.get("beside") or "").split(","),
        may_order=visitor.may("play.write"),
        quoted=quoted,
        error=error,
        problems=_problems(error),
        again=again,
        lost=lost,
        history=await _history(request, visitor),
        hours=HISTORY_HOURS,
    )


def _beside(entry: CatalogEntry, offered: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the models that can be ordered beside another; a workflow has its own inputs."""
    if entry.workflow is not None:
        return []
    return [name for name, available in offered if available and name != entry.name]


async def _available(request: ApiRequest, visitor: Visitor) -> int:
    """Return what the account can hold for new orders, in nano-dollars."""
    account_id = visitor.account_id
    assert account_id is not None
    found = await request.services.database.read(lambda each: find_account(each, account_id))
    return found.available_nanos


def _examples(
    request: ApiRequest, visitor: Visitor, entry: CatalogEntry, form: FormName
) -> list[Example]:
    def most(values: Mapping[str, str]) -> int | None:
        try:
            return most_of(request, visitor, Order(entry, form, input_of(entry, form, values)))
        except TollgateError:
            return None

    return cheap_examples(entry, form, most)


def _scripts(entry: CatalogEntry, form: FormName, fields: Sequence[Field]) -> list[str]:
    """Return the scripts of a form, each of which is loaded only where it is used."""
    if is_chat(entry, form):
        return ["chat"]
    names = {each.name for each in fields}
    made = TASKS[task_of(form)].makes
    found = ["order"]
    if any(each.kind == "file" for each in fields):
        found.append("sources")
    if "mask" in names and names & {"image", "images"}:
        found.append("mask")
    if names & RECORDED:
        found.append("record")
    if made in ("image", "video"):
        found.append("pictures")
    if made == "audio":
        found.append("sound")
    if entry.workflow is not None:
        found.append("flow")
    return found


async def _kept(request: ApiRequest, visitor: Visitor, request_id: str | None) -> KeptInput | None:
    """Return what was sent with a request of the account; None if it is not kept, or not shown."""
    account_id = visitor.account_id
    if request_id is None or account_id is None or not visitor.may("contents.read", account_id):
        return None
    return await kept_input(request.services.requests.media, account_id, request_id)


def _any_does(entries: Sequence[CatalogEntry], form: FormName) -> bool:
    return any(form in forms_of(entry) for entry in entries)


def _problems(error: TollgateError | None) -> dict[str, str]:
    """Return a mistake by the name of its field, which is the last part of the API's."""
    return {name.rpartition(".")[2]: text for name, text in problems_of(error).items()}


async def _history(request: ApiRequest, visitor: Visitor) -> list[RequestRow]:
    """Return what was ordered here lately, newest first."""
    services, account_id = request.services, visitor.account_id
    assert account_id is not None
    key_id = visitor.key_id

    def read(connection: Any) -> KeyInfo | None:
        return find_console_key(connection, account_id, services.pepper)

    if key_id is None:
        found = await services.database.read(read)
        key_id = found.id if found else None
    if key_id is None:
        return []
    since = datetime.now(UTC) - timedelta(hours=HISTORY_HOURS)
    wanted = RequestFilter(account_id, key_id=key_id, starts_at=since)
    listed = await services.requests.lookup.list(wanted, limit=HISTORY_ROWS, cursor=None)
    return [request_row(each, {account_id: visitor.account or ""}) for each in listed.items]


HANDLERS: Final[list[Any]] = [PlaygroundPages]
