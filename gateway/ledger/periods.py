"""Months of the books: whoever books holds the month's row, so that nothing enters a closed one.

The row is locked FOR SHARE before anything else, and the time to book at is read under that lock.
Whoever closes a month, or seals an hour of it, takes the row FOR UPDATE: after that, no earlier
time can be booked any more. (SQLite has one writer at a time; its transaction is the lock.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.tables.core import periods

Clock = Callable[[], datetime]

_MONTH: Final = re.compile(r"20[0-9]{2}-(?:0[1-9]|1[0-2])", re.ASCII)
_END: Final = "2100-01"
"""Start of the month after the last one that has a name."""


class MonthSpan(NamedTuple):
    """A month from its first instant up to the first of the next."""

    starts_at: datetime
    ends_at: datetime


def utc_now() -> datetime:
    return datetime.now(UTC)


def booking_time(connection: Connection, clock: Clock = utc_now) -> datetime:
    """Lock the month that is open now against its closing; return the time to book at.

    The first lock of a booking transaction, before any account's. What would fall into a month
    that is closed already, by a clock that is behind, is booked at the start of the next.
    """
    month = month_of(clock())
    while True:
        state = connection.execute(
            select(periods.c.state).where(periods.c.month == month).with_for_update(read=True)
        ).scalar()
        if state is None:
            open_period(connection, month)
        elif state != "open":
            month = next_month(month)
        else:
            now = clock()
            if month_of(now) <= month:
                return max(now, starts_at(month))
            month = month_of(now)


def open_period(connection: Connection, month: str) -> None:
    """Begin a month, if nobody has; of two who do, the second waits for the first."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    connection.execute(insert(periods).values(month=month).on_conflict_do_nothing())


def month_of(moment: datetime) -> str:
    """Name a moment's month in UTC, as in 2026-11; names sort as months do."""
    return moment.astimezone(UTC).strftime("%Y-%m")


def is_month(text: str) -> bool:
    """Whether a text names a month as ``2026-11`` does, from 2000-01 to 2099-12."""
    return _MONTH.fullmatch(text) is not None


def span_of(month: str) -> MonthSpan:
    """Return both ends of a month. Raise ``ValueError`` if the text does not name one."""
    return MonthSpan(starts_at(month), starts_at(next_month(month)))


def next_month(month: str) -> str:
    """Name the month after another. Raise ``ValueError`` if the text does not name one."""
    _check(month)
    year, number = divmod(int(month[:4]) * 12 + int(month[5:]), 12)
    return f"{year:04d}-{number + 1:02d}"


def starts_at(month: str) -> datetime:
    """Return the first instant of a month. Raise ``ValueError`` if the text does not name one."""
    _check(month)
    return datetime(int(month[:4]), int(month[5:]), 1, tzinfo=UTC)


def _check(month: str) -> None:
    if month != _END and not is_month(month):
        raise ValueError(f"{month!r} is not a month; use YYYY-MM, such as 2026-11")
