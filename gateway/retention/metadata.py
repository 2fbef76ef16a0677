"""Clears the metadata of requests and batches; the rows themselves are kept.

Ids are ordered by time, so a kind remembers the last id that it has cleared and continues after it:
nothing is read twice. The position stays before the oldest row that is still open, because its
receipt will get an earlier id than later ones have.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    func,
    select,
    update,
)

from gateway.files.retention import Cleared
from gateway.ids import first_id, time_of
from gateway.retention.aged import COUNTED_MAX, move_position
from gateway.tables.batches import batches
from gateway.tables.core import holds, receipts
from gateway.tables.retention import retention

ROWS_MAX: Final = 2000
"""Rows looked at in one transaction; about 15 ms on SQLite if each of them has metadata."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A table whose rows have metadata."""

    kind: str
    prefix: str
    id: Column[str]
    first_open: Select[Any]
    """Selects the smallest id of the rows that have not ended."""

    def clear(self, connection: Connection, before: datetime, *, limit: int = ROWS_MAX) -> Cleared:
        """Clear metadata of some rows created before a moment."""
        # Read first: what is no longer open after this is visible to the next statement.
        end = first_id(self.prefix, before)
        end = min(end, connection.execute(self.first_open).scalar() or end)
        rows = self._rows_after(connection).where(self.id < end).limit(limit)
        ids = connection.execute(rows).scalars().all()
        if not ids:
            return Cleared(0, False)
        table = self.id.table
        cleared = connection.execute(
            update(table)
            .where(self.id >= ids[0], self.id <= ids[-1], table.c["metadata"].is_not(None))
            .values(metadata=None)
        )
        move_position(connection, self.kind, ids[-1])
        return Cleared(cleared.rowcount, len(ids) == limit)

    def first(self) -> ScalarSelect[Any]:
        """Select the oldest row that was not looked at, unless an older one is open."""
        rows = select(self.id).where(self.id > self._begin(), self.id <= self._first_open())
        return rows.order_by(self.id).limit(1).scalar_subquery()

    def due(self, before: datetime) -> ScalarSelect[int]:
        """Count metadata of rows created before a moment, among the ``COUNTED_MAX`` oldest that
        were not looked at."""
        end, data = first_id(self.prefix, before), self.id.table.c["metadata"]
        rows = (
            select(data)
            .where(self.id > self._begin(), self.id < end, self.id < self._first_open())
            .order_by(self.id)
            .limit(COUNTED_MAX)
            .subquery()
        )
        return select(func.count(rows.c["metadata"])).scalar_subquery()

    def moment(self, place: Any) -> datetime:
        return time_of(self.prefix, place)

    def _begin(self) -> ColumnElement[str]:
        position = select(retention.c.position).where(retention.c.kind == self.kind)
        return func.coalesce(position.scalar_subquery(), self.prefix)

    def _first_open(self) -> ColumnElement[str]:
        """Select the smallest id of the open rows, or one after all ids."""
        return func.coalesce(self.first_open.scalar_subquery(), f"{self.prefix}~")

    def _rows_after(self, connection: Connection) -> Select[Any]:
        position = connection.execute(
            select(retention.c.position).where(retention.c.kind == self.kind)
        ).scalar()
        return select(self.id).where(self.id > (position or self.prefix)).order_by(self.id)


REQUESTS: Final = Tagged(
    "request_metadata", "req_", receipts.c.request_id, select(func.min(holds.c.request_id))
)
BATCHES: Final = Tagged(
    "batch_metadata",
    "batch_",
    batches.c.id,
    select(func.min(batches.c.id)).where(batches.c.ended_at.is_(None)),
)
