"""Readiness: SQL accepts a write, the queue server answers, and the disks have room.

Probes can come from several places concurrently and must not load what they check. All of them
share one check, which runs at most once a second; probes await its result for a limited time. A
check that hangs is not started a second time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, func, select

from gateway import metrics
from gateway.aside import KINDS, count_notes
from gateway.disk import has_room, written_paths
from gateway.dispatch.health import QueueHealth
from gateway.settings import Settings
from gateway.sql.database import Database, upsert
from gateway.tables.core import chores

log = logging.getLogger(__name__)

CACHE_S: Final = 1.0
PATIENCE_S: Final = 2.0
ROW_NAME: Final = "readiness"
"""Row of ``chores`` that the check writes; no scheduled task has this name."""


class Readiness:
    def __init__(self, database: Database, watch: QueueHealth, settings: Settings) -> None:
        self._database = database
        self._watch = watch
        self._paths = written_paths(settings)
        self._reserve_bytes = settings.disk_reserve_bytes
        self._set_aside: Mapping[str, int] = {}
        self._checks = {"database": _Check(self._writes), "disk": _Check(self._has_room)}

    @property
    def set_aside(self) -> Mapping[str, int]:
        """Number of stored rows that were set aside at the last check, by kind."""
        return self._set_aside

    async def checks(self) -> Mapping[str, bool]:
        """Return which parts can serve; takes at most ``PATIENCE_S``."""
        names = tuple(self._checks)
        answers = await asyncio.gather(*(self._checks[name].answer() for name in names))
        return {**dict(zip(names, answers, strict=True)), "queue": self._watch.healthy}

    async def _writes(self) -> bool:
        found = await self._database.write(write_probe)
        self._set_aside = found.set_aside
        for kind in KINDS:
            metrics.SET_ASIDE.labels(kind).set(found.set_aside.get(kind, 0))
        metrics.CLOCK_SKEW_SECONDS.set(found.skew_s)
        return True

    async def _has_room(self) -> bool:
        return await asyncio.to_thread(
            lambda: all(has_room(path, self._reserve_bytes) for path in self._paths)
        )


class _Check:
    """One check, shared by all probes."""

    def __init__(self, check: Callable[[], Awaitable[bool]]) -> None:
        self._check = check
        self._running: asyncio.Task[bool] | None = None
        self._answer = False
        self._until = 0.0

    async def answer(self) -> bool:
        if time.monotonic() < self._until:
            return self._answer
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(self._running)
        except TimeoutError:
            return False

    async def _run(self) -> bool:
        try:
            self._answer = await self._check()
        except Exception as error:
            log.warning("not ready: %s", type(error).__name__)
            self._answer = False
        finally:
            self._until = time.monotonic() + CACHE_S
            self._running = None
        return self._answer


@dataclass(frozen=True, slots=True)
class ProbedState:
    """What a write of the readiness check found."""

    set_aside: Mapping[str, int]
    skew_s: float


def write_probe(connection: Connection) -> ProbedState:
    """Write a row; read the counts of rows set aside and the clock of the database."""
    now = datetime.now(UTC)
    row = upsert(connection, chores).values(name=ROW_NAME, due_at=now)
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_={"due_at": now}))
    skew_s = 0.0
    if connection.dialect.name == "postgresql":
        # SQLite uses the clock of this process, so there is no skew.
        theirs = connection.execute(select(func.clock_timestamp())).scalar_one()
        skew_s = (theirs - datetime.now(UTC)).total_seconds()
    return ProbedState(count_notes(connection), skew_s)
