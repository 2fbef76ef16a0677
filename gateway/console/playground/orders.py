"""Orders of the playground: reads its form, and sends it with the key of the console."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from litestar.datastructures import FormMultiDict, UploadFile

from gateway.accounts.keys import KeyInfo, limited_key
from gateway.api.http.answers import KEEP_ALIVE, KEEP_ALIVE_S, event_data
from gateway.api.http.request import ApiRequest
from gateway.api.http.text_stream import TextStream, choices_of
from gateway.catalog.availability import availability
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.checks.decoding import decode_json
from gateway.console.playground.fields import MESSAGE, fields_of, read_input
from gateway.console.views.formats import duration, usd
from gateway.console.views.outputs import shown_output
from gateway.console.visitors import Visitor
from gateway.errors import InvalidRequest, TollgateError, Unavailable
from gateway.files.fetch import CHUNK_BYTES
from gateway.files.sources import SentSource
from gateway.ledger.closed import ClosedRequest
from gateway.operations.keys import console_key
from gateway.pricing import parse_usd
from gateway.requests.caller import Caller
from gateway.requests.ticket import Ticket
from gateway.tasks.submission import Submission
from workers.contract.jobs import Progress, PromptWarning, SentEvent

CHAT: Final[Task] = "text-generation"


@dataclass(frozen=True, slots=True)
class Order:
    """What was entered in the form: a model, its task and the input."""

    entry: CatalogEntry
    task: Task
    input: Mapping[str, Any]

    @property
    def other_task(self) -> Task | None:
        """The task if it is not the model's first, which the input chooses by itself."""
        return None if self.task == self.entry.task else self.task

    @property
    def body(self) -> dict[str, Any]:
        """The body of ``POST /v1/requests``."""
        task = {"task": self.other_task} if self.other_task else {}
        return {"model": self.entry.name, **task, "input": self.input}


def read_order(entry: CatalogEntry, task: Task, form: FormMultiDict) -> Order:
    """Read the form of a task. Raise ``InvalidRequest``."""
    given: dict[str, Any] = {}
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            given[name] = value
        elif value.filename:
            given.setdefault(name, []).append(SentSource(_reader(value), value.filename))
    made = read_input(fields_of(entry, task), task, given)
    if task == CHAT and entry.workflow is None:
        made = _conversation(made, str(given.get("messages") or "[]"))
    return Order(entry, task, made)


def _conversation(made: dict[str, Any], earlier: str) -> dict[str, Any]:
    """Put the message after the earlier ones, and the system's before them."""
    try:
        messages = decode_json(earlier.encode())
    except msgspec.DecodeError:
        messages = None
    if not isinstance(messages, list):
        raise InvalidRequest("invalid_value", "The conversation cannot be read.", param="messages")
    system, message = made.pop("system", None), made.pop(MESSAGE, None)
    if message is None:
        raise InvalidRequest("missing_required_parameter", "Write a message first.", param=MESSAGE)
    before = [{"role": "system", "content": system}] if system else []
    return {"messages": [*before, *messages, {"role": "user", "content": message}], **made}


def _reader(file: UploadFile) -> Any:
    async def read() -> AsyncIterator[bytes]:
        await file.seek(0)
        while chunk := await file.read(CHUNK_BYTES):
            yield chunk

    return read


def quote_order(request: ApiRequest, visitor: Visitor, order: Order) -> dict[str, Any]:
    """Return the most that an order can cost, as ``POST /v1/quote`` does, and the words that its
    model does not know. Raise ``InvalidRequest``."""
    assert visitor.account_id is not None
    quotes = request.services.requests.quotes
    quoted = quotes.quote(_submission(request, order), visitor.account_id)
    return {
        "most": usd(quoted.bill.total_nanos),
        "is_exact": quoted.cost_nanos is not None,
        "unknown": unknown_words(quoted.warnings),
    }


def unknown_words(warnings: tuple[PromptWarning, ...]) -> list[str]:
    return list(dict.fromkeys(word for each in warnings for word in each.unknown))


async def submit(request: ApiRequest, visitor: Visitor, order: Order, *, attended: bool) -> Ticket:
    """Send an order. Of one that is ``attended``, leaving the page cancels a conversation's
    answer; what makes media goes on. Raise why it is refused."""
    services = request.services
    submission = _submission(request, order)
    if attended and order.task == CHAT:
        submission = replace(submission, waits=True)
    missing = availability(order.entry, services.requests.health.announcements)
    if missing is not None:
        raise Unavailable(missing.code, f"{order.entry.name} is not available: {missing.reason}.")
    caller = Caller(await _key(request, visitor))
    return await services.requests.submit(caller, submission)


def _submission(request: ApiRequest, order: Order) -> Submission:
    quotes = request.services.requests.quotes
    return quotes.submission(order.entry.name, order.input, task=order.other_task)


async def _key(request: ApiRequest, visitor: Visitor) -> KeyInfo:
    """Return the key that pays: the visitor's, if it entered with one, otherwise the console's."""
    services, account_id = request.services, visitor.account_id
    assert account_id is not None
    if (key_id := visitor.key_id) is not None:
        return await services.database.read(lambda each: limited_key(each, key_id))
    return await services.database.write(
        lambda each: console_key(
            each,
            visitor.author(),
            account_id,
            spend_limit_nanos=parse_usd(services.settings.console_spend_limit_usd),
            pepper=services.pepper,
        )
    )


async def order_events(ticket: Ticket) -> AsyncIterator[bytes]:
    """Yield what becomes of an order, as server-sent events that the playground's script reads."""
    text = TextStream(ticket.request_id)
    path = f"/console/requests/{ticket.request_id}"
    with ticket:
        yield event_data({"id": ticket.request_id, "path": path}, name="accepted")
        try:
            while (events := await ticket.next_events(KEEP_ALIVE_S)) is not None:
                yield b"".join(_event(text, sent) for sent in events) or KEEP_ALIVE
            closed = ticket.result
            for delta in text.rest(choices_of(closed)):
                yield event_data({"text": delta.text}, name="text")
            yield event_data(_ended(closed, path), name="ended")
        except TollgateError as error:
            yield event_data({"message": error.message}, name="failed")


def _event(text: TextStream, sent: SentEvent) -> bytes:
    if isinstance(progress := sent.event, Progress):
        stage = progress.stage.name if progress.stage else ""
        shown = {"step": progress.step, "steps": progress.steps, "stage": stage}
        return event_data(shown, name="progress")
    delta = text.receive(sent)
    return event_data({"text": delta.text}, name="text") if delta and delta.text else b""


def _ended(closed: ClosedRequest, path: str) -> dict[str, Any]:
    """Return the end of an order: what it cost, and what was made."""
    output = shown_output(closed)
    media = output.media if output else ()
    return {
        "status": closed.status,
        "message": closed.error.message if closed.error else "",
        "cost": usd(closed.cost_nanos),
        "took": duration(closed.timings.total_us),
        "text": "\n\n".join(output.texts) if output else "",
        "value": output.value if output else "",
        "unknown": unknown_words(closed.warnings),
        "media": [
            {"kind": one.kind, "facts": one.facts, "path": f"{path}/media/{one.position}"}
            for one in media
            if one.stored and not one.error
        ],
    }
