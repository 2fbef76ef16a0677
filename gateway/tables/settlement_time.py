"""Receipts and transfers by the time of their booking, so that few partitions or rows are read.

PostgreSQL's partitions are ranges of request ids. An id usually has the time of its request, which
is at most ``LAG`` before its settlement, or ``LEAD`` after it if clocks differ. A trigger records
the ends of all other ids by month of settlement, so a query with these conditions finds the same
receipts as one by time alone. On SQLite, ``month_bounds`` has the ids of what was booked in each
closed month; a month without a row is read by its moments alone, which gives the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    MetaData,
    RowMapping,
    Select,
    String,
    Table,
    bindparam,
    false,
    func,
    literal_column,
    or_,
    select,
)

from gateway.checks.moments import EPOCH
from gateway.checks.months import MonthSpan, month_of
from gateway.ids import first_request_id, time_of
from gateway.sql.partitions import is_partitioned
from gateway.tables.core import RequestKey, RowId, metadata, receipts, refunds, transfers

# A second more than the trigger's, which migration 0019 defines, because milliseconds are rounded.
LAG: Final = timedelta(days=8, seconds=1)
LEAD: Final = timedelta(hours=1, seconds=1)

_RECENT: Final = (timedelta(days=31), timedelta(days=366))
_END: Final = datetime(9999, 1, 1, tzinfo=UTC)

# Only on PostgreSQL, and so without the other tables' metadata.
_bounds: Final = Table(
    "receipt_id_bounds",
    MetaData(),
    Column("month", String(7), primary_key=True),
    Column("first_id", RequestKey, nullable=False),
    Column("last_id", RequestKey, nullable=False),
)

_UNUSUAL: Final = select(_bounds.c.first_id, _bounds.c.last_id).where(
    _bounds.c.month >= bindparam("first_month"), _bounds.c.month <= bindparam("last_month")
)

IdRange: TypeAlias = tuple[str, str]
"""The first id, and an id after the last one."""

month_bounds: Final = Table(
    "month_bounds",
    metadata,
    Column("month", String(7), primary_key=True),
    # The smallest and the largest id of the receipts that were settled, and of the transfers that
    # were booked in the month; NULL without any.
    Column("first_request_id", RequestKey),
    Column("last_request_id", RequestKey),
    Column("first_transfer_id", RowId),
    Column("last_transfer_id", RowId),
    # Transfers of later months have this id or a larger one; 0 if unknown.
    Column("later_transfer_id", RowId, nullable=False),
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
    connection: Connection,
    starts_at: datetime,
    ends_at: datetime | None = None,
    *,
    id: Column[Any] = receipts.c.request_id,
) -> list[ColumnElement[bool]]:
    """Return the SQL conditions for the ids that receipts settled in a span can have; none without
    partitions. ``id``: the column of another table that is joined by it."""
    ranges = id_ranges(connection, starts_at, ends_at)
    return [or_(*((id >= first) & (id < end) for first, end in ranges))] if ranges else []


def id_ranges(
    connection: Connection, starts_at: datetime, ends_at: datetime | None = None
) -> list[IdRange]:
    """Return where the ids of receipts settled in a span can be; nothing without partitions, where
    they can be everywhere."""
    if not is_partitioned(connection):
        return []
    until = min(ends_at or _END, _END)
    known = connection.execute(
        _UNUSUAL, {"first_month": month_of(starts_at), "last_month": month_of(until)}
    )
    usual = first_request_id(max(starts_at, EPOCH) - LAG), first_request_id(until + LEAD)
    return [usual, *((row.first_id, f"{row.last_id}0") for row in known)]


def newest(
    connection: Connection, query: Select[Any], limit: int, *, cursor: str | None
) -> Sequence[RowMapping]:
    """Run a query of receipts that has a limit, descending by id, below a cursor. Its parameter
    ``oldest`` is an id before which it reads nothing, for its joins.

    PostgreSQL would look for the newest ones in each partition, so the last month and then the last
    year before the cursor are searched first.
    """
    if is_partitioned(connection):
        now = first_request_id(datetime.now(UTC))
        end = time_of("req_", now if cursor is None else min(cursor, now))
        for span in _RECENT:
            oldest = first_request_id(end - span)
            recent = query.where(receipts.c.request_id >= oldest)
            rows = connection.execute(recent, {"oldest": oldest}).mappings().all()
            if len(rows) == limit:
                return rows
    return connection.execute(query, {"oldest": ""}).mappings().all()


def recent_transfers(
    connection: Connection, below: int | None
) -> Iterator[tuple[list[ColumnElement[bool]], datetime | None]]:
    """Yield SQL conditions for ever longer spans of bookings before a transfer, or before now, to
    look for the newest ones in, and the moment from which none is missing; at last, no conditions.

    PostgreSQL would look for them in each partition.
    """
    if is_partitioned(connection):
        end = datetime.now(UTC) if below is None else booked_at(connection, below)
        starts = [] if end is None else [end - span for span in _RECENT]
        for start in starts:
            conditions: list[ColumnElement[bool]] = [transfers.c.booked_at >= start]
            if end is not None and below is not None:
                conditions.append(transfers.c.booked_at < end + LEAD)
            # Ids and moments can differ in their order by as much as clocks do.
            yield conditions, start + LEAD
    yield [], None


def booked_at(connection: Connection, transfer_id: int) -> datetime | None:
    """Return when a transfer was booked, looking in the newest partitions first; None if it is
    unknown."""
    moment = transfers.c.booked_at
    query = select(moment).where(transfers.c.id == transfer_id)
    now, spans = datetime.now(UTC), _RECENT if is_partitioned(connection) else ()
    for each in (*(query.where(moment >= now - span) for span in spans), query):
        found: datetime | None = connection.execute(each).scalar()
        if found is not None:
            return found
    return None


def refunded_within(
    connection: Connection, *conditions: ColumnElement[bool]
) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the ids of receipts that have refunds with some conditions, for
    their joins; none without partitions. A join alone can read every partition."""
    if not is_partitioned(connection):
        return []
    # Without refunds, none: every id is longer.
    first, end = refunded_ids(connection, *conditions) or ("", "")
    return [receipts.c.request_id >= first, receipts.c.request_id < end]


