"""The filter of a list of requests, as SQL conditions of which one index serves the first. Pure.

A list reads an index in the order of its ids: that of unsuccessful requests, of an account, or of a
model. All other conditions are searched along it, and spelled so that a database that estimates
badly cannot take another index, which has no such order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy import BigInteger, ColumnElement, FromClause, literal_column

from gateway.ids import first_request_id
from gateway.tables.core import receipts

OPEN_STATES: Final = ("queued", "running")
OPEN: Final = "open"
"""In place of a status: every request that has not ended."""
UNSUCCESSFUL: Final = ("failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Filter of a list of requests; None matches all. Times are times of acceptance."""

    account_id: int | None
    model: str | None = None
    status: str | None = None
    task: str | None = None
    tasks: Collection[str] = ()
    """Tasks of which any matches; empty matches all."""
    key_id: int | None = None
    outcome: str | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    cost_min_nanos: int | None = None
    """Least charge."""
    cost_max_nanos: int | None = None
    """Greatest charge; free requests match."""
    took_min_us: int | None = None
    """Least time from acceptance to the end."""
    reason: str | None = None
    """Why it ended, such as ``worker_lost``."""

    @property
    def open(self) -> bool:
        ends = (self.outcome, *self._ends)
        return self.status in (None, OPEN, *OPEN_STATES) and all(each is None for each in ends)

    @property
    def closed(self) -> bool:
        return self.status not in (OPEN, *OPEN_STATES)

    @property
    def searched(self) -> bool:
        """Whether receipts are scanned that do not match, because no index covers the filter."""
        unlike = (self.task, self.key_id, self.outcome, *self._ends)
        return (
            any(value is not None for value in unlike)
            or bool(self.tasks)
            or bool(self.tags)
            or self.status == "succeeded"
            or (self.model is not None and not self._by_model)
        )

    def conditions(self, table: FromClause) -> list[ColumnElement[bool]]:
        """Return the conditions on holds or receipts that the table's columns allow."""
        found = self.places(table)
        if self.model is not None and not self._by_model:
            found.append(table.c.model.concat("") == self.model)
        if self.key_id is not None:
            found.append(table.c.key_id + 0 == self.key_id)
        if self.status == "succeeded" and "status" in table.c:
            found.append(table.c.status == self.status)
        for name in ("task", "outcome"):
            value = getattr(self, name)
            if value is not None and name in table.c:
                found.append(table.c[name] == value)
        if self.tasks:
            found.append(table.c.task.in_(self.tasks))
        for tag, wanted in self.tags.items():
            found.append(table.c["metadata"][tag].as_string() == wanted)
        if table is receipts:
            if self.cost_min_nanos is not None:
                found.append(receipts.c.charge_nanos >= self.cost_min_nanos)
            if self.cost_max_nanos is not None:
                found.append(receipts.c.charge_nanos <= self.cost_max_nanos)
            if self.took_min_us is not None:
                took = receipts.c.timings["total_us"].as_string().cast(BigInteger)
                found.append(took >= self.took_min_us)
            if self.reason is not None:
                found.append(receipts.c.reason == self.reason)
        return found

    def places(self, table: FromClause) -> list[ColumnElement[bool]]:
        """Return the conditions that an index covers in the order of the list."""
        found = self.span(table)
        if table is receipts and self.status in UNSUCCESSFUL:
            # Spelled like the partial indexes of unsuccessful receipts, so that one is used.
            found.append(table.c.status != literal_column("'succeeded'"))
            found.append(table.c.status == self.status)
        if self._by_model:
            found.append(table.c.model == self.model)
        return found

    def span(self, table: FromClause) -> list[ColumnElement[bool]]:
        """Return the conditions on account and time, which both tables have an index for."""
        found = []
        if self.account_id is not None:
            found.append(table.c.account_id == self.account_id)
        # By the time in the id, by which the list is ordered.
        if self.starts_at is not None:
            found.append(table.c.request_id >= first_request_id(self.starts_at))
        if self.ends_at is not None:
            found.append(table.c.request_id < first_request_id(self.ends_at))
        return found

    @property
    def _ends(self) -> tuple[int | str | None, ...]:
        """Conditions on what only ended requests have."""
        return self.cost_min_nanos, self.cost_max_nanos, self.took_min_us, self.reason

    @property
    def _by_model(self) -> bool:
        """Whether the list reads the index of its model."""
        others = self.account_id is not None or self.status in UNSUCCESSFUL
        return self.model is not None and not others
