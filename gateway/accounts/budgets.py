"""Budgets: how much may be spent in an hour, a day, a month or in all, by account, key or model.

A hard budget refuses what could pass it, counting what is held as if it were spent, so that no
number of concurrent requests passes it by one nano. A soft one is counted and shown. Windows are
cut in the budget's own time zone; a request counts in the window in which it was accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Final, Literal, TypeAlias, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sqlalchemy import (
    Connection,
    RowMapping,
    case,
    insert,
    select,
    tuple_,
    update,
)

from gateway.accounts.locks import lock_accounts
from gateway.checks.decoding import ID_MAX
from gateway.checks.entered import NAME_MAX, check_amount, check_text
from gateway.pricing import NANOS_MAX
from gateway.tables.core import accounts, budget_windows, budgets, keys

Window: TypeAlias = Literal["hour", "day", "month", "total"]
WINDOWS: Final[tuple[Window, ...]] = get_args(Window)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on spending; ``key_id`` and ``model`` are None where it covers all of them."""

    id: int
    account_id: int
    key_id: int | None
    model: str | None
    name: str
    window: Window
    tz: str
    limit_nanos: int
    hard: bool
    created_at: datetime
    ended_at: datetime | None

    def covers(self, key_id: int, model: str) -> bool:
        return self.key_id in (None, key_id) and self.model in (None, model)


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A budget and its window of now; ``ends_at`` is None where it never resets."""

    budget: Budget
    starts_at: datetime
    ends_at: datetime | None
    spent_nanos: int
    held_nanos: int

    @property
    def remaining_nanos(self) -> int:
        """What may still be held under it; below nothing where a soft one has been passed."""
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
    """Set a budget from now on; what was spent before does not count against it.

    The zone is the account's own unless one is named. Raise ``LookupError`` for an unknown account
    or a key that is not the account's, ``ValueError`` for a negative limit, unknown window or zone.
    """
    if window not in WINDOWS:
        raise ValueError(f"{window!r} is no window; there are {', '.join(WINDOWS)}")
    check_amount(limit_nanos, "a budget", least=0, most=NANOS_MAX)
    check_text(name, "the name of a budget", longest=NAME_MAX)
    # The lock keeps holds that are being decided from missing it.
    if account_id not in lock_accounts(connection, [account_id]):
        raise LookupError(f"there is no account {account_id}")
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
        .returning(budgets)
    )
    return _budget(made.mappings().one())


def find_budget(connection: Connection, budget_id: int) -> Budget:
    """Raise ``LookupError`` if there is none of this number that is still in force."""
    if not 0 < budget_id <= ID_MAX:
        raise LookupError(f"there is no budget {budget_id}")
    row = connection.execute(
        select(budgets).where(budgets.c.id == budget_id, budgets.c.ended_at.is_(None))
    )
    found = row.mappings().first()
    if found is None:
        raise LookupError(f"there is no budget {budget_id}")
    return _budget(found)


def list_budgets(connection: Connection, account_id: int | None = None) -> list[Budget]:
    """List the budgets in force, of one account or of all."""
    query = select(budgets).where(budgets.c.ended_at.is_(None)).order_by(budgets.c.id)
    if account_id is not None:
        query = query.where(budgets.c.account_id == account_id)
    return [_budget(row) for row in connection.execute(query).mappings()]


def change_budget(
    connection: Connection,
    budget_id: int,
    *,
    limit_nanos: int | None = None,
    hard: bool | None = None,
    now: datetime | None = None,
) -> Budget:
    """Change how much a budget is, or whether it refuses, from the next request on.

    What is spent or held already stays so, even above a lowered limit. Raise ``LookupError``,
    ``ValueError`` if the limit is negative.
    """
    if limit_nanos is not None:
        check_amount(limit_nanos, "a budget", least=0, most=NANOS_MAX)
    found = find_budget(connection, budget_id)
    lock_accounts(connection, [found.account_id])
    limit = found.limit_nanos if limit_nanos is None else limit_nanos
    strict = found.hard if hard is None else hard
    connection.execute(
        update(budgets).where(budgets.c.id == budget_id).values(limit_nanos=limit, hard=strict)
    )
    starts_us = microseconds(window_start(found.window, found.tz, now or datetime.now(UTC)))
    used = budget_windows.c.spent_nanos + budget_windows.c.held_nanos
    connection.execute(
        update(budget_windows)
        .where(budget_windows.c.budget_id == budget_id, budget_windows.c.starts_us == starts_us)
        .values(limit_nanos=case((used > limit, used), else_=limit), hard=strict)
    )
    return find_budget(connection, budget_id)


def end_budget(connection: Connection, budget_id: int) -> Budget:
    """Take a budget out of force; its windows stay. Raise ``LookupError``."""
    found = find_budget(connection, budget_id)
    lock_accounts(connection, [found.account_id])
    connection.execute(
        update(budgets).where(budgets.c.id == budget_id).values(ended_at=datetime.now(UTC))
    )
    # What runs on still counts in them, but is bound by them no more.
    connection.execute(
        update(budget_windows).where(budget_windows.c.budget_id == budget_id).values(hard=False)
    )
    return found


def budget_states(
    connection: Connection, found: Sequence[Budget], now: datetime
) -> list[BudgetState]:
    """Say how far budgets are used in their windows of now."""
    starts = [window_start(budget.window, budget.tz, now) for budget in found]
    wanted = [(budget.id, microseconds(start)) for budget, start in zip(found, starts, strict=True)]
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
    connection: Connection, account_ids: Collection[int]
) -> dict[int, list[Budget]]:
    """Read the budgets of some accounts."""
    found: dict[int, list[Budget]] = {}
    query = (
        select(budgets)
        .where(budgets.c.account_id.in_(sorted(account_ids)), budgets.c.ended_at.is_(None))
        .order_by(budgets.c.id)
    )
    for row in connection.execute(query).mappings():
        found.setdefault(row["account_id"], []).append(_budget(row))
    return found


def read_windows(
    connection: Connection, wanted: Collection[tuple[int, int]]
) -> dict[tuple[int, int], RowMapping]:
    """Read windows by (budget, start in µs); those nothing was accepted in are absent."""
    if not wanted:
        return {}
    place = tuple_(budget_windows.c.budget_id, budget_windows.c.starts_us)
    rows = connection.execute(select(budget_windows).where(place.in_(sorted(set(wanted)))))
    return {(row["budget_id"], row["starts_us"]): row for row in rows.mappings()}


def window_start(window: Window, tz: str, moment: datetime) -> datetime:
    """Give the UTC moment at which the window around a moment began, by the clocks of a zone."""
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
            return _EPOCH


def window_end(window: Window, tz: str, moment: datetime) -> datetime | None:
    """Give the moment at which the window around a moment ends."""
    zone = read_zone(tz)
    local = moment.astimezone(zone)
    match window:
        case "hour":
            # Real hours are added, so that the hour that clocks repeat is two windows.
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
    """Find a zone by its IANA name. Raise ``ValueError`` if there is none."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{name!r} is no time zone; send an IANA name such as Europe/Berlin or UTC"
        ) from None


def microseconds(moment: datetime) -> int:
    """Since 1970: how a window is named in SQL and on receipts."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _midnight(local: datetime, zone: ZoneInfo, *, first: bool = False) -> datetime:
    day = local.date().replace(day=1) if first else local.date()
    return datetime.combine(day, time.min, zone).astimezone(UTC)


def _budget(row: RowMapping) -> Budget:
    return Budget(**row)
