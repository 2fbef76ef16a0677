"""Deletes the sums of a budget's windows that have ended long ago.

The moment up to which windows were deleted is stored with them, so that the proof of the books does
not miss them. The only window of a budget in total stays, and so does one with open requests.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, ScalarSelect, delete, func, select

from gateway.checks.moments import microseconds_of, moment_of
from gateway.retention.aged import COUNTED_MAX
from gateway.sql.database import upsert
from gateway.tables.core import budget_windows
from gateway.tables.retention import retention

WINDOWS: Final = "budget_windows"
"""Name of the kind."""


def delete_old_windows(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete windows that began before a moment and have no open requests; return their number."""
    table, end = budget_windows.c, microseconds_of(before)
    ended = (table.starts_us > 0, table.starts_us < end, table.held_nanos == 0)
    old = select(table.budget_id, table.starts_us).where(*ended)
    # Under their locks, so that no request is accepted into one meanwhile.
    rows = old.order_by(table.starts_us).limit(limit).with_for_update()
    places = [tuple(row) for row in connection.execute(rows)]
    if not places:
        return 0
    position = str(max(start for _, start in places))
    moved = upsert(connection, retention).values(kind=WINDOWS, position=position)
    connection.execute(
        moved.on_conflict_do_update(index_elements=["kind"], set_={"position": position})
    )
    # Not by pairs, for which SQLite uses no index.
    for start in {start for _, start in places}:
        ids = [budget_id for budget_id, starts_us in places if starts_us == start]
        connection.execute(
            delete(budget_windows).where(table.starts_us == start, table.budget_id.in_(ids))
        )
    return len(places)


class Windows:
    """Windows that can be deleted, by when they began."""

    _ended = (budget_windows.c.starts_us > 0, budget_windows.c.held_nanos == 0)

    def first(self) -> ScalarSelect[Any]:
        starts_us = budget_windows.c.starts_us
        oldest = select(starts_us).where(*self._ended).order_by(starts_us)
        return oldest.limit(1).scalar_subquery()

    def due(self, before: datetime) -> ScalarSelect[int]:
        starts_us = budget_windows.c.starts_us
        due = select(starts_us).where(*self._ended, starts_us < microseconds_of(before))
        counted = due.limit(COUNTED_MAX).subquery()
        return select(func.count()).select_from(counted).scalar_subquery()

    def moment(self, place: Any) -> datetime:
        return moment_of(place)
