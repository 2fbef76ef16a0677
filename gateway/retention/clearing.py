"""Clears what is due, in one process at a time, under a lease in SQL.

Every gateway measures how far each kind is behind, and reports it as a metric. If anything is due,
the gateway that acquires the lease clears it: one batch of each kind in turn, so that a kind with
much to clear delays no other. A gateway that crashes loses the lease after ``LEASE_S``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, select

from gateway import metrics
from gateway.aside import describe
from gateway.leases import Lease
from gateway.retention.kinds import AT_ONCE, Kind
from gateway.sql.database import Database, upsert
from gateway.sql.outages import OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.tables.retention import retention

log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
BEAT_S: Final = 5.0
LEASE_S: Final = 60.0
"""Longer than any batch; a holder that is paused for longer does no harm."""


@dataclass(frozen=True, slots=True)
class State:
    """State of a kind. ``due_at``: since or from when its oldest row is due."""

    kind: Kind
    due_at: datetime | None
    cleared: int
    cleared_at: datetime | None

    def lag(self, now: datetime) -> timedelta:
        """Return how long its oldest row has been due."""
        return max(now - self.due_at, AT_ONCE) if self.due_at is not None else AT_ONCE


class Retention:
    def __init__(self, database: Database, kinds: Sequence[Kind]) -> None:
        self._database = database
        self._kinds = kinds
        self._lease = Lease(database, "retention", held_s=LEASE_S)

    async def run(self, beat: Beat = no_beat) -> None:
        """Clear what is due every minute, until cancelled."""
        next_at = 0.0
        while True:
            if time.monotonic() >= next_at:
                next_at = time.monotonic() + EVERY_S
                try:
                    await self.clear_due(beat)
                except OUTAGE as error:
                    log.warning("retention is put off: %s", type(error).__name__)
            beat()
            await asyncio.sleep(BEAT_S)

    async def clear_due(self, beat: Beat = no_beat) -> Mapping[str, int] | None:
        """Clear everything that is due; return the number of rows by kind.

        None if another process is clearing.
        """
        now = datetime.now(UTC)
        states = await self._database.report(self.measure, account_id=None)
        for state in states:
            metrics.RETENTION_LAG_SECONDS.labels(state.kind.name).set(
                state.lag(now).total_seconds()
            )
        due = [state.kind for state in states if state.due_at is not None and state.due_at <= now]
        if not due:
            return {}
        if not await self._lease.acquire():
            return None
        try:
            return await self._clear(due, beat)
        finally:
            async with asyncio.timeout(1):
                await self._lease.release()

    def measure(self, connection: Connection) -> list[State]:
        """Return the state of every kind."""
        rows = {row.kind: row for row in connection.execute(select(retention))}
        ageing = {each.name: each for each in self._kinds if each.rows and each.kept is not None}
        firsts = (each.rows.first().label(name) for name, each in ageing.items() if each.rows)
        oldest = connection.execute(select(*firsts)).mappings().one()
        states = []
        for kind in self._kinds:
            row, place = rows.get(kind.name), oldest.get(kind.name)
            cleared, at = (row.cleared, row.cleared_at) if row is not None else (0, None)
            due_at = None
            if kind.rows is not None and place is not None:
                due_at = kind.due_at(kind.rows.moment(place))
            states.append(State(kind, due_at, cleared, at))
        return states

    def count_due(self, connection: Connection, now: datetime) -> Mapping[str, int]:
        """Return how many rows of each kind the next run would clear, at most ``COUNTED_MAX``."""
        counts = (
            each.rows.due(each.due_before(now)).label(each.name)
            for each in self._kinds
            if each.rows is not None and each.kept is not None
        )
        return dict(connection.execute(select(*counts)).mappings().one())

    async def _clear(self, due: Sequence[Kind], beat: Beat) -> Mapping[str, int]:
        cleared: Counter[str] = Counter()
        left = list(due)
        while left and await self._lease.renew_if_needed():
            for kind in list(left):
                try:
                    done = await kind.clear()
                except Exception as error:  # a boundary: one kind must not stop the others
                    unknown = None if isinstance(error, OUTAGE) else error
                    log.error(
                        "could not clear %s: %s", kind.name, describe(error), exc_info=unknown
                    )
                    metrics.RETENTION_FAILURES.labels(kind.name).inc()
                    left.remove(kind)
                    continue
                if not done.more:
                    left.remove(kind)
                if done.rows:
                    cleared[kind.name] += done.rows
                    metrics.RETENTION_CLEARED.labels(kind.name).inc(done.rows)
                beat()
        if cleared:
            log.info("cleared %s", ", ".join(f"{n} {name}" for name, n in cleared.items()))
            await self._database.write(lambda connection: _count(connection, cleared))
        return cleared


def _count(connection: Connection, cleared: Mapping[str, int]) -> None:
    now = datetime.now(UTC)
    for kind, rows in cleared.items():
        made = upsert(connection, retention).values(kind=kind, cleared=rows, cleared_at=now)
        counted = {"cleared": retention.c.cleared + rows, "cleared_at": now}
        connection.execute(made.on_conflict_do_update(index_elements=["kind"], set_=counted))
