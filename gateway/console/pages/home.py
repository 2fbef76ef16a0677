"""The first pages: the installation at a glance, and an account's home."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from litestar import Controller, Response, get
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.accounts.budgets import BudgetState, budget_states, list_budgets
from gateway.api.http.request import ApiRequest, Services
from gateway.audit_log import AuditEvent
from gateway.billing.reconciliation import Reconciliation, last_reconciliation
from gateway.billing.statements.close import months_to_close
from gateway.billing.usage.coverage import midnight
from gateway.billing.usage.failures import Failures, count_failures
from gateway.billing.usage.report import Filters, Group, Span, regroup, usage
from gateway.billing.usage.today import DaySums
from gateway.billing.usage.traffic import OpenHolds, open_holds
from gateway.catalog.reloads import last_load
from gateway.checks.moments import read_moment
from gateway.console.answers import see_other
from gateway.console.guards import needs
from gateway.console.live.overview import present
from gateway.console.live.tail import latest_tail
from gateway.console.queries import ROWS, Query
from gateway.console.rendering import page
from gateway.console.running.asking import asked
from gateway.console.running.views import KINDS, memory_parts
from gateway.console.scope import one_account
from gateway.console.views.evidence import bookings_url, open_requests_url
from gateway.console.views.formats import Clock, usd
from gateway.console.views.limits import budget_urls
from gateway.console.views.money import sum_rows, sum_total
from gateway.console.views.overview import (
    TOP,
    TopRow,
    dearest,
    hour_curves,
    hour_texts,
    load_text,
    overview_texts,
    overview_title,
)
from gateway.console.views.prices import own_accounts, period_prices
from gateway.console.views.requests import example_model, request_row
from gateway.console.visitors import CurrentVisitor
from gateway.ledger.prices import (
    LIST,
    PriceCache,
    PricePeriod,
    price_periods_of,
    read_price,
)
from gateway.ledger.transfers import owed
from gateway.operations import keys
from gateway.operations.keys import KeyView
from gateway.operations.running.gateways import gateway_view
from gateway.operations.running.upstreams import list_upstreams
from gateway.operations.running.workers import list_workers
from gateway.requests.lookup import RequestFilter, RequestPage, read_page
from gateway.webhooks.deliveries import count_failing

LATEST: Final = 10
DAY: Final = timedelta(days=1)
WEEK: Final = timedelta(days=7)
SOON: Final = timedelta(days=14)
"""Time before its end within which a key is shown as one that expires."""


@dataclass(frozen=True, slots=True)
class Earnings:
    """What the overview reads of money from SQL, on one snapshot."""

    holds: OpenHolds
    proof: Reconciliation | None
    today: DaySums
    accounts: Sequence[TopRow]
    models: Sequence[TopRow]


@dataclass(frozen=True, slots=True)
class Condition:
    """What else the overview reads from SQL."""

    failures: Failures
    to_close: list[str]
    failing_webhooks: int
    loaded: AuditEvent | None
    """The last load of the catalog, also one that was refused."""


@dataclass(frozen=True, slots=True)
class AccountToday:
    """What an account's home reads from SQL, on one snapshot."""

    account: Account
    debt: int
    budgets: list[BudgetState]
    today: list[Group]
    month: list[Group]
    week: list[Group]
    keys: list[KeyView]
    prices: list[PricePeriod]
    """Prices that begin soon, of models that were used within the week."""


def read_overview(services: Services, connection: Connection) -> None:
    """Read what the first visit will read, so that its statements are known by then."""
    now = datetime.now(UTC)
    _read_money(services, connection, "UTC", now)
    _read_condition(connection, now)
    read_page(connection, RequestFilter(None), limit=LATEST, cursor=None, oldest_first=False)


def _read_money(services: Services, connection: Connection, zone: str, now: datetime) -> Earnings:
    today = services.today.read(connection, zone, now)
    before = services.today.week_before(connection, zone, now)
    accounts = dearest(today.by_account, before.by_account)
    names = account_names(connection, [int(row.name) for row in accounts])
    return Earnings(
        holds=open_holds(connection),
        proof=last_reconciliation(connection),
        today=today,
        accounts=[replace(row, name=names[int(row.name)]) for row in accounts],
        models=dearest(today.by_model, before.by_model),
    )


def _read_condition(connection: Connection, now: datetime) -> Condition:
    return Condition(
        failures=count_failures(connection, account_id=None, starts_at=now - DAY, ends_at=now),
        to_close=months_to_close(connection, now),
        failing_webhooks=count_failing(connection, now - DAY),
        loaded=last_load(connection),
    )


