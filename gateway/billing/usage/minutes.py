"""Usage by minute since the last sealed hour, so that a report reads few receipts.

A minute is closed 30 seconds after its end, once the bookings that were open then have ended.
Minutes have no seals: the hour that is built from them has one, and the nightly proof compares it
with receipts. They have no gaps, and are deleted when their hour is built.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Connection,
    Select,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    union_all,
)

from gateway.ledger.periods import month_of, open_period, utc_now
from gateway.sql.database import exact_sum
from gateway.tables.core import QUANTITIES, periods, receipts, refunds
from gateway.tables.settlement_time import refunded_within, settled_within
from gateway.tables.usage import USAGE_SUMS, usage_hours, usage_minutely, usage_minutes

MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
CLOSED_AFTER: Final = timedelta(seconds=30)
MINUTES_MAX: Final = 10
"""Maximum number of minutes built in one transaction."""
BACKLOG_MAX: Final = timedelta(hours=2)
"""Beyond this, whole hours are due, which are then built from receipts."""

CELL: Final = ("account_id", "key_id", "model", "task", "outcome")
_EXPENSES: Final = ("expense_nanos", "expensed")
"""Sums for the operator, which seals do not cover: hours were sealed before they existed."""


def wait_for_bookings(connection: Connection) -> datetime:
    """Wait for open bookings; return a moment before which nothing more is booked, but for clocks
    that differ by less than ``CLOSED_AFTER``.

    Commit before building, so that bookings do not wait for it.
    """
    now = utc_now()
    for month in dict.fromkeys((month_of(now - BACKLOG_MAX), month_of(now))):
        lock_month(connection, month)
    return now


def lock_month(connection: Connection, month: str) -> None:
    """Wait for open bookings into a month; from here on, bookings have a later time."""
    open_period(connection, month)
    connection.execute(
        select(periods.c.month).where(periods.c.month == month).with_for_update()
    ).one()


def build_due_minutes(
    connection: Connection, closed_at: datetime, *, limit: int = MINUTES_MAX
) -> int:
    """Build the minutes that were closed at a moment of ``wait_for_bookings``, oldest first, and
    return their number. Call again while it is ``limit``."""
    start, end = _first_due(connection), floor_minute(closed_at - CLOSED_AFTER)
    if start is None or end - start > BACKLOG_MAX:
        return 0
    minutes = [start + MINUTE * place for place in range(min(limit, (end - start) // MINUTE))]
    for minute in minutes:
        rows = summed(booked_within(connection, minute, minute + MINUTE), minute)
        connection.execute(insert(usage_minutely).from_select(["minute", *CELL, *USAGE_SUMS], rows))
        connection.execute(insert(usage_minutes).values(minute=minute, built_at=utc_now()))
    return len(minutes)


def booked_in_hour(connection: Connection, hour: datetime) -> Select[Any]:
    """Select what was booked in an hour: its minutes if all are built, otherwise the rows of the
    books."""
    within = (usage_minutes.c.minute >= hour, usage_minutes.c.minute < hour + HOUR)
    built = connection.execute(select(func.count()).where(*within)).scalar_one()
    if built < HOUR // MINUTE:
        return booked_within(connection, hour, hour + HOUR)
    table = usage_minutely.c
    return select(*(table[name] for name in (*CELL, *USAGE_SUMS))).where(
        table.minute >= hour, table.minute < hour + HOUR
    )


def delete_minutes(connection: Connection, before: datetime) -> None:
    """Delete the minutes of hours that are built."""
    for table in (usage_minutely, usage_minutes):
        connection.execute(delete(table).where(table.c.minute < before))


def summed(booked: Select[Any], moment: datetime) -> Select[Any]:
    """Sum what was booked by account, key, model, task and outcome, under one moment."""
    cells = booked.subquery()
    keys = [cells.c[name] for name in CELL]
    sums = [exact_sum(cells.c[name]).label(name) for name in USAGE_SUMS]
    at = literal(moment, usage_minutes.c.minute.type)
    return select(at, *keys, *sums).group_by(*keys)


def booked_within(connection: Connection, starts_at: datetime, ends_at: datetime) -> Select[Any]:
    """Select the receipts and refunds that were booked in a span."""
    none = literal(0, BigInteger)
    settled = select(
        *(receipts.c[name] for name in CELL),
        literal(1, BigInteger).label("requests"),
        receipts.c.charge_nanos,
        none.label("refund_nanos"),
        *(receipts.c[name] for name in QUANTITIES),
        func.coalesce(receipts.c.expense_nanos, 0).label("expense_nanos"),
        case((receipts.c.expense_nanos.is_(None), 0), else_=1).label("expensed"),
    ).where(*settled_within(connection, starts_at, ends_at))
    booked = (refunds.c.booked_at >= starts_at, refunds.c.booked_at < ends_at)
    returned = (
        select(
            *(receipts.c[name] for name in CELL),
            none.label("requests"),
            none.label("charge_nanos"),
            refunds.c.amount_nanos.label("refund_nanos"),
            *(none.label(name) for name in (*QUANTITIES, *_EXPENSES)),
        )
        .join(receipts, receipts.c.request_id == refunds.c.request_id)
        .where(*booked, *refunded_within(connection, *booked))
    )
    both = union_all(settled, returned).subquery()
    return select(both)


def floor_minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


def floor_hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def _first_due(connection: Connection) -> datetime | None:
    """Return the first minute after those that are built, after the last hour or, without either,
    that of the first booking."""
    minute: datetime | None
    hour: datetime | None
    minute, hour = connection.execute(
        select(
            select(func.max(usage_minutes.c.minute)).scalar_subquery(),
            select(func.max(usage_hours.c.hour)).scalar_subquery(),
        )
    ).one()
    if minute is not None:
        return minute + MINUTE
    if hour is not None:
        return hour + HOUR
    first: datetime | None = connection.execute(select(func.min(receipts.c.settled_at))).scalar()
    return None if first is None else floor_hour(first)
