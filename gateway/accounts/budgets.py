"""Budgets: spending limits per hour, day, month or in total, of an account, key or model, or of all
accounts of an organisation together.

A hard budget refuses requests that could exceed it. Held amounts count as spent, so that no number
of concurrent requests exceeds it. A soft budget only counts and reports. Windows follow the
budget's time zone; a request counts in the window in which it was accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final, Literal, TypeAlias, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import (
    Connection,
    RowMapping,
    bindparam,
    case,
    insert,
    or_,
    select,
    update,
)

from gateway.accounts.allotments import check_allotments
from gateway.accounts.locks import lock_accounts, lock_organisation, lock_organisations
from gateway.checks.decoding import ID_MAX
from gateway.checks.entered import NAME_MAX, check_amount, check_text
from gateway.checks.moments import EPOCH, microseconds_of
from gateway.pricing import NANOS_MAX
from gateway.sql.statements import CompiledStatement, Row, any_of
from gateway.tables.core import accounts, budget_windows, budgets, keys
from gateway.tables.organisations import organisations

Window: TypeAlias = Literal["hour", "day", "month", "total"]
WINDOWS: Final[tuple[Window, ...]] = get_args(Window)
DEFAULT_ZONE: Final = "UTC"

_BUDGETS: Final = select(budgets, organisations.c.name.label("organisation")).outerjoin(
    organisations, organisations.c.id == budgets.c.organisation_id
)
_IN_FORCE: Final = CompiledStatement(
    _BUDGETS.where(
        or_(
            any_of(budgets.c.account_id, "accounts"),
            any_of(budgets.c.organisation_id, "organisations"),
        ),
        budgets.c.ended_at.is_(None),
    ).order_by(budgets.c.id)
)
_WINDOW: Final = CompiledStatement(
    select(budget_windows).where(
        budget_windows.c.budget_id == bindparam("budget"),
        budget_windows.c.starts_us == bindparam("starts"),
    )
)


@dataclass(frozen=True, slots=True)
class Budget:
    """A spending limit, of an account or an organisation. ``key_id`` and ``model`` are None if it
    covers all keys or all models."""

    id: int
    account_id: int | None
    organisation_id: int | None
    key_id: int | None
    model: str | None
    name: str
    window: Window
    tz: str
    limit_nanos: int
    hard: bool
    overallot: bool
    """Whether budgets of an organisation's accounts can sum to more than this one of it."""
    created_at: datetime
    ended_at: datetime | None
    organisation: str | None
    """Name of the organisation."""

    def covers(self, key_id: int, model: str) -> bool:
        return self.key_id in (None, key_id) and self.model in (None, model)


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A budget and its current window; ``ends_at`` is None if it never resets."""

    budget: Budget
    starts_at: datetime
    ends_at: datetime | None
    spent_nanos: int
    held_nanos: int

    @property
    def remaining_nanos(self) -> int:
        """Amount that can still be held; negative if a soft budget has been exceeded."""
        return self.budget.limit_nanos - self.spent_nanos - self.held_nanos


def create_budget(
    connection: Connection,
    account_id: int,
    limit_nanos: int,
    *,
    window: Window,
    hard: bool = True,
    key_id: int | None = None,
    model: str | None = None,
    name: str = "",
    tz: str | None = None,
    now: datetime | None = None,
) -> Budget:
    """Create a budget that applies from now on; earlier spending does not count.

    The default zone is the account's. Raise ``LookupError`` if the account does not exist or does
    not own the key, ``ValueError`` if the limit is negative or the window or zone is unknown.
    """
    _check(limit_nanos, window, name)
    # Under the lock, so that a hold being decided cannot miss the new budget.
    if account_id not in lock_accounts(connection, [account_id]):
        raise LookupError(f"unknown account {account_id}")
    if key_id is not None:
        own = select(keys.c.account_id).where(keys.c.id == key_id)
        owner = connection.execute(own).scalar() if 0 < key_id <= ID_MAX else None
        if owner != account_id:
            raise LookupError(f"account {account_id} has no key {key_id}")
    zone = connection.execute(
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(bounded=True)
        .returning(accounts.c.report_tz)
    ).scalar_one()
    made = connection.execute(
        insert(budgets)
        .values(
            account_id=account_id,
            key_id=key_id,
            model=model,
            name=name,
            window=window,
            tz=read_zone(tz or zone).key,
            limit_nanos=limit_nanos,
            hard=hard,
            created_at=now or datetime.now(UTC),
        )
        .returning(budgets.c.id)
    ).scalar_one()
    _check_organisation_of(connection, account_id)
    return find_budget(connection, made)


def create_organisation_budget(
    connection: Connection,
    organisation_id: int,
    limit_nanos: int,
    *,
    window: Window,
    hard: bool = True,
    overallot: bool = False,
    model: str | None = None,
    name: str = "",
    tz: str | None = None,
    now: datetime | None = None,
) -> Budget:
    """Create a budget of all accounts of an organisation together, which exists.

    It counts requests from now on. Raise ``ValueError`` if the limit is negative or the window or
    zone is unknown, ``Overallotted`` if the budgets of the accounts sum to more.
    """
    _check(limit_nanos, window, name)
    lock_organisation(connection, organisation_id)
    made = connection.execute(
        insert(budgets)
        .values(
            organisation_id=organisation_id,
            model=model,
            name=name,
            window=window,
            tz=read_zone(tz or DEFAULT_ZONE).key,
            limit_nanos=limit_nanos,
            hard=hard,
            overallot=overallot,
            created_at=now or datetime.now(UTC),
        )
        .returning(budgets.c.id)
    ).scalar_one()
    check_allotments(connection, [organisation_id])
    return find_budget(connection, made)


def find_budget(connection: Connection, budget_id: int) -> Budget:
    """Find a budget in force. Raise ``LookupError`` if it does not exist or has ended."""
    if not 0 < budget_id <= ID_MAX:
        raise LookupError(f"unknown budget {budget_id}")
    row = connection.execute(
        _BUDGETS.where(budgets.c.id == budget_id, budgets.c.ended_at.is_(None))
    )
    found = row.mappings().first()
    if found is None:
        raise LookupError(f"unknown budget {budget_id}")
    return _budget(found)


def list_budgets(
    connection: Connection,
    account_id: int | None = None,
    *,
    organisation_id: int | None = None,
    organisations_only: bool = False,
    key_id: int | None = None,
    model: str | None = None,
    limit: int | None = None,
    after: int = 0,
) -> list[Budget]:
    """List the budgets in force in order of their numbers, those greater than ``after``; of one
    account, of one organisation or of all of them, or all."""
    query = _BUDGETS.where(budgets.c.ended_at.is_(None), budgets.c.id > after)
    if account_id is not None:
        query = query.where(budgets.c.account_id == account_id)
    if organisation_id is not None:
        query = query.where(budgets.c.organisation_id == organisation_id)
    if organisations_only:
        query = query.where(budgets.c.organisation_id.is_not(None))
    if key_id is not None:
        query = query.where(budgets.c.key_id == key_id)
    if model is not None:
        query = query.where(budgets.c.model == model)
    query = query.order_by(budgets.c.id).limit(limit)
    return [_budget(row) for row in connection.execute(query).mappings()]


def change_budget(
    connection: Connection,
    budget_id: int,
    *,
    limit_nanos: int | None = None,
    hard: bool | None = None,
    overallot: bool | None = None,
    now: datetime | None = None,
) -> Budget:
    """Change the limit of a budget, whether it is hard, or whether an organisation's can be
    overallotted, from the next request on.

    Amounts already spent or held stay, even above a lowered limit. Raise ``LookupError`` if the
    budget does not exist or has ended, ``ValueError`` if the limit is negative, ``Overallotted`` if
    budgets of accounts would sum to more than that of their organisation.
    """
    if limit_nanos is not None:
        check_amount(limit_nanos, "a budget", least=0, most=NANOS_MAX)
    found = lock_budget(connection, budget_id)
    if overallot is not None and found.organisation_id is None:
        raise ValueError(f"budget {budget_id} is that of an account, which is not allotted")
    limit = found.limit_nanos if limit_nanos is None else limit_nanos
    strict = found.hard if hard is None else hard
    connection.execute(
        update(budgets)
        .where(budgets.c.id == budget_id)
        .values(
            limit_nanos=limit,
            hard=strict,
            overallot=found.overallot if overallot is None else overallot,
        )
    )
    if found.account_id is not None:
        _check_organisation_of(connection, found.account_id)
    elif found.organisation_id is not None:
        check_allotments(connection, [found.organisation_id])
    starts_us = microseconds_of(window_start(found.window, found.tz, now or datetime.now(UTC)))
    used = budget_windows.c.spent_nanos + budget_windows.c.held_nanos
    connection.execute(
        update(budget_windows)
        .where(budget_windows.c.budget_id == budget_id, budget_windows.c.starts_us == starts_us)
        .values(limit_nanos=case((used > limit, used), else_=limit), hard=strict)
    )
    return find_budget(connection, budget_id)


def end_budget(connection: Connection, budget_id: int) -> Budget:
    """End a budget; its windows stay. Raise ``LookupError`` if it is not in force."""
    found = lock_budget(connection, budget_id)
    connection.execute(
        update(budgets).where(budgets.c.id == budget_id).values(ended_at=datetime.now(UTC))
    )
    # Open requests still count in these windows, which no longer limit anything.
    connection.execute(
        update(budget_windows).where(budget_windows.c.budget_id == budget_id).values(hard=False)
    )
    return found


def lock_budget(connection: Connection, budget_id: int) -> Budget:
    """Lock the account or organisation of a budget in force, and return the budget. Raise
    ``LookupError``."""
    found = find_budget(connection, budget_id)
    if found.account_id is not None:
        lock_accounts(connection, [found.account_id])
    elif found.organisation_id is not None:
        lock_organisation(connection, found.organisation_id)
    return find_budget(connection, budget_id)


def budget_states(
    connection: Connection, found: Sequence[Budget], now: datetime
) -> list[BudgetState]:
    """Return the usage of budgets in their current windows."""
    starts = [window_start(budget.window, budget.tz, now) for budget in found]
    wanted = [
        (budget.id, microseconds_of(start)) for budget, start in zip(found, starts, strict=True)
    ]
    rows = read_windows(connection, wanted)
    states = []
    for budget, start, place in zip(found, starts, wanted, strict=True):
        row = rows.get(place)
        states.append(
            BudgetState(
                budget,
                starts_at=start,
                ends_at=window_end(budget.window, budget.tz, now),
                spent_nanos=row["spent_nanos"] if row else 0,
                held_nanos=row["held_nanos"] if row else 0,
            )
        )
    return states


def budgets_in_force(
    connection: Connection,
    account_ids: Collection[int],
    organisations: Mapping[int, Collection[int]],
) -> dict[int, list[Budget]]:
    """Read the budgets in force of accounts and of their organisations, by account."""
    wanted = {id for some in organisations.values() for id in some}
    own: dict[int, list[Budget]] = {}
    shared: dict[int, list[Budget]] = {}
    rows = _IN_FORCE.rows(connection, accounts=sorted(account_ids), organisations=sorted(wanted))
    for row in rows:
        budget = Budget(**row)
        if budget.account_id is not None:
            own.setdefault(budget.account_id, []).append(budget)
        elif budget.organisation_id is not None:
            shared.setdefault(budget.organisation_id, []).append(budget)
    for account_id, some in organisations.items():
        for id in sorted(some):
            own.setdefault(account_id, []).extend(shared.get(id, ()))
    return own


def read_windows(
    connection: Connection, wanted: Collection[tuple[int, int]]
) -> dict[tuple[int, int], Row]:
    """Read windows by (budget, start in µs); those without accepted requests are absent."""
    places = [{"budget": budget, "starts": starts} for budget, starts in sorted(set(wanted))]
    rows = _WINDOW.first_each(connection, places)
    return {(row["budget_id"], row["starts_us"]): row for row in rows if row is not None}


def window_start(window: Window, tz: str, moment: datetime) -> datetime:
    """Return the start, in UTC, of the window that contains a moment, in a time zone."""
    zone = read_zone(tz)
    local = moment.astimezone(zone)
    match window:
        case "hour":
            return local.replace(minute=0, second=0, microsecond=0).astimezone(UTC)
        case "day":
            return _midnight(local, zone)
        case "month":
            return _midnight(local.replace(day=1), zone)
        case "total":
            return EPOCH


def window_end(window: Window, tz: str, moment: datetime) -> datetime | None:
    """Return the end of the window that contains a moment; None for ``total``."""
    zone = read_zone(tz)
    local = moment.astimezone(zone)
    match window:
        case "hour":
            # Quarter hours of real time: the hour that is repeated in autumn is two windows.
            end = window_start(window, tz, moment)
            while window_start(window, tz, end) <= window_start(window, tz, moment):
                end += timedelta(minutes=15)
            return end
        case "day":
            return _midnight(local + timedelta(days=1), zone)
        case "month":
            return _midnight(local.replace(day=1) + timedelta(days=31), zone, first=True)
        case "total":
            return None


def read_zone(name: str) -> ZoneInfo:
    """Find a time zone by its IANA name. Raise ``ValueError`` if it is unknown."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"unknown time zone {name!r}; send an IANA name such as Europe/Berlin or UTC"
        ) from None


def _midnight(local: datetime, zone: ZoneInfo, *, first: bool = False) -> datetime:
    day = local.date().replace(day=1) if first else local.date()
    return datetime.combine(day, time.min, zone).astimezone(UTC)


def _check(limit_nanos: int, window: str, name: str) -> None:
    if window not in WINDOWS:
        raise ValueError(f"unknown window {window!r}; use {', '.join(WINDOWS)}")
    check_amount(limit_nanos, "a budget", least=0, most=NANOS_MAX)
    check_text(name, "the name of a budget", longest=NAME_MAX)


def _check_organisation_of(connection: Connection, account_id: int) -> None:
    """Lock the organisation of a locked account, and check what its accounts are allotted."""
    found = lock_organisations(connection, [account_id]).current
    check_allotments(connection, found.get(account_id, ()))


def _budget(row: RowMapping) -> Budget:
    return Budget(**row)
