"""Accounting months: a booking locks the month's row, so that nothing enters a closed month.

A booking transaction first locks the row FOR SHARE and reads its booking time under that lock.
Closing a month, or sealing an hour of it, locks the row FOR UPDATE; afterwards no earlier time can
be booked. (SQLite has one writer at a time; its transaction is the lock.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sqlalchemy import Connection, bindparam, select

from gateway.sql.database import upsert
from gateway.sql.statements import CompiledStatement
from gateway.tables.core import periods

Clock = Callable[[], datetime]

_MONTH: Final = re.compile(r"20[0-9]{2}-(?:0[1-9]|1[0-2])", re.ASCII)
_END: Final = "2100-01"
"""The month after the last one that is accepted."""
_LOCK: Final = CompiledStatement(
    select(periods.c.state).where(periods.c.month == bindparam("month")).with_for_update(read=True)
)


class MonthSpan(NamedTuple):
    """The first instant of a month, and the first of the next."""

    starts_at: datetime
    ends_at: datetime


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


def month_of(moment: datetime) -> str:
    """Return a moment's month in UTC as ``2026-11``; these strings sort chronologically."""
    return moment.astimezone(UTC).strftime("%Y-%m")


def is_month(text: str) -> bool:
    """Whether a text is a month of the form ``2026-11``, from 2000-01 to 2099-12."""
    return _MONTH.fullmatch(text) is not None


def span_of(month: str) -> MonthSpan:
    """Return both ends of a month. Raise ``ValueError`` if the text is not a month."""
    return MonthSpan(starts_at(month), starts_at(next_month(month)))


def next_month(month: str) -> str:
    """Return the month after another. Raise ``ValueError`` if the text is not a month."""
    _check(month)
    year, number = divmod(int(month[:4]) * 12 + int(month[5:]), 12)
    return f"{year:04d}-{number + 1:02d}"


def starts_at(month: str) -> datetime:
    """Return the first instant of a month. Raise ``ValueError`` if the text is not a month."""
    _check(month)
    return datetime(int(month[:4]), int(month[5:]), 1, tzinfo=UTC)


def _check(month: str) -> None:
    if month != _END and not is_month(month):
        raise ValueError(f"{month!r} is not a month; use YYYY-MM, such as 2026-11")
