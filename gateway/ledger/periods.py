"""Accounting months: a booking locks the month's row, so that nothing enters a closed month.

A booking transaction first locks the row FOR SHARE and reads its booking time under that lock.
Closing a month, or sealing an hour of it, locks the row FOR UPDATE; afterwards no earlier time can
be booked. (SQLite has one writer at a time; its transaction is the lock.)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, bindparam, select

from gateway.checks.months import MonthSpan as MonthSpan
from gateway.checks.months import is_month as is_month
from gateway.checks.months import month_of as month_of
from gateway.checks.months import next_month as next_month
from gateway.checks.months import span_of as span_of
from gateway.checks.months import starts_at as starts_at
from gateway.sql.database import upsert
from gateway.sql.statements import CompiledStatement
from gateway.tables.core import periods

Clock = Callable[[], datetime]

_LOCK: Final = CompiledStatement(
    select(periods.c.state).where(periods.c.month == bindparam("month")).with_for_update(read=True)
)


def utc_now() -> datetime:
    return datetime.now(UTC)


def booking_time(connection: Connection, clock: Clock = utc_now) -> datetime:
    """Lock the current month against closing; return the booking time.

    This must be the first lock of a booking transaction, before any account's. If the clock is
    behind and its month is already closed, the time is the start of the next month.
    """
    month = month_of(clock())
    while True:
        found = _LOCK.rows(connection, month=month)
        if not found:
            open_period(connection, month)
        elif found[0]["state"] != "open":
            month = next_month(month)
        else:
            now = clock()
            if month_of(now) <= month:
                return max(now, starts_at(month))
            month = month_of(now)


def open_period(connection: Connection, month: str) -> None:
    """Create a month's row if it does not exist; concurrent callers wait for the first."""
    connection.execute(upsert(connection, periods).values(month=month).on_conflict_do_nothing())
