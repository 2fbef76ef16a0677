"""Orders of the playground: reads its form, and sends it with the key of the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from litestar.datastructures import FormMultiDict, UploadFile

from gateway.accounts.keys import KeyInfo, limited_key
from gateway.api.http.forms import reader_of
from gateway.api.http.request import ApiRequest
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.console.playground.chat import (
    EARLIER,
    FILE,
    conversation,
    pictures_in,
)
from gateway.console.playground.fields import fields_of, read_input
from gateway.console.playground.origins import OURS, UPLOAD, origins_in, read_origin, stored_source
from gateway.console.playground.parts import COMPLETION, FormName, task_of
from gateway.console.views.formats import usd
from gateway.console.visitors import Visitor
from gateway.errors import InvalidRequest
from gateway.files.sources import SentSource
from gateway.operations.keys import console_key
from gateway.pricing import parse_usd
from gateway.requests.caller import Caller
from gateway.requests.ticket import Ticket
from gateway.tasks.submission import Submission
from workers.contract.jobs import PromptWarning

CHAT: Final[Task] = "text-generation"
PREVIEWS: Final = 2
"""Previews of a picture or video that is watched; they are free."""


@dataclass(frozen=True, slots=True)
class Order:
    """What was entered in a form of a model: the input of its task."""

    entry: CatalogEntry
    form: FormName
    input: Mapping[str, Any]

    @property
    def task(self) -> Task:
        return task_of(self.form)

    @property
    def is_text(self) -> bool:
        """Whether a text is streamed, whose cost so far is shown, and which leaving ends."""
        return is_text(self.entry, self.form)

    @property
    def other_task(self) -> Task | None:
        """The task if it is not the model's first, which the input chooses by itself."""
        return None if self.task == self.entry.task else self.task

    @property
    def body(self) -> dict[str, Any]:
        """The body of ``POST /v1/requests``."""
        task = {"task": self.other_task} if self.other_task else {}
        return {"model": self.entry.name, **task, "input": self.input}


def is_chat(entry: CatalogEntry, form: FormName) -> bool:
    """Whether a form is a conversation. The inputs of a workflow are named by its author."""
    return form == CHAT and entry.workflow is None


def is_text(entry: CatalogEntry, form: FormName) -> bool:
    return form == COMPLETION or is_chat(entry, form)


async def read_order(
    request: ApiRequest, visitor: Visitor, entry: CatalogEntry, form: FormName, sent: FormMultiDict
) -> Order:
    """Read a form that was sent. Raise ``TollgateError``."""
    given: dict[str, Any] = {}
    for name, value in sent.multi_items():
        if not isinstance(value, UploadFile):
            given[name] = value
        elif value.filename:
            given.setdefault(name, []).append(SentSource(reader_of(value), value.filename))
    fields = fields_of(entry, form)
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    for name, origins in origins_in(fields, texts).items():
        # A file that was chosen takes the place of outputs; an empty field is an empty text.
        if not given.get(name):
            given[name] = [await stored_source(request, visitor, each) for each in origins]
    made = input_of(entry, form, given)
    if is_chat(entry, form):
        await _find_pictures(request, visitor, made["messages"], given.get(EARLIER, ()))
    return Order(entry, form, made)


def input_of(entry: CatalogEntry, form: FormName, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the input that the values of a form make. Raise ``InvalidRequest``."""
    made = read_input(fields_of(entry, form), given)
    if is_chat(entry, form):
        made = conversation(made, str(given.get("messages") or "[]"))
    return made


async def _find_pictures(
    request: ApiRequest, visitor: Visitor, messages: Sequence[Any], files: Sequence[SentSource]
) -> None:
    """Put the pictures of earlier messages in their places: files of the form, and those of earlier
    requests. Raise ``TollgateError``."""
    for picture in pictures_in(messages):
        url = picture["url"]
        if url.startswith(FILE):
            place = url.removeprefix(FILE)
            if not place.isdecimal() or int(place) >= len(files):
                raise InvalidRequest(
                    "invalid_value", "A picture of the conversation is missing.", param="messages"
                )
            picture["url"] = files[int(place)]
        elif url.startswith(("req_", OURS, UPLOAD)):
            picture["url"] = await stored_source(request, visitor, read_origin(url))


def most_of(request: ApiRequest, visitor: Visitor, order: Order) -> int:
    """Return the most that an order can cost, in nano-dollars. Raise ``InvalidRequest``."""
    assert visitor.account_id is not None
    quotes = request.services.requests.quotes
    return quotes.quote(_submission(request, order), visitor.account_id).bill.total_nanos


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
    """Send an order. Of one that is ``attended``, leaving the page cancels a text that is written;
    what makes media goes on. Raise why it is refused."""
    services = request.services
    if attended and order.entry.engine == "diffusion" and not order.task.endswith("-upscale"):
        order = replace(order, input={**order.input, "previews": PREVIEWS})
    submission = _submission(request, order)
    if attended and order.is_text:
        submission = replace(submission, waits=True)
    await services.requests.health.check_served(order.entry)
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