def refunded_ids(connection: Connection, *conditions: ColumnElement[bool]) -> IdRange | None:
    """Return where the ids of receipts are that have refunds with some conditions; None without
    refunds."""
    id = refunds.c.request_id
    first, last = connection.execute(select(func.min(id), func.max(id)).where(*conditions)).one()
    return None if first is None else (first, f"{last}0")


# --- Closed months --------------------------------------------------------------------------------


def settled_in(
    connection: Connection, span: MonthSpan, id: Column[Any] = receipts.c.request_id
) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the receipts that were settled in a month, to be read in the order
    of their ids. ``id``: the column of another table that refers to them."""
    ids = receipt_ids_of(connection, span, id)
    moment: ColumnElement[Any] = receipts.c.settled_at
    if ids and not is_partitioned(connection):
        # SQLite would rather read an index by this, and sort the month for each page.
        moment = literal_column("+receipts.settled_at", receipts.c.settled_at.type)
    return [*_within(moment, span), *ids]


def booked_in(connection: Connection, span: MonthSpan) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the transfers that were booked in a month."""
    return [*_within(transfers.c.booked_at, span), *transfer_ids_of(connection, span)]


def receipt_ids_of(
    connection: Connection, span: MonthSpan, id: Column[Any] = receipts.c.request_id
) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the ids that the receipts of a month can have."""
    if is_partitioned(connection):
        return ids_within(connection, *span, id=id)
    return _between(connection, span, id, "request")


def transfer_ids_of(connection: Connection, span: MonthSpan) -> list[ColumnElement[bool]]:
    """Return SQL conditions that leave out transfers of other months; some can remain."""
    if is_partitioned(connection):
        return _within(transfers.c.booked_at, span)
    return _between(connection, span, transfers.c.id, "transfer")


def first_transfer_of(connection: Connection, span: MonthSpan) -> int:
    """Return an id below which no transfer of a month is."""
    earlier = select(month_bounds.c.later_transfer_id)
    earlier = earlier.where(month_bounds.c.month < month_of(span.starts_at))
    newest = earlier.order_by(month_bounds.c.month.desc()).limit(1)
    return connection.execute(newest).scalar() or 0


def _within(moment: ColumnElement[Any], span: MonthSpan) -> list[ColumnElement[bool]]:
    return [moment >= span.starts_at, moment < span.ends_at]


def _between(
    connection: Connection, span: MonthSpan, id: Column[Any], name: str
) -> list[ColumnElement[bool]]:
    first, last = month_bounds.c[f"first_{name}_id"], month_bounds.c[f"last_{name}_id"]
    query = select(first, last).where(month_bounds.c.month == month_of(span.starts_at))
    known = connection.execute(query).first()
    if known is not None:
        return [false()] if known[0] is None else [id >= known[0], id <= known[1]]
    if name == "transfer":
        return [id >= first_transfer_of(connection, span)]
    return []
