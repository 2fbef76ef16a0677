"""The seal of a closed month: the digest of its receipts and transfers, wherever they are stored.

The same rows give the same digest, whether they are read from the database or from an archive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, Table, select

from gateway.ledger.periods import span_of
from gateway.sql.database import microseconds
from gateway.tables.core import receipts, transfers
from gateway.tables.settlement_time import settled_within

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
    span = span_of(month)
    booked_at = transfers.c.booked_at
    for table, conditions, order in (
        (receipts, settled_within(connection, *span), receipts.c.request_id),
        (transfers, [booked_at >= span.starts_at, booked_at < span.ends_at], transfers.c.id),
    ):
        query = select(*digest_columns(table)).where(*conditions).order_by(order)
        digest.add(connection.execute(query, execution_options={"yield_per": 5000}))
    return digest.sha256
