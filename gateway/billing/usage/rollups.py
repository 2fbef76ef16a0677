"""Usage by the hour, built once per closed hour from what was booked, and sealed.

An hour is closed 30 seconds after its end: by then, with the month's row locked FOR UPDATE, nobody
who books can still have an earlier time. Building an hour again gives the same rows and the same
seal; a refund counts in the hour in which it was booked, beside the request that it is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    delete,
    func,
    insert,
    literal,
    select,
    union_all,
)

from gateway.ledger.periods import month_of, open_period, utc_now
from gateway.sql.database import exact_sum
from gateway.tables.core import QUANTITIES, periods, receipts, refunds, usage_hourly, usage_hours

HOUR: Final = timedelta(hours=1)
CLOSED_AFTER: Final = timedelta(seconds=30)
HOURS_MAX: Final = 200
"""Built in one transaction, so that none of them is long."""

_CELL: Final = ("account_id", "key_id", "model", "task", "outcome")
_SUMS: Final = ("requests", "charge_nanos", "refund_nanos", *QUANTITIES)


@dataclass(frozen=True, slots=True)
class Seal:
    """What an hour holds: two builds of it are equal if their seals are."""

    hour: datetime
    rows: int
    requests: int
    charge_nanos: int
    refund_nanos: int
    sha256: str


def build_due(connection: Connection, now: datetime, *, limit: int = HOURS_MAX) -> int:
    """Build hours that have closed and are not built yet, oldest first; return how many.

    Call again while that is ``limit``.
    """
    hours = list(_due(connection, now, limit))
    for month in dict.fromkeys(map(month_of, hours)):
        _lock(connection, month)
    for hour in hours:
        build_hour(connection, hour)
    return len(hours)


def build_hour(connection: Connection, hour: datetime) -> Seal:
    """Build one hour, again if it was built before; its month's row is locked by the caller."""
    connection.execute(delete(usage_hourly).where(usage_hourly.c.hour == hour))
    connection.execute(delete(usage_hours).where(usage_hours.c.hour == hour))
    cells = _booked_in(hour).subquery()
    keys = [cells.c[name] for name in _CELL]
    sums = [exact_sum(cells.c[name]).label(name) for name in _SUMS]
    made = select(literal(hour, usage_hourly.c.hour.type).label("hour"), *keys, *sums)
    connection.execute(
        insert(usage_hourly).from_select(["hour", *_CELL, *_SUMS], made.group_by(*keys))
    )
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


def rebuild(connection: Connection) -> list[tuple[Seal, Seal]]:
    """Build every sealed hour anew; return those that differ, as they were and as they are."""
    differing = []
    for month in connection.execute(select(periods.c.month)).scalars().all():
        _lock(connection, month)
    for old in seals(connection):
        new = build_hour(connection, old.hour)
        if new != old:
            differing.append((old, new))
    return differing


def seals(connection: Connection) -> list[Seal]:
    """Read the seals of all hours that were built, oldest first."""
    columns = [usage_hours.c[name] for name in Seal.__dataclass_fields__]
    rows = connection.execute(select(*columns).order_by(usage_hours.c.hour))
    return [Seal(**row) for row in rows.mappings()]


def seal_of(connection: Connection, hour: datetime) -> Seal:
    """Compute the seal of an hour from its cells as they stand."""
    columns = [usage_hourly.c[name] for name in (*_CELL, *_SUMS)]
    rows = connection.execute(
        select(*columns)
        .where(usage_hourly.c.hour == hour)
        .order_by(*(usage_hourly.c[name] for name in _CELL))
    ).all()
    digest = hashlib.sha256()
    for row in rows:
        digest.update(msgspec.json.encode(tuple(row)) + b"\n")
    place = len(_CELL)
    return Seal(
        hour,
        rows=len(rows),
        requests=sum(row[place] for row in rows),
        charge_nanos=sum(row[place + 1] for row in rows),
        refund_nanos=sum(row[place + 2] for row in rows),
        sha256=digest.hexdigest(),
    )


def built_range(connection: Connection) -> tuple[datetime, datetime] | None:
    """Give the span that is built, without gaps; before it nothing was ever booked."""
    first, last = connection.execute(
        select(func.min(usage_hours.c.hour), func.max(usage_hours.c.hour))
    ).one()
    return None if first is None else (first, last + HOUR)


def floor_hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def _due(connection: Connection, now: datetime, limit: int) -> Iterator[datetime]:
    """The hours from the last one built, or the first that anything was booked in, to now."""
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


def _booked_in(hour: datetime) -> Select[tuple[object, ...]]:
    """What was charged, released or given back in an hour, line by line."""

    def within(column: ColumnElement[datetime]) -> ColumnElement[bool]:
        return (column >= hour) & (column < hour + HOUR)

    none = literal(0, BigInteger)
    settled = select(
        *(receipts.c[name] for name in _CELL),
        literal(1, BigInteger).label("requests"),
        receipts.c.charge_nanos,
        none.label("refund_nanos"),
        *(receipts.c[name] for name in QUANTITIES),
    ).where(within(receipts.c.settled_at))
    returned = (
        select(
            *(receipts.c[name] for name in _CELL),
            none.label("requests"),
            none.label("charge_nanos"),
            refunds.c.amount_nanos.label("refund_nanos"),
            *(none.label(name) for name in QUANTITIES),
        )
        .join(receipts, receipts.c.request_id == refunds.c.request_id)
        .where(within(refunds.c.booked_at))
    )
    both = union_all(settled, returned).subquery()
    return select(both)


def _lock(connection: Connection, month: str) -> None:
    """Wait for whoever books into a month; from here on they have a later time."""
    open_period(connection, month)
    connection.execute(
        select(periods.c.month).where(periods.c.month == month).with_for_update()
    ).one()
