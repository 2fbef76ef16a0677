"""Usage by day (UTC): the sums of a day's sealed hours, by account and of all accounts, sealed.

A day is built once its last hour is, from the rows of its hours, without keys. Its seal covers its
rows and the seals of its hours. Hours that are built again need their days built again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Select, delete, func, insert, literal, select, union_all

from gateway.ledger.periods import utc_now
from gateway.sql.database import exact_sum
from gateway.tables.core import RowId
from gateway.tables.usage import USAGE_SUMS, usage_daily, usage_days, usage_hourly, usage_hours

DAY: Final = timedelta(days=1)
ALL_ACCOUNTS: Final = 0
"""In place of an account's id: the sums of all accounts."""

_LABELS: Final = ("model", "task", "outcome")
_COLUMNS: Final = ("account_id", *_LABELS, *USAGE_SUMS)


@dataclass(frozen=True, slots=True)
class DaySeal:
    """Digest of a day's rows and of the seals of its hours."""

    day: datetime
    rows: int
    sha256: str


def due_days(
    connection: Connection, hours: tuple[datetime, datetime], *, limit: int
) -> list[datetime]:
    """Return days that are not built although all of their hours are, oldest first."""
    built = built_days(connection)
    # Nothing was booked before the first hour.
    day = floor_day(hours[0]) if built is None else built[1]
    found: list[datetime] = []
    while day + DAY <= hours[1] and len(found) < limit:
        found.append(day)
        day += DAY
    return found


def build_day(connection: Connection, day: datetime) -> DaySeal:
    """Build or rebuild one day."""
    lock_hours(connection, day)
    connection.execute(delete(usage_daily).where(usage_daily.c.day == day))
    connection.execute(delete(usage_days).where(usage_days.c.day == day))
    made = _sums_of_hours(day).subquery()
    rows = select(literal(day, usage_daily.c.day.type), *(made.c[name] for name in _COLUMNS))
    connection.execute(insert(usage_daily).from_select(["day", *_COLUMNS], rows))
    seal = stored_day(connection, day)
    connection.execute(
        insert(usage_days).values(day=day, rows=seal.rows, sha256=seal.sha256, built_at=utc_now())
    )
    return seal


def lock_hours(connection: Connection, day: datetime) -> None:
    """Wait until no other transaction builds this day or rebuilds its hours. Bookings do not use
    these rows."""
    hour = usage_hours.c.hour
    query = select(hour).where(hour >= day, hour < day + DAY).order_by(hour).with_for_update()
    connection.execute(query).all()


def built_days(connection: Connection) -> tuple[datetime, datetime] | None:
    """Return the span of the days that are built; it has no gaps."""
    first, last = connection.execute(
        select(func.min(usage_days.c.day), func.max(usage_days.c.day))
    ).one()
    return None if first is None else (first, last + DAY)


def day_seal(connection: Connection, day: datetime) -> DaySeal | None:
    """Return the seal of a day, or None if the day is not built."""
    query = select(usage_days.c.day, usage_days.c.rows, usage_days.c.sha256)
    row = connection.execute(query.where(usage_days.c.day == day)).first()
    return None if row is None else DaySeal(*row)


def stored_day(connection: Connection, day: datetime) -> DaySeal:
    """Compute the seal of a day from its stored rows."""
    query = select(*(usage_daily.c[name] for name in _COLUMNS)).where(usage_daily.c.day == day)
    rows = connection.execute(query.order_by(*(usage_daily.c[name] for name in _COLUMNS[:4])))
    return _sealed(connection, day, rows.all())


def summed_day(connection: Connection, day: datetime) -> DaySeal:
    """Compute the seal that a day should have from the stored rows of its hours."""
    made = _sums_of_hours(day).subquery()
    query = select(*(made.c[name] for name in _COLUMNS))
    rows = connection.execute(query.order_by(*(made.c[name] for name in _COLUMNS[:4])))
    return _sealed(connection, day, rows.all())


def floor_day(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def _sealed(connection: Connection, day: datetime, rows: Sequence[Any]) -> DaySeal:
    hour = usage_hours.c.hour
    seals = select(hour, usage_hours.c.sha256).where(hour >= day, hour < day + DAY).order_by(hour)
    digest = hashlib.sha256()
    for at, sha256 in connection.execute(seals):
        digest.update(f"{at:%H} {sha256}\n".encode())
    for row in rows:
        digest.update(msgspec.json.encode(tuple(row)) + b"\n")
    return DaySeal(day, len(rows), digest.hexdigest())


def _sums_of_hours(day: datetime) -> Any:
    """Select the sums of a day's hours, by account and of all accounts."""
    table = usage_hourly.c
    labels = [table[name] for name in _LABELS]
    sums = [exact_sum(table[name]).label(name) for name in USAGE_SUMS]
    within = (table.hour >= day, table.hour < day + DAY)

    def grouped(account: Any, *keys: Any) -> Select[Any]:
        return select(account, *labels, *sums).where(*within).group_by(*keys, *labels)

    return union_all(
        grouped(table.account_id, table.account_id),
        grouped(literal(ALL_ACCOUNTS, RowId).label("account_id")),
    )
