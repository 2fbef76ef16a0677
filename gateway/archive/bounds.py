"""Learns the ids of what was booked in a closed month, in pages, for SQLite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final

from sqlalchemy import Connection, case, func, select

from gateway.archive.marks import REMOVED, find_archive
from gateway.ledger.periods import MonthSpan, span_of
from gateway.sql.database import Database, upsert
from gateway.sql.partitions import is_partitioned
from gateway.tables.archives import archives
from gateway.tables.core import receipts, transfers
from gateway.tables.settlement_time import first_transfer_of, month_bounds

PAGE: Final = 20_000
"""Transfers of one snapshot, of which only the moment is read."""

Open = Callable[[], AbstractContextManager[Connection]]
Write = Callable[[Callable[[Connection], None]], object]


def learn_bounds(database: Database, month: str) -> None:
    """Store the ids of a month into which nothing more is booked, unless they are known or some of
    its rows are in an archive only.

    Blocks. No effect on PostgreSQL, which has partitions.
    """

    def write(function: Callable[[Connection], None]) -> None:
        with database.transaction() as connection:
            function(connection)

    learn(database.snapshot, write, month)


def learn(open: Open, write: Write, month: str, *, page: int = PAGE) -> None:
    """Like ``learn_bounds``, with functions that open a snapshot and run a transaction."""
    span = span_of(month)
    with open() as connection:
        known = select(month_bounds.c.month).where(month_bounds.c.month == month)
        archive = find_archive(connection, month)
        if archive is not None and archive.state in REMOVED:
            return
        if is_partitioned(connection) or connection.execute(known).first() is not None:
            return
    first, last = _requests(open, span)
    values = {"month": month, "first_request_id": first, "last_request_id": last}
    row = values | _transfers(open, span, page)
    write(lambda c: _keep(c, row))


def _keep(connection: Connection, row: Mapping[str, object]) -> None:
    removed = select(archives.c.month).where(
        archives.c.state.in_(REMOVED), archives.c.month > row["month"]
    )
    if connection.execute(removed.limit(1)).first() is not None:
        # The rows that were read lack those of a later month, which can come back.
        row = {**row, "later_transfer_id": 0}
    connection.execute(upsert(connection, month_bounds).values(**row).on_conflict_do_nothing())


def _requests(open: Open, span: MonthSpan) -> tuple[str | None, str | None]:
    """Return the smallest and the largest id of a month's receipts, day by day."""
    ids: list[str] = []
    id, settled_at, start = receipts.c.request_id, receipts.c.settled_at, span.starts_at
    while start < span.ends_at:
        until = start + timedelta(days=1)
        query = select(func.min(id), func.max(id))
        with open() as connection:
            found = connection.execute(query.where(settled_at >= start, settled_at < until)).one()
        ids += [each for each in found if each is not None]
        start = until
    return min(ids, default=None), max(ids, default=None)


def _transfers(open: Open, span: MonthSpan, size: int) -> dict[str, int | None]:
    firsts: list[int] = []
    lasts: list[int] = []
    later: list[int] = []
    with open() as connection:
        after = first_transfer_of(connection, span) - 1
    count = size
    while count == size:
        rows = select(transfers.c.id, transfers.c.booked_at).where(transfers.c.id > after)
        page = rows.order_by(transfers.c.id).limit(size).subquery()
        id, booked_at = page.c
        within = case(((booked_at >= span.starts_at) & (booked_at < span.ends_at), id))
        beyond = case((booked_at >= span.ends_at, id))
        query = select(
            func.count(), func.max(id), func.min(within), func.max(within), func.min(beyond)
        )
        with open() as connection:
            count, last, lowest, highest, next_one = connection.execute(query).one()
        after = after if last is None else last
        firsts += [lowest] if lowest is not None else []
        lasts += [highest] if highest is not None else []
        later += [next_one] if next_one is not None else []
    return {
        "first_transfer_id": min(firsts, default=None),
        "last_transfer_id": max(lasts, default=None),
        "later_transfer_id": min(later, default=after + 1),
    }
