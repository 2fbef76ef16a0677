"""Finds a page, an account, a model or a request by what is typed: the palette, and a page.

Nothing is searched that has no index: accounts by the start of their name, models in memory, and a
request by its whole id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from litestar import Response, get
from sqlalchemy import Connection

from gateway.accounts.accounts import list_accounts
from gateway.api.http.request import ApiRequest
from gateway.console.guards import needs
from gateway.console.navigation import navigation
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.ledger.prices import LIST

EACH: Final = 8
"""Results of each kind."""
_REQUEST: Final = re.compile(r"req_[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that was found."""

    kind: str
    label: str
    path: str


@get("/find", guards=[needs("own.write")])
async def find(request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
    query = Query(request)
    # The menu of accounts sends its own field.
    text = (query.text("q") or query.text("account") or "").strip()[:100]
    names = await _accounts(request, visitor, text) if text else []
    hits = [*_hits(request, visitor, text), *_of_accounts(visitor, names)]
    return await page(
        request,
        visitor,
        "find.html",
        title=f"Found for {text}" if text else "Find",
        text=text,
        hits=hits,
        accounts=names,
    )


def _hits(request: ApiRequest, visitor: Visitor, text: str) -> Iterator[Hit]:
    lowered = text.lower()
    if _REQUEST.fullmatch(lowered) and visitor.may("requests.read"):
        yield Hit("Request", lowered, f"/console/requests/{lowered}")
    places = [link.place for group in navigation(visitor, "") for link in group.links]
    for place in [each for each in places if lowered in each.label.lower()][: EACH if text else 99]:
        yield Hit("Page", place.label, place.path)
    if text and visitor.may("catalog.read"):
        entries = request.services.live.entries(visitor.account_id or LIST)
        for name in [each.name for each in entries if lowered in each.name.lower()][:EACH]:
            yield Hit("Model", name, f"/console/models/{name}")


async def _accounts(request: ApiRequest, visitor: Visitor, text: str) -> Sequence[tuple[int, str]]:
    """Return accounts whose name begins with a text, of those that the visitor may see."""
    if visitor.role is None:
        lowered = text.lower()
        own = sorted(visitor.accounts.items(), key=lambda each: each[1])
        return [each for each in own if each[1].lower().startswith(lowered)][:EACH]

    def read(connection: Connection) -> list[tuple[int, str]]:
        found = list_accounts(connection, name=text, limit=EACH)
        return [(account.id, account.name) for account in found]

    return await request.services.database.read(read)


def _of_accounts(visitor: Visitor, names: Sequence[tuple[int, str]]) -> Iterator[Hit]:
    for id, name in names:
        yield Hit("Account", name, f"/console/accounts/{id}")


HANDLERS: Final[list[Any]] = [find]
