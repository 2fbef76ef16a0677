"""The first pages: the installation at a glance, and an account's home."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.accounts.budgets import BudgetState, budget_states, list_budgets
from gateway.api.http.request import ApiRequest
from gateway.billing.reconciliation import Reconciliation, last_reconciliation
from gateway.billing.usage.failures import Failures, count_failures
from gateway.billing.usage.report import Filters, Group, Span, usage
from gateway.catalog.availability import availability
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.queries import ROWS, Query
from gateway.console.rendering import page
from gateway.console.scope import one_account
from gateway.console.views.formats import usd
from gateway.console.views.money import sum_rows, sum_total
from gateway.console.views.requests import request_row
from gateway.console.visitors import CurrentVisitor
from gateway.ledger.transfers import owed
from gateway.operations import keys
from gateway.operations.keys import KeyView
from gateway.requests.lookup import RequestFilter

TOP: Final = 5
LATEST: Final = 10
DAY: Final = timedelta(days=1)
WEEK: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Installation:
    """What the overview reads from SQL, on one snapshot."""

    proof: Reconciliation | None
    by_account: list[Group]
    by_model: list[Group]
    failures: Failures


@dataclass(frozen=True, slots=True)
class AccountToday:
    """What an account's home reads from SQL, on one snapshot."""

    account: Account
    debt: int
    budgets: list[BudgetState]
    today: list[Group]
    week: list[Group]
    keys: list[KeyView]


class HomePages(Controller):
    path = "/"

    @get(guards=[needs("own.write")])
    async def overview(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        if visitor.role is None:
            return see_other("/console/home")
        services, now = request.services, datetime.now(UTC)
        midnight = _midnight(now, visitor.zone)

        def read(connection: Connection) -> Installation:
            span = Span(midnight, now, ZoneInfo(visitor.zone))
            return Installation(
                proof=last_reconciliation(connection),
                by_account=usage(connection, span, ["account"], Filters()),
                by_model=usage(connection, span, ["model"], Filters()),
                failures=count_failures(
                    connection, account_id=None, starts_at=now - DAY, ends_at=now
                ),
            )

        found = await services.database.report(read, account_id=None)
        latest = await services.requests.lookup.list(RequestFilter(None), limit=LATEST, cursor=None)
        ids = {one.account_id for one in latest.items}
        names = await services.database.read(lambda connection: account_names(connection, ids))
        health = services.requests.health
        entries = services.live.entries()
        available = sum(availability(entry, health.announcements) is None for entry in entries)
        loads = {model: load for model, load in health.loads.items() if load.live}
        return await page(
            request,
            visitor,
            "overview.html",
            title=_overview_title(found, health.healthy),
            proof=found.proof,
            total=sum_total(found.by_account),
            accounts=sum_rows(found.by_account)[:TOP],
            models=sum_rows(found.by_model)[:TOP],
            failures=found.failures,
            failed=sum(group.requests for group in found.failures.groups),
            healthy=health.healthy,
            workers=health.announcements,
            available=available,
            offered=len(entries),
            loads=loads,
            queued=sum(load.depth for load in loads.values()),
            running=sum(load.running for load in loads.values()),
            oldest_us=max((load.oldest_ms for load in loads.values()), default=0) * 1000,
            rows=[request_row(one, names) for one in latest.items],
        )

    @get("/home", guards=[needs("accounts.read")])
    async def home(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        services, now = request.services, datetime.now(UTC)
        named = Query(request).text("account")

        def read(connection: Connection) -> AccountToday:
            account = one_account(connection, visitor, named)
            zone = ZoneInfo(visitor.zone)
            own = Filters((account.id,))
            since = _midnight(now, visitor.zone)
            owned, _ = keys.list_page(
                connection,
                account=f"id:{account.id}",
                status="active",
                name=None,
                limit=ROWS,
                cursor=None,
            )
            budgets = list_budgets(connection, account.id, limit=ROWS)
            return AccountToday(
                account=account,
                debt=owed(connection, account.id),
                budgets=budget_states(connection, budgets, now),
                today=usage(connection, Span(since, now, zone), ["model"], own),
                week=usage(connection, Span(now - WEEK, now, zone), ["day"], own),
                keys=owned,
            )

        found = await services.database.report(read, account_id=visitor.account_id)
        account = found.account
        latest = await services.requests.lookup.list(
            RequestFilter(account.id), limit=LATEST, cursor=None
        )
        week = sum_total(found.week)
        return await page(
            request,
            visitor,
            "home.html",
            title=f"{account.name} has {usd(account.available_nanos)} available",
            account=account,
            debt=found.debt,
            budgets=found.budgets,
            today=sum_total(found.today),
            models=sum_rows(found.today)[:TOP],
            week=week,
            days_left=_days_left(account.available_nanos, week.net_nanos),
            keys=found.keys,
            rows=[request_row(one, {account.id: account.name}) for one in latest.items],
            base_url=str(request.base_url).rstrip("/"),
        )


def _midnight(now: datetime, zone: str) -> datetime:
    local = now.astimezone(ZoneInfo(zone))
    return local.replace(hour=0, minute=0, second=0, microsecond=0).astimezone(UTC)


def _days_left(available_nanos: int, week_nanos: int) -> int | None:
    """Return for how many days the money lasts at the speed of the last week; None for ever."""
    if week_nanos <= 0 or available_nanos <= 0:
        return None
    return available_nanos * WEEK.days // week_nanos


def _overview_title(found: Installation, healthy: bool) -> str:
    if found.proof is not None and found.proof.findings:
        return "The books do not agree"
    if not healthy:
        return "The queue server does not answer"
    return "Running; the books agree" if found.proof else "Running"


HANDLERS: Final[list[Any]] = [HomePages]
