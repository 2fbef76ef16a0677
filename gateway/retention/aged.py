"""Rows by the moment from which they are kept: when the oldest one began, and how many are due.

The questions of all kinds are subqueries, so that one statement asks for every kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from sqlalchemy import Column, ColumnElement, ScalarSelect, func, select

from gateway.ids import first_id, time_of

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


@dataclass(frozen=True, slots=True)
class Aged:
    """Rows by an indexed column: a moment or, with a ``prefix``, an id that has it."""

    column: Column[Any]
    among: tuple[ColumnElement[bool], ...] = ()
    prefix: str = ""

    def first(self) -> ScalarSelect[Any]:
        oldest = select(self.column).where(self.column.is_not(None), *self.among)
        return oldest.order_by(self.column).limit(1).scalar_subquery()

    def due(self, before: datetime) -> ScalarSelect[int]:
        end = first_id(self.prefix, before) if self.prefix else before
        due = select(self.column).where(self.column < end, *self.among).limit(COUNTED_MAX)
        return select(func.count()).select_from(due.subquery()).scalar_subquery()

    def moment(self, place: Any) -> datetime:
        found: datetime = time_of(self.prefix, place) if self.prefix else place
        return found
