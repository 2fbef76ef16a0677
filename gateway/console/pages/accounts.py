"""Accounts: the list for roles of the installation, one of them, opening and changing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.accounts.accounts import (
    SORTED_MAX,
    STATUSES,
    Account,
    Status,
    accounts_near_zero,
    find_account,
    list_accounts,
)
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.billing.usage.minutes import floor_hour
from gateway.billing.usage.report import Filters, Group, Span, regroup, usage
from gateway.billing.usage.traffic import Activity, activity_of
from gateway.checks.decoding import read_id
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import ROWS, FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.views.evidence import bookings_url, open_requests_url
from gateway.console.views.files import TableFile
from gateway.console.views.formats import usd
from gateway.console.views.money import sum_rows, sum_total
from gateway.console.views.overview import points_of
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound, TollgateError
from gateway.operations import accounts
from gateway.operations.accounts import AccountView
from gateway.pricing import format_usd

WEEK: Final = timedelta(days=7)
ORDERS: Final = (("near zero", "least available first"), ("number", "by number"))
UTC_ZONE: Final = ZoneInfo("UTC")


FILE_COLUMNS: Final = (
    *("id", "name", "status", "posted_nanos", "held_nanos", "available_nanos"),
    *("credit_limit_nanos", "report_tz", "created_at"),
)
LISTS: Final = (
    ListColumns(
        "accounts",
        {
            "number": "Number",
            "state": "State",
            "available": "Available, $",
            "held": "Held, $",
            "limit": "Credit limit, $",
            "week": "7 days, $",
            "curve": "By day, as a line",
            "requests": "Requests",
            "open": "Open",
            "last": "Last request",
            "zone": "Zone",
            "opened": "Opened",
        },
    ),
)


class AccountPages(Controller):
    path = "/accounts"

    @get(guards=[needs("installation.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        query = Query(request)
        status = cast("Status | None", query.one_of("status", STATUSES))
        least = query.one_of("order", [name for name, _ in ORDERS]) != "number"
        after = _place(query.text("cursor"))
        now = datetime.now(UTC)
        since = floor_hour(now - WEEK)

        def read(
            connection: Connection,
        ) -> tuple[list[Account], bool, list[Group], Mapping[int, Activity]]:
            name, limit = query.text("name"), query.rows + 1
            is_part = False
            if least:
                found, is_part = accounts_near_zero(
                    connection, status=status, name=name, limit=limit, after=after
                )
            else:
                number = after[1] if after else 0
                found = list_accounts(
                    connection, status=status, name=name, limit=limit, after=number
                )
            # A file has no usage.
            ids = () if query.rows > ROWS else tuple(account.id for account in found)
            span = Span(since, now, UTC_ZONE)
            by = ["account_id", "day"]
            spent = usage(connection, span, by, Filters(ids), units=False) if ids else []
            return found, is_part, spent, activity_of(connection, ids[:ROWS])

        found, is_part, spent, activity = await request.services.database.report(
            read, account_id=None
        )
        last = found[query.rows - 1] if len(found) > query.rows else None
        more = f"{last.available_nanos}:{last.id}" if last else None
        return await page(
            request,
            visitor,
            "accounts.html",
            lists=LISTS,
            title="Accounts",
            rows=found[:ROWS],
            proofs={each.id: bookings_url(since, now, account=each.name) for each in found[:ROWS]},
            holding={each.id: open_requests_url(each.name) for each in found[:ROWS]},
            spent={row.labels["account_id"]: row for row in sum_rows(regroup(spent, "account_id"))},
            days=_curves(spent, now),
            as_file=TableFile(
                "accounts", FILE_COLUMNS, found[: query.rows], is_cut=more is not None
            ),
            activity=activity,
            sorted_max=SORTED_MAX if is_part else None,
            statuses=STATUSES,
            orders=ORDERS,
            filters=query.values,
            narrowed=bool(query.narrowed - {"order"}),
            pager=query.pages(more),
        )

    @get("/new", guards=[needs("accounts.write")])
    async def new(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _new_page(request, visitor, {})

    @post("/new", guards=[needs("accounts.write")])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form = await read_form(request)
        try:
            body = read_body(
                accounts.AccountBody,
                {
                    "name": form.text("name") or "",
                    "credit_limit": form.amount("credit_limit") or "0",
                },
            )
            further = {"allowance": form.amount("allowance"), "report_tz": form.text("report_tz")}
            terms = {name: value for name, value in further.items() if value is not None}
            change = read_body(accounts.AccountChange, terms)

            def make(connection: Connection) -> AccountView:
                made = accounts.create(connection, visitor.author(), body)
                if terms:
                    accounts.change(connection, visitor.author(), f"id:{made['id']}", change)
                return made

            made = await request.services.database.write(make)
        except TollgateError as error:
            return await _new_page(request, visitor, form.values(), error)
        return see_other(f"/console/accounts/{made['id']}")

    @get("/{account_id:int}", guards=[needs("accounts.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Response[str]:
        return await _account_page(request, visitor, account_id)

    @post("/{account_id:int}", guards=[needs("terms.write")])
    async def change(
        self, request: ApiRequest, visitor: CurrentVisitor, account_id: FromPath[int]
    ) -> Response[Any]:
        form = await read_form(request)
        try:
            body = read_body(accounts.AccountChange, _changes(form, visitor, account_id))
            await request.services.database.write(
                lambda connection: accounts.change(
                    connection, visitor.author(form.text("reason") or ""), f"id:{account_id}", body
                )
            )
        except TollgateError as error:
            return await _account_page(request, visitor, account_id, form.values(), error)
        return see_other(f"/console/accounts/{account_id}")


def _curves(groups: Sequence[Group], now: datetime) -> dict[str, str]:
    """Return what each account spent by day, as the points of a line."""
    days = [(now - WEEK + timedelta(days=at)).date().isoformat() for at in range(WEEK.days + 1)]
    spent: dict[str, dict[str, int]] = {}
    for group in groups:
        of_account = spent.setdefault(group.labels["account_id"], {})
        of_account[group.labels["day"]] = group.cost_nanos - group.refund_nanos
    return {
        account: points_of([max(of_day.get(day, 0), 0) for day in days])
        for account, of_day in spent.items()
    }


def _place(cursor: str | None) -> tuple[int, int] | None:
    """Read a cursor: available amount and number of an account. Raise ``InvalidRequest``."""
    if cursor is None:
        return None
    nanos, _, number = cursor.partition(":")
    id, size = read_id(number), read_id(nanos.removeprefix("-"))
    if id is None or size is None:
        raise InvalidRequest(
            "invalid_value", f"cursor is {cursor!r}, which no page has.", param="cursor"
        )
    return -size if nanos.startswith("-") else size, id


def _changes(form: FormValues, visitor: Visitor, account_id: int) -> dict[str, Any]:
    """Return what a visitor may change: finance the terms, operators all."""
    changes: dict[str, Any] = {
        "credit_limit": form.amount("credit_limit"),
        "allowance": form.amount("allowance"),
    }
    if visitor.may("accounts.write", account_id):
        changes |= {name: form.text(name) for name in ("name", "status", "report_tz")}
    return {name: value for name, value in changes.items() if value is not None}


async def _new_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str],
    error: TollgateError | None = None,
) -> Response[str]:
    return await page(
        request,
        visitor,
        "account_new.html",
        title="Open an account",
        status=error.http_status if error else 200,
        values=values,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


async def _account_page(
    request: ApiRequest,
    visitor: Visitor,
    account_id: int,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    now = datetime.now(UTC)

    def read(connection: Connection) -> tuple[Account, list[Group]]:
        span = Span(now - WEEK, now, UTC_ZONE)
        found = find_account(connection, account_id)
        return found, usage(connection, span, ["model"], Filters((account_id,)))

    try:
        account, week = await request.services.database.report(read, account_id=account_id)
    except LookupError:
        raise NotFound("account_not_found", "There is no such account.") from None
    return await page(
        request,
        visitor,
        "account.html",
        title=f"{account.name} has {usd(account.available_nanos)} available",
        status=error.http_status if error else 200,
        account=account,
        values=values or _entered(account),
        problems=problems_of(error),
        mistake=error.message if error else None,
        statuses=STATUSES,
        week=sum_rows(week),
        week_total=sum_total(week),
        booked_week=bookings_url(now - WEEK, now, account=account.name),
        holding=open_requests_url(account.name),
    )


def _entered(account: Account) -> dict[str, str]:
    return {
        "name": account.name,
        "status": account.status,
        "credit_limit": format_usd(account.credit_limit_nanos),
        "allowance": format_usd(account.allowance_nanos),
        "report_tz": account.report_tz,
    }


HANDLERS: Final[list[Any]] = [AccountPages]
