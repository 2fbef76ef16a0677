"""Deletes the sums of a budget's windows that have ended long ago.

The moment up to which windows were deleted is stored with them, so that the proof of the books does
not miss them. The only window of a budget in total stays, and so does one with open requests.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import Connection, delete, select

from gateway.checks.moments import microseconds_of, moment_of
from gateway.retention.aged import Aged, move_position
from gateway.tables.core import budget_windows

WINDOWS: Final = "budget_windows"
"""Name of the kind."""
ENDED: Final = (budget_windows.c.starts_us > 0, budget_windows.c.held_nanos == 0)
AGED: Final = Aged(budget_windows.c.starts_us, ENDED, microseconds_of, moment_of)
"""Windows that can be deleted, by when they began."""


def delete_old_windows(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete windows that began before a moment and have no open requests; return their number."""
    table, end = budget_windows.c, microseconds_of(before)
    old = select(table.budget_id, table.starts_us).where(*ENDED, table.starts_us < end)
    # Under their locks, so that no request is accepted into one meanwhile.
    rows = old.order_by(table.starts_us).limit(limit).with_for_update()
    places = [tuple(row) for row in connection.execute(rows)]
    if not places:
        return 0
    move_position(connection, WINDOWS, str(max(start for _, start in places)))
    # Not by pairs, for which SQLite uses no index.
    for start in {start for _, start in places}:
        ids = [budget_id for budget_id, starts_us in places if starts_us == start]
        connection.execute(
            delete(budget_windows).where(table.starts_us == start, table.budget_id.in_(ids))
        )
    return len(places)
