"""Pages of receipts and refunds as Arrow tables, as both profiles of exports read them.

Rows are sorted by request, refunds after charges. They are read in pages, each in a short
transaction, because a connection must not wait for a slow client. Rows booked before the end of the
span never change and none are added, so the pages are consistent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa
from sqlalchemy import Column, Connection, Select, func, select, tuple_

from gateway.archive.marks import check_unchanged, settled_outside
from gateway.billing.exports.archived import ArchivedReceipts, ExportReader
from gateway.billing.usage.report import Filters, Span
from gateway.sql.arrow import read_table
from gateway.tables.core import receipts, refunds
from gateway.tables.settlement_time import refunded_within, settled_within

T = TypeVar("T")
R = TypeVar("R", covariant=True)

PAGE_ROWS: Final = 20_000


class TableMaker(Protocol[R]):
    """Makes something of a page, in the transaction in which it was read."""

    def __call__(self, connection: Connection, page: pa.Table, /) -> R: ...


def connection_reader(connection: Connection) -> ExportReader:
    """Return a reader that uses one transaction of this thread."""

    def read(function: Callable[[Connection], T]) -> T:
        return function(connection)

    return read


def charge_pages(
    read: ExportReader,
    query: Select[Any],
    span: Span,
    filters: Filters,
    make: TableMaker[R],
    archived: ArchivedReceipts,
) -> Iterator[R]:
    """Read receipts in pages by request id, archived ones included; yield ``make`` of each page.

    The query has a column ``request_id``.
    """
    if not archived.archives:
        yield from _stored_pages(read, query, span, filters, archived, make)
        return
    stored = _stored_pages(read, query, span, filters, archived, _as_read)
    for page in archived.merged(stored, query, span, filters, rows=PAGE_ROWS):
        yield read(functools.partial(_make, page=page, make=make))


def _as_read(_: Connection, page: pa.Table) -> pa.Table:
    return page


def _make(connection: Connection, *, page: pa.Table, make: TableMaker[R]) -> R:
    return make(connection, page)


def _stored_pages(
    read: ExportReader,
    query: Select[Any],
    span: Span,
    filters: Filters,
    archived: ArchivedReceipts,
    make: TableMaker[R],
) -> Iterator[R]:
    """Read receipts of months that are not archived."""
    id = receipts.c.request_id
    # An expression, so that the planner uses the index on the time of booking, not that of the ids.
    borders = select(func.min(func.substr(id, 1)), func.max(func.substr(id, 1)))
    borders = borders.where(*span_conditions(span, filters))
    query = query.where(*settled_outside(archived.archives))

    def read_on(connection: Connection, page: Select[Any]) -> tuple[R | None, int, tuple[Any, ...]]:
        # Rows that leave the database meanwhile would be missing.
        check_unchanged(connection, (span.starts_at, span.ends_at), archived.archives)
        return _read_page(connection, page=page, end=(id,), make=make)

    def find_borders(connection: Connection) -> Any:
        within = settled_within(connection, span.starts_at, span.ends_at)
        return connection.execute(borders.where(*within)).one()

    first, last = read(find_borders)
    if first is None:
        return
    place: Any = id >= first
    while True:
        page = query.where(place, id <= last).order_by(id).limit(PAGE_ROWS)
        made, rows, end = read(functools.partial(read_on, page=page))
        if made is not None:
            yield made
        if rows < PAGE_ROWS:
            return
        place = id > end[0]


def refund_pages(
    read: ExportReader, query: Select[Any], span: Span, filters: Filters, make: TableMaker[R]
) -> Iterator[R]:
    """Read the refunds of a span in pages by request and number, as ``charge_pages`` does receipts.

    The query joins receipts and refunds and has a column ``request_id``; the pages have their
    number, ``seq``, as well.
    """
    booked = [refunds.c.booked_at >= span.starts_at, refunds.c.booked_at < span.ends_at]
    if filters.account_ids is not None:
        booked.append(refunds.c.account_id.in_(filters.account_ids))
    within = read(lambda connection: refunded_within(connection, *booked))
    order = (refunds.c.request_id, refunds.c.seq)
    query = query.add_columns(refunds.c.seq).where(*booked, *within, *filter_conditions(filters))
    query = query.order_by(*order).limit(PAGE_ROWS)
    page = query
    while True:
        made, rows, end = read(functools.partial(_read_page, page=page, end=order, make=make))
        if made is not None:
            yield made
        if rows < PAGE_ROWS:
            return
        page = query.where(tuple_(*order) > end)


def _read_page(
    connection: Connection, *, page: Select[Any], end: tuple[Column[Any], ...], make: TableMaker[R]
) -> tuple[R | None, int, tuple[Any, ...]]:
    """Return what is made of a page, its number of rows, and the last values of ``end``."""
    table = read_table(connection, page)
    if table is None:
        return None, 0, ()
    last = tuple(table[column.name][-1].as_py() for column in end)
    return make(connection, table), table.num_rows, last


def look_up(
    connection: Connection,
    ids: pa.ChunkedArray,
    id: Column[int],
    name: Column[str],
    known: dict[int, str],
) -> pa.Array:
    """Return the name of each id. ``known`` has those of earlier pages; new ones are added to it.

    A join would cost each row as much as a third of its reading.
    """
    encoded = ids.combine_chunks().dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    if new := [each for each in distinct if each not in known]:
        known.update(connection.execute(select(id, name).where(id.in_(new))).all())
    names = pa.array([known[each] for each in distinct], pa.string())
    return names.take(encoded.indices)


def span_conditions(span: Span, filters: Filters) -> list[Any]:
    """Return SQL conditions for receipts that were booked in a span."""
    conditions: list[Any] = [
        receipts.c.settled_at >= span.starts_at,
        receipts.c.settled_at < span.ends_at,
    ]
    return conditions + filter_conditions(filters)


def filter_conditions(filters: Filters) -> list[Any]:
    """Return SQL conditions for receipts of the requested accounts, keys, models and tasks."""
    return [
        receipts.c[name].in_(values)
        for name in ("account_id", "key_id", "model", "task")
        if (values := getattr(filters, f"{name}s")) is not None
    ]
