"""Bookings: the charges and refunds that a figure of usage sums, one by one, with their sum."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from litestar import Controller, Response, get
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.bookings import Booking, list_bookings
from gateway.billing.usage.report import Filters, Span, UsageSums, read_span, stored_usage
from gateway.catalog.tasks import TASKS
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.money.usage import booked_part, usage_filters
from gateway.console.queries import ROWS, Query
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.views.formats import count, usd
from gateway.console.views.money import SumRow, sum_total
from gateway.console.visitors import CurrentVisitor, Visitor

LISTS: Final = (
    ListColumns(
        "bookings",
        {
            "kind": "Kind",
            "request": "Request",
            "account": "Account",
            "model": "Model",
            "task": "Task",
            "key": "Key",
            "amount": "Amount, $",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Asked:
    account: Account | None
    span: Span
    filters: Filters


class BookingPages(Controller):
    path = "/usage/bookings"

    @get(guards=[needs("usage.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        query, services = Query(request), request.services

        def read(connection: Connection) -> tuple[_Asked, UsageSums, list[Booking]]:
            asked = _asked(connection, visitor, query)
            found = list_bookings(
                connection, asked.span, asked.filters, limit=ROWS + 1, cursor=query.text("cursor")
            )
            return asked, stored_usage(connection, asked.span, (), asked.filters), found

        asked, sums, found = await services.database.report(read, account_id=visitor.account_id)
        archived = sorted({part.archive.month for part in sums.archived})
        await add_archived(sums, services.database, services.blobs, account_id=visitor.account_id)
        total = sum_total(sums.groups)
        return await page(
            request,
            visitor,
            "money/bookings.html",
            lists=LISTS,
            title=_title(asked.account, total),
            account=asked.account,
            span=asked.span,
            total=total,
            rows=found[:ROWS],
            archived=archived,
            tasks=tuple(TASKS),
            filters=query.values,
            narrowed=bool(query.narrowed - {"account"}),
            charges=_file_url(query, asked.span),
            pager=query.pages(found[ROWS - 1].cursor if len(found) > ROWS else None),
        )


def _asked(connection: Connection, visitor: Visitor, query: Query) -> _Asked:
    account = account_of(connection, visitor, query.text("account"))
    filters = usage_filters(connection, account, query)
    if account is None and filters.account_ids is not None:
        # The account of a key.
        account = find_account(connection, filters.account_ids[0])
    span = read_span(query.text("from"), query.text("to"), visitor.zone, now=datetime.now(UTC))
    return _Asked(account, span, filters)


def _file_url(query: Query, span: Span) -> str | None:
    """Return the address of the same charges as files, which are not chosen by tag."""
    days = booked_part(span)
    if query.text("tag") is not None or days is None:
        return None
    return query.at("/console/usage/charges", cursor=None, **days)


def _title(account: Account | None, total: SumRow) -> str:
    of = f" of {account.name}" if account else ""
    requests = f"{count(total.requests)} request{'' if total.requests == 1 else 's'}"
    return f"{usd(total.net_nanos)} for {requests}{of}"


HANDLERS: Final[list[Any]] = [BookingPages]
