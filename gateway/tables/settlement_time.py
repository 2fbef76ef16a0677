"""Receipts by the time of their settlement, so that PostgreSQL reads few partitions.

Partitions are ranges of request ids. An id usually has the time of its request, which is at most
``LAG`` before its settlement, or ``LEAD`` after it if clocks differ. A trigger records the ends of
all other ids by month of settlement, so a query with these conditions finds the same receipts as
one by time alone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Column, ColumnElement, Connection, MetaData, String, Table, or_, select

from gateway.checks.moments import EPOCH
from gateway.checks.months import month_of
from gateway.ids import first_request_id
from gateway.sql.partitions import is_partitioned
from gateway.tables.core import RequestKey, receipts

# A second more than the trigger's, which migration 0019 defines, because milliseconds are rounded.
LAG: Final = timedelta(days=8, seconds=1)
LEAD: Final = timedelta(hours=1, seconds=1)

_END: Final = datetime(9999, 1, 1, tzinfo=UTC)

# Only on PostgreSQL, and so without the other tables' metadata.
_bounds: Final = Table(
    "receipt_id_bounds",
    MetaData(),
    Column("month", String(7), primary_key=True),
    Column("first_id", RequestKey, nullable=False),
    Column("last_id", RequestKey, nullable=False),
)


def settled_within(
    connection: Connection, starts_at: datetime, ends_at: datetime | None = None
) -> list[ColumnElement[bool]]:
    """Return SQL conditions for receipts settled in a span; without an end, since its start."""
    settled_at = receipts.c.settled_at
    conditions: list[ColumnElement[bool]] = [settled_at >= starts_at]
    if ends_at is not None:
        conditions.append(settled_at < ends_at)
    return [*conditions, *ids_within(connection, starts_at, ends_at)]


def ids_within(
    connection: Connection, starts_at: datetime, ends_at: datetime | None = None
) -> list[ColumnElement[bool]]:
    """Return the SQL conditions for the ids that receipts settled in a span can have; none without
    partitions."""
    id = receipts.c.request_id
    if not is_partitioned(connection):
        return []
    known = select(_bounds.c.first_id, _bounds.c.last_id).where(
        _bounds.c.month >= month_of(starts_at)
    )
    usual = id >= first_request_id(max(starts_at, EPOCH) - LAG)
    if ends_at is not None:
        known = known.where(_bounds.c.month <= month_of(ends_at))
        usual &= id < first_request_id(min(ends_at, _END) + LEAD)
    unusual = [id.between(first, last) for first, last in connection.execute(known)]
    return [or_(usual, *unusual)]
