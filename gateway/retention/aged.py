"""Rows by the moment from which they are kept: when the oldest one began, and how many are due.

The questions of all kinds are subqueries, so that one statement asks for every kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from sqlalchemy import Column, ColumnElement, Connection, ScalarSelect, func, select

from gateway.sql.database import upsert
from gateway.tables.retention import retention

COUNTED_MAX: Final = 10_000
"""Rows of a kind that are counted; there can be more."""


class Ageing(Protocol):
    """Rows of a kind that become due."""

    def first(self) -> ScalarSelect[Any]:
        """Select the place of the oldest row."""

    def due(self, before: datetime) -> ScalarSelect[int]:
        """Count the rows that began before a moment, at most ``COUNTED_MAX``."""

    def moment(self, place: Any) -> datetime:
        """Return when the row at a place began."""


def _same(moment: datetime) -> datetime:
    return moment


@dataclass(frozen=True, slots=True)
class Aged:
    """Rows by an indexed column: of moments, or of places that stand for moments."""

    column: Column[Any]
    among: tuple[ColumnElement[bool], ...] = ()
    place_at: Callable[[datetime], Any] = _same
    """Returns the first place of a moment."""
    moment: Callable[[Any], datetime] = _same

    def first(self) -> ScalarSelect[Any]:
        oldest = select(self.column).where(self.column.is_not(None), *self.among)
        return oldest.order_by(self.column).limit(1).scalar_subquery()

    def due(self, before: datetime) -> ScalarSelect[int]:
        end = self.place_at(before)
        due = select(self.column).where(self.column < end, *self.among).limit(COUNTED_MAX)
        return select(func.count()).select_from(due.subquery()).scalar_subquery()


def move_position(connection: Connection, kind: str, position: str) -> None:
    """Store up to where the rows of a kind were cleared."""
    moved = upsert(connection, retention).values(kind=kind, position=position)
    connection.execute(
        moved.on_conflict_do_update(index_elements=["kind"], set_={"position": position})
    )
