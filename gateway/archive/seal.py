"""The seal of a closed month: the digest of its receipts and transfers, wherever they are stored.

The same rows give the same digest, whether they are read from the database or from an archive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, Row, Table, func, select

from gateway.ledger.periods import span_of
from gateway.sql.database import microseconds
from gateway.sql.partitions import is_partitioned
from gateway.tables.core import receipts, transfers
from gateway.tables.settlement_time import receipt_ids_of, transfer_ids_of

PAGE: Final = 5000
"""Rows of one snapshot."""

_NOT_SEALED: Final = (
    *("metadata", "timings", "error", "windows", "attributes"),
    # For the operator; months were sealed before these columns existed.
    *("run", "expense_nanos"),
)


def sealed_columns(table: Table) -> list[Column[Any]]:
    """Return the columns of receipts or transfers that the digest covers, in its order."""
    return [column for column in table.c if column.name not in _NOT_SEALED]


def digest_columns(table: Table) -> list[ColumnElement[Any]]:
    """Return the same columns as ``SealDigest`` takes them."""
    return [
        microseconds(column) if column.name.endswith("_at") else column
        for column in sealed_columns(table)
    ]


class SealDigest:
    """Computes a seal from rows: first all receipts by request id, then all transfers by id."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of ``sealed_columns``, with moments in microseconds since 1970."""
        for row in rows:
            self._digest.update(msgspec.json.encode(tuple(row)) + b"\n")

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def seal_of_month(connection: Connection, month: str) -> str:
    """Compute the digest of all receipts and transfers of a month that is in the database."""
    digest = SealDigest()
    for table in (receipts, transfers):
        for rows in month_pages(lambda: nullcontext(connection), table, month):
            digest.add(rows)
    return digest.sha256


def month_pages(
    open: Callable[[], AbstractContextManager[Connection]],
    table: Table,
    month: str,
    columns: Sequence[ColumnElement[Any]] | None = None,
    *,
    page: int = PAGE,
    bounded: bool = True,
) -> Iterator[Sequence[Row[Any]]]:
    """Read the receipts that were settled in a month, or the transfers that were booked in it, in
    pages by their id, each on a separate snapshot.

    A page is one of ids, some of which can be of other months. Unless ``bounded``, SQLite reads all
    ids, so that a row is found whatever its id.
    """
    span, selected = span_of(month), digest_columns(table) if columns is None else columns
    id: Column[Any] = receipts.c.request_id if table is receipts else transfers.c.id
    moment = receipts.c.settled_at if table is receipts else transfers.c.booked_at
    of_month = receipt_ids_of if table is receipts else transfer_ids_of
    after: Any = "" if table is receipts else 0
    count = page
    while count == page:
        with open() as connection:
            ids = of_month(connection, span) if bounded or is_partitioned(connection) else []
            candidates = select(id.label("id")).where(id > after, *ids).order_by(id).limit(page)
            found = candidates.subquery()
            count, last = connection.execute(select(func.count(), func.max(found.c.id))).one()
            rows: Sequence[Row[Any]] = []
            if count:
                query = select(*selected).where(
                    id > after, id <= last, moment >= span.starts_at, moment < span.ends_at, *ids
                )
                rows = connection.execute(query.order_by(id)).all()
        after = last
        if rows:
            yield rows
