"""Which columns of lists a visitor sees: chosen for each list, and kept in the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from litestar import post
from litestar.response import Redirect

from gateway.accounts.sessions import hide_columns
from gateway.api.http.request import ApiRequest
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.entrance import own
from gateway.console.entrance.enter import HOME, local_path
from gateway.console.guards import needs, no_page
from gateway.console.money import (
    bookings,
    corrections,
    organisations,
    payments,
    periods,
    prices,
)
from gateway.console.pages import (
    accounts,
    audit,
    keys,
    limits,
    models,
    money,
    people,
    reports,
    request_lists,
)
from gateway.console.queries import read_form
from gateway.console.records import archives, erasures, retention
from gateway.console.running import queue, set_aside, workers
from gateway.console.stored import batches, feedback, files, notices, voices, webhooks
from gateway.console.visitors import CurrentVisitor

_PAGES: Final = (
    *(own, request_lists, models, accounts, keys, limits, people, audit),
    *(money, reports, prices, payments, organisations, periods, bookings, corrections),
    *(workers, queue, set_aside, archives, erasures, retention),
    *(batches, files, voices, webhooks, notices, feedback),
)
LISTS: Final[Mapping[str, ListColumns]] = {
    each.name: each for pages in _PAGES for each in pages.LISTS
}
"""All lists of the console by their names."""


@post("/columns", guards=[needs("own.write")])
async def choose_columns(request: ApiRequest, visitor: CurrentVisitor) -> Redirect:
    """Choose the columns of a list; they are those of the visitor's next sessions, too."""
    form = await read_form(request)
    of_list = LISTS.get(form.raw("list"))
    if of_list is None:
        raise no_page()
    shown = frozenset(form.every("column"))
    hidden = [name for name in of_list.heads if name not in shown]
    await request.services.database.write(
        lambda each: hide_columns(each, visitor.session.id, of_list.name, hidden)
    )
    return see_other(local_path(form.raw("next") or HOME))


HANDLERS: Final[list[Any]] = [choose_columns]
