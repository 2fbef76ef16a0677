"""Rows that could not be processed: list, show with what acts on them do, retry, release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
from litestar import Controller, Response, get, post
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import find_account
from gateway.api.http.request import ApiRequest
from gateway.aside import KINDS, Kind, delete_note
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import Query, read_form
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound
from gateway.operations import set_aside
from gateway.operations.set_aside import Action, SetAsideDetailView

LISTED_MAX: Final = 1000
CONTENT_MAX: Final = 4000
"""Characters of a result that the page shows."""
ABOUT: Final[Mapping[Kind, str]] = {
    "request": "An open request whose job or steps cannot be read.",
    "outcome": "The end of a request that could not be booked. The request failed, without a "
    "charge.",
    "batch": "A batch whose run fails again and again.",
    "price": "A price that cannot be read. Its model is not for sale while it is in force.",
    "result": "A result that an upstream charges, but that could not be read or stored. The "
    "request failed, without a charge.",
}
RETRY: Final[Mapping[Kind, str]] = {
    "request": "The next sweep tries it again, for example with a newer version.",
    "outcome": "Nothing is booked: its request has ended. Only the note is deleted.",
    "batch": "It is run again now.",
    "price": "Each gateway reads it again within seconds.",
    "result": "Nothing is tried: it is only kept. The note and what is kept are deleted.",
}
RELEASE: Final[Mapping[Kind, str]] = {
    "request": "The request ends without a charge. All that is held for it is released, and its "
    "client is told.",
    "outcome": "Nothing is charged. The note is deleted.",
    "batch": "The batch fails, and runs no further lines. What its lines have cost stays charged.",
    "price": "The note is deleted; it comes back while the price is in force and unreadable.",
    "result": "Nothing is charged. The note and what is kept are deleted.",
}
LISTS: Final = (
    ListColumns(
        "set_aside",
        {
            "kind": "Kind",
            "reason": "Reason",
            "times": "Times",
            "first": "First",
            "last": "Last",
        },
    ),
)


class SetAsidePages(Controller):
    path = "/set-aside"

    @get(guards=[needs("set_aside.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        kind = query.one_of("kind", KINDS)
        found = await request.services.database.report(
            lambda connection: set_aside.list_all(connection, limit=LISTED_MAX), account_id=None
        )
        return await page(
            request,
            visitor,
            "running/set_aside.html",
            lists=LISTS,
            title=_title(len(found)),
            rows=[row for row in found if kind in (None, row["kind"])],
            counts={one: sum(row["kind"] == one for row in found) for one in KINDS},
            about=ABOUT,
            kind=kind,
            is_cut=len(found) == LISTED_MAX,
        )

    @get("/row", guards=[needs("set_aside.read")])
    async def show(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services, (kind, name) = request.services, _named(Query(request))

        def read(connection: Connection) -> SetAsideDetailView:
            return set_aside.show(connection, kind, name)

        row = await services.database.read(read)
        owner_id = await set_aside.owner_of(services.requests.lookup, kind, name)
        owner = None
        if owner_id is not None:
            number = owner_id
            owner = await services.database.read(
                lambda connection: find_account(connection, number)
            )
        if owner_id is None or not visitor.may("contents.read", owner_id):
            row = set_aside.hide_content(row)
        return await page(
            request,
            visitor,
            "running/set_aside_row.html",
            title=f"{kind.capitalize()} {name} is set aside",
            row=row,
            owner=owner,
            about=ABOUT[kind],
            retry=RETRY[kind],
            release=RELEASE[kind],
            content=None if row["content"] is None else _text(row["content"]),
            shown_max=CONTENT_MAX,
            may_write=visitor.may("set_aside.write"),
        )

    @post("/row", guards=[needs("set_aside.write")])
    async def resolve(self, request: ApiRequest, visitor: CurrentVisitor) -> Redirect:
        form, (kind, name) = await read_form(request), _named(Query(request))
        action = form.text("do")
        if action not in ("retry", "release"):
            raise InvalidRequest("invalid_value", "Choose to retry or to release.", param="do")
        await _resolve(
            request, visitor, kind, name, cast("Action", action), form.text("reason") or ""
        )
        return see_other("/console/set-aside")


async def _resolve(
    request: ApiRequest, visitor: Visitor, kind: Kind, name: str, action: Action, reason: str
) -> None:
    services, author = request.services, visitor.author(reason)
    if kind == "request" and action == "release":
        # The settler closes it, so that the client that waits is told; recorded first.
        await services.database.write(
            lambda each: set_aside.resolve(each, author, kind, name, action)
        )
        await services.requests.release(name)
        await services.database.write(lambda each: delete_note(each, kind, name))
        return
    act = set_aside.release if action == "release" else set_aside.retry
    await services.database.write(lambda each: act(each, author, kind, name))


def _named(query: Query) -> tuple[Kind, str]:
    """Return the kind and the name of a row. Raise ``NotFound``."""
    kind, name = query.text("kind"), query.text("name")
    if kind not in KINDS or name is None:
        raise NotFound("not_set_aside", "No such row is set aside.")
    return kind, name


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content[:CONTENT_MAX]
    return msgspec.json.format(msgspec.json.encode(content)).decode()[:CONTENT_MAX]


def _title(count: int) -> str:
    if not count:
        return "Nothing is set aside"
    return "One row is set aside" if count == 1 else f"{count} rows are set aside"


HANDLERS: Final[list[Any]] = [SetAsidePages]
