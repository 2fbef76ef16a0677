"""Rollups: usage by hour, built once per closed hour from what was booked, and sealed; and by day.

An hour is closed 30 seconds after its end: once the month's row has been locked FOR UPDATE, no
booking can have an earlier time. Building an hour again gives the same rows and the same seal. A
refund counts in the hour in which it was booked, under the labels of its request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import (
    Connection,
    delete,
    func,
    insert,
    select,
)

from gateway.archive.marks import REMOVED, find_archive
from gateway.billing.usage.days import (
    DAY,
    DaySeal,
    build_day,
    built_days,
    day_seal,
    due_days,
    lock_hours,
)
from gateway.billing.usage.minutes import (
    CELL,
    CLOSED_AFTER,
    HOUR,
    booked_in_hour,
    delete_minutes,
    floor_hour,
    lock_month,
    summed,
)
from gateway.ledger.periods import month_of, utc_now
from gateway.tables.core import receipts
from gateway.tables.usage import BOOKED_SUMS, USAGE_SUMS, usage_hourly, usage_hours

HOURS_MAX: Final = 200
"""Maximum number of hours built in one transaction, which keeps transactions short."""
DAYS_MAX: Final = 5
"""Maximum number of days built in one transaction."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Totals and digest of an hour: two builds are equal if their seals are."""

    hour: datetime
    rows: int
    requests: int
    charge_nanos: int
    refund_nanos: int
    sha256: str


def build_due(connection: Connection, now: datetime, *, limit: int = HOURS_MAX) -> int:
    """Build closed hours that are not built yet, oldest first, and return their number. Call again
    while it is ``limit``."""
    hours = list(_due(connection, now, limit))
    for month in dict.fromkeys(map(month_of, hours)):
        lock_month(connection, month)
    for hour in hours:
        build_hour(connection, hour)
    if hours:
        delete_minutes(connection, hours[-1] + HOUR)
    return len(hours)


def build_due_days(connection: Connection, *, limit: int = DAYS_MAX) -> int:
    """Build days that built hours complete, oldest first, and return their number. Call again while
    it is ``limit``.

    Days come from sealed hours, so bookings do not wait for them.
    """
    built = built_range(connection)
    days = [] if built is None else due_days(connection, built, limit=limit)
    for day in days:
        build_day(connection, day)
    return len(days)


def build_hour(connection: Connection, hour: datetime) -> Seal:
    """Build or rebuild one hour. For the first time, the caller has locked its month's row; nothing
    is booked into a sealed hour.

    A day that is built already needs to be built again.
    """
    connection.execute(delete(usage_hourly).where(usage_hourly.c.hour == hour))
    connection.execute(delete(usage_hours).where(usage_hours.c.hour == hour))
    rows = summed(booked_in_hour(connection, hour), hour)
    connection.execute(insert(usage_hourly).from_select(["hour", *CELL, *USAGE_SUMS], rows))
    seal = seal_of(connection, hour)
    connection.execute(
        insert(usage_hours).values(
            hour=hour,
            rows=seal.rows,
            requests=seal.requests,
            charge_nanos=seal.charge_nanos,
            refund_nanos=seal.refund_nanos,
            sha256=seal.sha256,
            built_at=utc_now(),
        )
    )
    return seal


def rebuild_hours(connection: Connection, day: datetime) -> list[tuple[Seal, Seal]]:
    """Rebuild the sealed hours of a day; return the old and new seals of those that differ.

    Hours of archived months are left as they are: their receipts are not in the database.
    """
    archive = find_archive(connection, month_of(day), lock=True)
    if archive is not None and archive.state in REMOVED:
        return []
    lock_hours(connection, day)
    pairs = ((old, build_hour(connection, old.hour)) for old in seals(connection, day, day + DAY))
    return [(old, new) for old, new in pairs if new != old]


def rebuild_day(connection: Connection, day: datetime) -> list[tuple[DaySeal | None, DaySeal]]:
    """Rebuild a day from its hours, if it is built; return its seals if they differ."""
    built = built_days(connection)
    if built is None or not built[0] <= day < built[1]:
        return []
    old, new = day_seal(connection, day), build_day(connection, day)
    return [] if new == old else [(old, new)]


def seals(
    connection: Connection, starts_at: datetime | None = None, ends_at: datetime | None = None
) -> list[Seal]:
    """List the seals of the built hours of a span, or of all, oldest first."""
    query = select(*(usage_hours.c[name] for name in Seal.__dataclass_fields__))
    if starts_at is not None:
        query = query.where(usage_hours.c.hour >= starts_at)
    if ends_at is not None:
        query = query.where(usage_hours.c.hour < ends_at)
    rows = connection.execute(query.order_by(usage_hours.c.hour))
    return [Seal(**row) for row in rows.mappings()]


def seal_of(connection: Connection, hour: datetime) -> Seal:
    """Compute the seal of an hour from its stored rows."""
    columns = [usage_hourly.c[name] for name in (*CELL, *BOOKED_SUMS)]
    rows = connection.execute(
        select(*columns)
        .where(usage_hourly.c.hour == hour)
        .order_by(*(usage_hourly.c[name] for name in CELL))
    ).all()
    digest = hashlib.sha256()
    for row in rows:
        digest.update(msgspec.json.encode(tuple(row)) + b"\n")
    place = len(CELL)
    return Seal(
        hour,
        rows=len(rows),
        requests=sum(row[place] for row in rows),
        charge_nanos=sum(row[place + 1] for row in rows),
        refund_nanos=sum(row[place + 2] for row in rows),
        sha256=digest.hexdigest(),
    )


def built_range(connection: Connection) -> tuple[datetime, datetime] | None:
    """Return the span that is built; it has no gaps, and nothing was booked before it."""
    first, last = connection.execute(
        select(func.min(usage_hours.c.hour), func.max(usage_hours.c.hour))
    ).one()
    return None if first is None else (first, last + HOUR)


def _due(connection: Connection, now: datetime, limit: int) -> Iterator[datetime]:
    """Yield closed hours after the last built one or, without any, from the first booking."""
    built = built_range(connection)
    if built is not None:
        hour = built[1]
    else:
        first = connection.execute(select(func.min(receipts.c.settled_at))).scalar()
        if first is None:
            return
        hour = floor_hour(first)
    end = floor_hour(now - CLOSED_AFTER)
    while hour < end and limit:
        yield hour
        hour += HOUR
        limit -= 1