class HomePages(Controller):
    path = "/"

    @get(guards=[needs("own.write")])
    async def overview(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        if visitor.role is None:
            return see_other("/console/home")
        services, now = request.services, datetime.now(UTC)
        since = Clock(visitor.zone, now).midnight

        async def read_latest() -> tuple[RequestPage, Mapping[int, str]]:
            found = await services.requests.lookup.list(
                RequestFilter(None), limit=LATEST, cursor=None
            )
            ids = {one.account_id for one in found.items}
            read = services.database.read
            return found, await read(lambda connection: account_names(connection, ids))

        # At the same time, because the servers compute beside the console.
        report = services.database.report
        money, condition, (latest, names), connected, gateways, _ = await asyncio.gather(
            report(lambda each: _read_money(services, each, visitor.zone, now), account_id=None),
            report(lambda each: _read_condition(each, now), account_id=None),
            read_latest(),
            asked(list_workers(services.queue_server)),
            asked(services.gateways.list()),
            services.traffic.refresh(only_new=True),
        )
        failed_logins = await services.attempts.failures.read()
        reports = await services.attempts.reports.read()
        today = sum_total(money.today.by_model.values())
        state = present(services, today=today, holds=money.holds, proof=money.proof)
        return await page(
            request,
            visitor,
            "overview.html",
            title=overview_title(state),
            live=1,
            texts=overview_texts(state) | hour_texts(services.traffic),
            curves=hour_curves(services.traffic, now),
            proof=money.proof,
            booked_today=bookings_url(since),
            holding=open_requests_url(),
            accounts=money.accounts,
            models=money.models,
            to_close=condition.to_close,
            failing_webhooks=condition.failing_webhooks,
            loaded=condition.loaded,
            load_text=load_text,
            base_url=str(request.base_url).rstrip("/"),
            example=example_model(services.live.entries()),
            memory_parts=memory_parts,
            waits={model: load.seconds(load.cost) for model, load in state.loads.items()},
            failures=condition.failures,
            failed=sum(group.requests for group in condition.failures.groups),
            failed_logins=failed_logins,
            reports=reports,
            tail=latest_tail(latest.items, zone=visitor.zone),
            workers=connected,
            gateways=[gateway_view(state) for state in gateways or () if state.part == "gateway"],
            upstreams=list_upstreams(services.live.entries(), connected or []),
            kinds=KINDS,
            loads=state.loads,
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
            owned, _ = keys.list_page(
                connection,
                account=f"id:{account.id}",
                status="active",
                name=None,
                limit=ROWS,
                cursor=None,
            )
            budgets = list_budgets(connection, account.id, limit=ROWS)
            used = usage(connection, Span(now - WEEK, now, zone), ["model"], own)
            coming = _coming(connection, account.id, [group.labels["model"] for group in used])
            for period in coming:
                if period.price_id is not None:
                    read_price(connection, period.price_id, services.live.prices)
            days = Span(_month_start(visitor.zone, now), now, zone)
            month = usage(connection, days, ["day", "model"], own)
            day = now.astimezone(zone).date().isoformat()
            return AccountToday(
                account=account,
                debt=owed(connection, account.id),
                budgets=budget_states(connection, budgets, now),
                today=regroup([each for each in month if each.labels["day"] == day], "model"),
                month=month,
                week=used,
                keys=owned,
                prices=coming,
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
            holding=open_requests_url(account.name),
            booked_today=bookings_url(Clock(visitor.zone, now).midnight, account=account.name),
            booked_week=bookings_url(now - WEEK, now, account=account.name),
            debt=found.debt,
            budgets=found.budgets,
            budget_urls=budget_urls(found.budgets, account.name),
            today=sum_total(found.today),
            models=sum_rows(found.today)[:TOP],
            month=sum_total(found.month),
            booked_month=bookings_url(_month_start(visitor.zone, now), account=account.name),
            week=week,
            days_left=_days_left(account.available_nanos, week.net_nanos),
            keys=found.keys,
            ending=_ending(found.keys, now),
            coming=found.prices,
            prices=_price_texts(found.prices, services.live.prices),
            may_pay=visitor.may("payments.write", account.id),
            rows=[request_row(one, {account.id: account.name}) for one in latest.items],
            base_url=str(request.base_url).rstrip("/"),
            example=example_model(services.live.entries()),
        )


def _month_start(zone: str, now: datetime) -> datetime:
    """Return when the present month of a zone began."""
    return midnight(now.astimezone(ZoneInfo(zone)).date().replace(day=1), ZoneInfo(zone))


def _days_left(available_nanos: int, week_nanos: int) -> int | None:
    """Return for how many days the money lasts at the speed of the last week; None for ever."""
    if week_nanos <= 0 or available_nanos <= 0:
        return None
    return available_nanos * WEEK.days // week_nanos


def _coming(connection: Connection, account_id: int, models: Sequence[str]) -> list[PricePeriod]:
    """Return the prices of models that begin later for an account, the next first.

    A list price does not concern an account with its own.
    """
    now = datetime.now(UTC)
    found: list[PricePeriod] = []
    for model in models:
        periods = price_periods_of(connection, model=model, account_ids=(LIST, account_id))
        own = account_id in own_accounts(periods, now)
        mine = (account_id,) if own else (LIST, account_id)
        found += [
            each
            for each in periods
            if each.account_id in mine and each.effective_from > now and each.cancelled is None
        ]
    return sorted(found, key=lambda each: each.effective_from)


def _price_texts(periods: Sequence[PricePeriod], cache: PriceCache) -> dict[int, str]:
    return {id: ", ".join(lines) for id, lines in period_prices(periods, cache).items()}


def _ending(keys: Sequence[KeyView], now: datetime) -> list[tuple[KeyView, datetime]]:
    """Return the keys that expire soon, the next first."""
    found = [(key, read_moment(key["expires_at"])) for key in keys if key["expires_at"]]
    return sorted((each for each in found if each[1] <= now + SOON), key=lambda each: each[1])


HANDLERS: Final[list[Any]] = [HomePages]
