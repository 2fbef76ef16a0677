"""Lists of requests: with filters, as a histogram and as a file; and what fails most."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
from litestar import Controller, Response, get, post
from litestar.response import Redirect, Stream
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names, find_account
from gateway.api.http.request import ApiRequest
from gateway.api.native.lists import owner_of_key
from gateway.api.native.usage import key_number
from gateway.billing.usage.failures import Failures, count_failures, count_unsuccessful
from gateway.billing.usage.report import Filters, Span, usage
from gateway.catalog.tasks import TASKS
from gateway.checks.moments import timestamp
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.entrance.enter import local_path
from gateway.console.guards import needs
from gateway.console.live.tail import INTERVAL_S, ListTail, tail_name
from gateway.console.pages.requests import cancel_seen
from gateway.console.queries import CURSORS, ROWS, Query
from gateway.console.rendering import page
from gateway.console.scope import account_of
from gateway.console.views.files import TableFile, attachment, csv_lines
from gateway.console.views.histogram import Histogram, histogram, unit_of
from gateway.console.views.requests import COLUMNS, STATUSES, example_model, request_row
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import FAILURE_STATUS, InvalidRequest, TollgateError
from gateway.ids import id_before
from gateway.ledger.closed import NOT_QUEUED, UNITS, ClosedRequest
from gateway.pricing import format_usd
from gateway.requests.lists.filter import OPEN
from gateway.requests.lists.origins import RequestOrigin, origins_of
from gateway.requests.lookup import RequestFilter, RequestPage
from gateway.tasks.submission import OpenRequest

OUTCOMES: Final = ("charged", "released")
REASONS: Final = (*FAILURE_STATUS, "client", "deadline", *NOT_QUEUED)
FAILURE_DAYS: Final = 7
HISTOGRAM_SPAN: Final = timedelta(hours=24)
"""Span of the histogram of a list without days."""
CANCELLED_MAX: Final = 100
"""Requests that are cancelled by one form."""
FILE_ROWS_MAX: Final = 50_000
FILE_PAGE: Final = 500
"""Requests that are read together for a file."""
_MADE: Final = tuple(unit for unit in UNITS if unit != "requests")
_OF_USAGE: Final = frozenset(
    {"account", "key", "model", "task", "outcome", "from", "to", "tail", "sum"}
)
"""Filters that sums of usage have, of which all but the outcome select bars."""
LISTS: Final = (
    COLUMNS,
    ListColumns(
        "failures",
        {
            "model": "Model",
            "requests": "Requests",
            "bar": "Share as a bar",
            "first": "First",
            "last": "Last",
            "example": "Example",
        },
    ),
)


class RequestListPages(Controller):
    path = "/"

    @get("/requests", guards=[needs("requests.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        if (sought := query.text("id")) is not None:
            return see_other(f"/console/requests/{sought.strip()}")
        services = request.services
        account, chosen = await _chosen(request, visitor, query)
        before = query.text("before")
        found = await services.requests.lookup.list(
            chosen,
            limit=ROWS,
            cursor=before or query.text("cursor"),
            oldest_first=before is not None,
        )
        if before and found.next_cursor is None:
            # These are the newest, which are on the first page.
            return see_other(query.url(before=None))
        items = found.items if before is None else found.items[::-1]
        names, origins = await _known(request, account, items)
        wants_sum = query.one_of("sum", ("yes",)) is not None
        sums = await services.requests.lookup.summarize(chosen) if wants_sum else None
        tail = _tail(query, chosen, found, visitor)
        return await page(
            request,
            visitor,
            "requests.html",
            lists=LISTS,
            live=INTERVAL_S if tail else None,
            tail=tail,
            tail_switch=query.url(tail=None if tail else "on", cursor=None),
            title="Requests" if account is None else f"Requests of {account.name}",
            account=account,
            rows=[request_row(one, names, origins) for one in items],
            searched_to=found.searched_to,
            archived=found.archived,
            sums=sums,
            sum_url=query.url(sum="yes", cursor=None),
            filters=query.values,
            narrowed=bool(query.narrowed - {"account", "tail", "sum"}),
            statuses=(*STATUSES, OPEN),
            outcomes=OUTCOMES,
            tasks=tuple(TASKS),
            reasons=REASONS,
            models=services.live.names(),
            may_cancel=not tail and visitor.may("requests.write", account.id if account else None),
            base_url=str(request.base_url).rstrip("/"),
            example=example_model(services.live.entries()),
            bars=query.at("/console/requests/histogram", tail=None) if _has_bars(query) else None,
            file=query.at("/console/requests/file", cursor=None, tail=None),
            pager=_pages(query, found),
        )

    @get("/requests/histogram", guards=[needs("requests.read")])
    async def bars(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        """Requests of the filter by hour or day, from sealed hours."""
        query = Query(request)
        account, chosen = await _chosen(request, visitor, query)
        now = datetime.now(UTC)
        days = query.span(visitor.zone)
        span = days or Span(now - HISTOGRAM_SPAN, now, ZoneInfo(visitor.zone))
        span = replace(span, ends_at=min(span.ends_at, now))
        unit = unit_of(span)
        filters = Filters(
            account_ids=(chosen.account_id,) if chosen.account_id is not None else None,
            key_ids=(chosen.key_id,) if chosen.key_id is not None else None,
            models=(chosen.model,) if chosen.model else None,
            tasks=(chosen.task,) if chosen.task else None,
        )

        def read(connection: Connection) -> Histogram:
            groups = usage(connection, span, [unit], filters, units=False)
            unsuccessful = count_unsuccessful(
                connection, filters, starts_at=span.starts_at, ends_at=span.ends_at
            )
            return histogram(span, unit, groups, unsuccessful)

        found = await request.services.database.report(read, account_id=visitor.account_id)
        return await page(
            request,
            visitor,
            "histogram.html",
            title="Requests by hour" if unit == "hour" else "Requests by day",
            account=account,
            span=span,
            found=found,
            addresses=[query.at("/console/requests", cursor=bar.cursor) for bar in found.bars],
            back=query.at("/console/requests"),
        )

    @get("/requests/file", guards=[needs("requests.read")])
    async def file(self, request: ApiRequest, visitor: CurrentVisitor) -> Stream:
        """The requests of the filter as CSV, newest first."""
        account, chosen = await _chosen(request, visitor, Query(request))
        return Stream(
            _lines(request, account, chosen),
            media_type="text/csv; charset=utf-8",
            headers=attachment("requests.csv"),
        )

    @post("/requests/cancel", guards=[needs("requests.write")])
    async def cancel(self, request: ApiRequest, visitor: CurrentVisitor) -> Redirect:
        """Cancel the chosen requests; those that have ended meanwhile stay as they are."""
        form = await request.form()
        ids = [str(value) for value in form.getall("request", [])]
        if len(ids) > CANCELLED_MAX:
            raise InvalidRequest(
                "invalid_value",
                f"{len(ids)} requests are chosen; at most {CANCELLED_MAX} are cancelled at a time.",
                param="request",
            )
        for request_id in ids:
            await cancel_seen(request, visitor, request_id)
        return see_other(local_path(str(form.get("next", "/console/requests"))))

    @get("/failures", guards=[needs("requests.read")])
    async def failures(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        now = datetime.now(UTC)

        def read(connection: Connection) -> tuple[Account | None, Failures, datetime]:
            account = account_of(connection, visitor, query.text("account"))
            span = query.span(visitor.zone)
            starts_at = span.starts_at if span else now - timedelta(days=FAILURE_DAYS)
            found = count_failures(
                connection,
                account_id=account.id if account else None,
                starts_at=starts_at,
                ends_at=span.ends_at if span else now,
            )
            return account, found, starts_at

        account, found, since = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        if (model := query.text("model")) is not None:
            groups = [group for group in found.groups if group.model == model]
            found = replace(found, groups=groups)
        total = sum(group.requests for group in found.groups)
        return await page(
            request,
            visitor,
            "failures.html",
            lists=LISTS,
            title=_failures_title(total, account, capped=found.capped),
            account=account,
            as_file=TableFile(
                "failures",
                ("status", "reason", "model", "requests", "first_at", "last_at", "example"),
                found.groups,
            ),
            found=found,
            since=since,
            most=max((group.requests for group in found.groups), default=0),
            models=request.services.live.names(),
            filters=query.values,
        )


async def _chosen(
    request: ApiRequest, visitor: Visitor, query: Query
) -> tuple[Account | None, RequestFilter]:
    """Read the filter of an address, and the account that it is about; None is all."""

    def read(connection: Connection) -> tuple[Account | None, RequestFilter]:
        account = account_of(connection, visitor, query.text("account"))
        return _filter(connection, query, account, visitor.zone)

    return await request.services.database.read(read)


def _tail(
    query: Query, chosen: RequestFilter, found: RequestPage, visitor: Visitor
) -> ListTail | None:
    """Return what the newest page of a list follows, if its address says so."""
    if query.text("tail") is None or any(name in query.values for name in CURSORS):
        return None
    since = found.items[0].request_id if found.items else id_before(datetime.now(UTC))
    hidden = COLUMNS.hidden_by(visitor.hidden)
    name = tail_name(chosen, zone=visitor.zone, hidden=hidden, since=since)
    return ListTail(name, since)


def _filter(
    connection: Connection, query: Query, account: Account | None, zone: str
) -> tuple[Account | None, RequestFilter]:
    span = query.span(zone)
    key, key_id = query.text("key"), None
    if key is not None and account is None:
        owner, key_id = owner_of_key(connection, key)
        account = find_account(connection, owner)
    elif key is not None and account is not None:
        key_id = key_number(connection, account.id, key)
    tag, _, value = (query.text("tag") or "").partition("=")
    return account, RequestFilter(
        account.id if account else None,
        model=query.text("model"),
        status=query.one_of("status", (*STATUSES, OPEN)),
        task=query.one_of("task", tuple(TASKS)),
        key_id=key_id,
        outcome=query.one_of("outcome", OUTCOMES),
        starts_at=span.starts_at if span else None,
        ends_at=span.ends_at if span else None,
        tags={tag: value} if tag else {},
        cost_min_nanos=query.amount("cost"),
        cost_max_nanos=query.amount("cost_max"),
        took_min_us=query.seconds("took"),
        reason=query.text("reason"),
    )


def _has_bars(query: Query) -> bool:
    """Whether all filters select bars; those of tags, costs and times would read all receipts."""
    return query.narrowed <= _OF_USAGE - {"outcome"}


def _pages(query: Query, found: RequestPage) -> dict[str, str | None]:
    """Return the addresses of the pages around this one. Ids never change, so any page can be
    entered and left both ways."""
    items, more = found.items, found.next_cursor
    older: str | None = None
    newer: str | None = None
    if query.text("before") is not None:
        newer, older = more, items[0].request_id if items else None
    else:
        older = more
        newer = items[0].request_id if items and query.text("cursor") else None
    return {
        "older": query.url(cursor=older) if older else None,
        "newer": query.url(before=newer) if newer else None,
        "newest": query.url(cursor=None) if query.text("before") or query.text("cursor") else None,
    }


async def _known(
    request: ApiRequest, account: Account | None, items: Sequence[OpenRequest | ClosedRequest]
) -> tuple[Mapping[int, str], Mapping[str, RequestOrigin]]:
    """Return the names of the accounts of some requests, and who sent each."""

    def read(connection: Connection) -> tuple[Mapping[int, str], Mapping[str, RequestOrigin]]:
        origins = origins_of(connection, [one.request_id for one in items])
        if account is not None:
            return {account.id: account.name}, origins
        return account_names(connection, {one.account_id for one in items}), origins

    return await request.services.database.read(read)


async def _lines(
    request: ApiRequest, account: Account | None, chosen: RequestFilter
) -> AsyncIterator[bytes]:
    """Yield the lines of a file, a page of the list at a time."""
    yield csv_lines([_HEAD])
    cursor: str | None = None
    rows = 0
    while rows < FILE_ROWS_MAX:
        try:
            found = await request.services.requests.lookup.list(
                chosen, limit=FILE_PAGE, cursor=cursor
            )
            names, origins = await _known(request, account, found.items)
        except TollgateError as error:
            # The answer has begun, so its end says that the rest is missing.
            yield csv_lines([[f"the rest is missing: {error.message}"]])
            return
        yield csv_lines(_line(one, names, origins) for one in found.items)
        rows += len(found.items)
        cursor = found.next_cursor
        if cursor is None:
            return


_HEAD: Final = (
    *("id", "accepted_at", "account", "key", "model", "task", "status", "reason"),
    *("service_class", "hold", "cost", "total_ms", "first_ms", *_MADE, "tags"),
)


def _line(
    one: OpenRequest | ClosedRequest, names: Mapping[int, str], origins: Mapping[str, RequestOrigin]
) -> Sequence[object]:
    account = names.get(one.account_id, str(one.account_id))
    origin = origins.get(one.request_id)
    head = [one.request_id, timestamp(one.accepted_at), account, origin.key if origin else ""]
    head += [one.model, one.task, one.status]
    tags = msgspec.json.encode(dict(one.metadata)).decode() if one.metadata else ""
    if isinstance(one, OpenRequest):
        class_ = origin.service_class if origin else ""
        return [
            *head,
            "",
            class_,
            format_usd(one.hold_nanos),
            "",
            "",
            "",
            *("" for _ in _MADE),
            tags,
        ]
    times = (one.timings.total_us, one.timings.first_token_us)
    return [
        *head,
        one.reason,
        one.service_class,
        format_usd(one.hold_nanos),
        format_usd(one.cost_nanos),
        *(us / 1000 if us else "" for us in times),
        *(getattr(one.usage, unit) for unit in _MADE),
        tags,
    ]


def _failures_title(total: int, account: Account | None, *, capped: bool) -> str:
    of = f" of {account.name}" if account else ""
    if not total:
        return f"Nothing{of} failed"
    return f"{'More than ' if capped else ''}{total} request{'' if total == 1 else 's'}{of} failed"


HANDLERS: Final[list[Any]] = [RequestListPages]
