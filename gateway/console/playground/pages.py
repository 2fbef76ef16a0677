"""The playground's page: choose a task and a model, see the price, order, see what was made.

Everything works by posting the form, which leads to the page of the request. The page's script
sends the same form and reads the answer as a stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

from litestar import Controller, Response, get, post
from litestar.datastructures import FormMultiDict
from litestar.response import Stream

from gateway.accounts.keys import KeyInfo, find_console_key
from gateway.api.http.answers import event_stream, json_response
from gateway.api.http.request import ApiRequest
from gateway.catalog.availability import availability
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.playground.code import code_of
from gateway.console.playground.fields import fields_of
from gateway.console.playground.orders import (
    Order,
    order_events,
    quote_order,
    read_order,
    submit,
)
from gateway.console.queries import FormValues, Query, problems_of
from gateway.console.rendering import page
from gateway.console.scope import ChooseAccount
from gateway.console.views.models import price_texts
from gateway.console.views.requests import RequestRow, request_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, TollgateError, render_openai, unknown_model
from gateway.requests.lookup import RequestFilter

NAMES: Final[Mapping[Task, str]] = {
    "text-generation": "Chat",
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
    "text-embedding": "Embeddings",
}
"""What people call the tasks, in the order of their tabs."""
HISTORY_HOURS: Final = 24
HISTORY_ROWS: Final = 8


class PlaygroundPages(Controller):
    path = "/playground"

    @get("/", guards=[needs("play.read")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        return await _form_page(request, visitor, query.text("model"), query.text("task"))

    @post("/quote", status_code=200, guards=[needs("play.read")])
    async def quote(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form, wants_page = await request.form(), _wants_page(request)
        try:
            order = _order(request, visitor, form)
            quoted = {
                **quote_order(request, visitor, order),
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
            order = _order(request, visitor, form)
            ticket = await submit(request, visitor, order, attended=not wants_page)
        except TollgateError as error:
            return await _refused(request, visitor, form, error)
        if not wants_page:
            return event_stream(order_events(ticket))
        ticket.close()
        return see_other(f"/console/requests/{ticket.request_id}")


def _wants_page(request: ApiRequest) -> bool:
    """Whether a form was sent by the browser itself, not by the page's script."""
    return "text/html" in request.headers.get("accept", "")


def _offered(request: ApiRequest, visitor: Visitor) -> Sequence[CatalogEntry]:
    """Return the models at the account's prices. Raise ``ChooseAccount`` if none is chosen."""
    if visitor.account_id is None:
        raise ChooseAccount()
    return request.services.live.entries(visitor.account_id)


def _order(request: ApiRequest, visitor: Visitor, form: FormMultiDict) -> Order:
    entered = FormValues(form)
    entry, task = _chosen(request, visitor, entered.text("model"), entered.text("task"))
    return read_order(entry, task, form)


def _chosen(
    request: ApiRequest, visitor: Visitor, model: str | None, task: str | None
) -> tuple[CatalogEntry, Task]:
    """Return the model and the task that were chosen, or those to begin with. Raise
    ``NotFound`` or ``InvalidRequest``."""
    entries = _offered(request, visitor)
    if task is not None and task not in get_args(Task):
        raise InvalidRequest("invalid_value", f"Unknown task {task!r}.", param="task")
    if model is not None:
        entry = next((each for each in entries if each.name == model), None)
        if entry is None:
            raise unknown_model(model, listed="the list of models")
        found = next((each for each in _tasks(entry) if each == task), entry.task)
        return entry, found
    wanted = next((each for each in NAMES if each == task), None)
    for each in [wanted] if wanted else list(NAMES):
        able = [entry for entry in entries if each in _tasks(entry)]
        if able:
            return min(able, key=lambda entry: not _is_available(request, entry)), each
    raise InvalidRequest("model_not_found", f"No model does {task or 'anything'}.", param="task")


def _tasks(entry: CatalogEntry) -> tuple[Task, ...]:
    return (entry.task, *entry.also)


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
    return await _form_page(
        request,
        visitor,
        entered.text("model"),
        entered.text("task"),
        values=entered.values(),
        quoted=quoted,
        error=error,
    )


async def _form_page(
    request: ApiRequest,
    visitor: Visitor,
    model: str | None,
    task: str | None,
    *,
    values: Mapping[str, str] | None = None,
    quoted: Mapping[str, Any] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    entry, chosen = _chosen(request, visitor, model, task)
    entries = _offered(request, visitor)
    missing = availability(entry, request.services.requests.health.announcements)
    able = [each for each in entries if chosen in _tasks(each)]
    offered = [(each.name, _is_available(request, each)) for each in able]
    fields = fields_of(entry, chosen)
    return await page(
        request,
        visitor,
        "playground/form.html",
        title=f"{NAMES[chosen]}: {entry.name}",
        status=200 if error is None else error.http_status,
        model=entry.name,
        task=chosen,
        tabs=[(each, name) for each, name in NAMES.items() if _any_does(entries, each)],
        offered=sorted(offered, key=lambda each: not each[1]),
        prices=price_texts(entry),
        why_missing=missing.reason if missing else None,
        fields=[each for each in fields if not each.aside],
        further=[each for each in fields if each.aside],
        values=values or _example(entry, chosen),
        has_files=any(each.kind == "file" for each in fields),
        is_chat=chosen == "text-generation" and entry.workflow is None,
        may_order=visitor.may("play.write"),
        quoted=quoted,
        error=error,
        problems=_problems(error),
        again="again" in request.query_params,
        history=await _history(request, visitor),
        hours=HISTORY_HOURS,
    )


def _any_does(entries: Sequence[CatalogEntry], task: Task) -> bool:
    return any(task in _tasks(entry) for entry in entries)


def _problems(error: TollgateError | None) -> dict[str, str]:
    """Return a mistake by the name of its field, which is the last part of the API's."""
    return {name.rpartition(".")[2]: text for name, text in problems_of(error).items()}


def _example(entry: CatalogEntry, task: Task) -> Mapping[str, str]:
    """Return the texts of an example that works, to begin with."""
    for each in entry.examples:
        if (task == entry.task) == (not {"image", "images", "video"} & each.keys()):
            found = {name: value for name, value in each.items() if isinstance(value, str)}
            return {**found, "message": found.get("prompt", "")}
    return {}


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
