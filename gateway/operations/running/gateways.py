"""Gateways: the row that each process writes every second, and the list of them.

A row expires ten seconds after its gateway has ended. Its counters are cumulative, so readers
compute rates from two rows of the same name. Writing it costs one query and one command a second,
on no request's path.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, cast

import msgspec
from prometheus_client import Counter
from redis.asyncio import Redis
from sqlalchemy import Connection, select

from gateway import metrics
from gateway.checks.moments import timestamp
from gateway.operations.running.server import QueueServer, moment
from gateway.requests.service import Requests
from gateway.sql.database import Database, schema_is_current
from gateway.sql.outages import QUEUE_OUTAGE, SQL_OUTAGE
from gateway.supervision import Beat, Supervisor, no_beat
from workers.contract.announcements import installed_version
from workers.contract.queue import LIVE_S

log = logging.getLogger(__name__)

WRITE_EVERY_S: Final = 1.0
ROW_S: Final = 10
"""Time after its last row for which a gateway counts as live."""
SCHEMA_EVERY_S: Final = 60.0


ServedPart: TypeAlias = Literal["gateway", "console"]
"""What a process serves; that of the console does no scheduled work and settles nothing."""


class TaskRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last run of a scheduled task in one process; without one, ``ended_ms`` is 0."""

    ended_ms: int = 0
    took_ms: int = 0
    failed: bool = False


class GatewayState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway process tells of itself."""

    name: str
    part: ServedPart = "gateway"
    host: str = ""
    process: int = 0
    version: str = ""
    started_ms: int = 0
    at_ms: int = 0
    accepted: int = 0
    refused: int = 0
    settled: int = 0
    failed: int = 0
    """Settled requests that failed or expired."""
    charged_nanos: int = 0
    waiting: int = 0
    """Requests whose clients wait at this process."""
    commits: int = 0
    committed: int = 0
    """Holds and settlements that were written in these commits."""
    database_us: int | None = None
    """Duration of its last query; None if the database did not answer."""
    queue_us: int | None = None
    schema_current: bool = True
    batches: int = 0
    """Batches that it runs."""
    late: Mapping[str, float] = {}
    """Loop → seconds since it completed a round, for loops that are late."""
    tasks: Mapping[str, TaskRun] = {}


class GatewayView(TypedDict):
    """A gateway process. Counters are since its start; ``commit_size`` is a mean."""

    object: Literal["gateway"]
    name: str
    part: ServedPart
    host: str
    process: int
    version: str
    started_at: str | None
    heard_at: str | None
    accepted: int
    refused: int
    settled: int
    failed: int
    waiting: int
    batches: int
    commit_size: float | None
    database_ms: float | None
    queue_ms: float | None
    schema: Literal["current", "behind"]
    late_loops: dict[str, float]


class TaskView(TypedDict):
    """A scheduled task, over all gateways. ``last_at`` is None if none of them has run it since it
    started."""

    object: Literal["task"]
    name: str
    next_at: str | None
    last_at: str | None
    took_s: float | None
    failed: bool
    gateway: str | None


class _Counted(NamedTuple):
    accepted: int
    refused: int
    settled: int
    failed: int
    charged_nanos: int


class Gateways:
    """The rows of all gateways, and the loop that writes this one's."""

    def __init__(self, redis: Redis, *, namespace: str) -> None:
        self._redis = redis
        self._index = f"{namespace}:{{gateways}}"
        self._decoder = msgspec.json.Decoder(GatewayState)

    async def write(self, state: GatewayState) -> None:
        """Write the row of a live gateway."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(self._key(state.name), msgspec.json.encode(state), ex=ROW_S)
            pipeline.sadd(self._index, state.name)
            pipeline.expire(self._index, LIVE_S)
            await pipeline.execute()

    async def remove(self, name: str) -> None:
        """Remove the row of a gateway that ends."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(self._key(name))
            pipeline.srem(self._index, name)
            await pipeline.execute()

    async def list(self) -> list[GatewayState]:
        """Return the rows of live gateways, the oldest process first."""
        members = cast("set[bytes]", await cast(Any, self._redis.smembers(self._index)))
        names = sorted(name.decode() for name in members)
        if not names:
            return []
        rows = await self._redis.mget([self._key(name) for name in names])
        ended = [name for name, row in zip(names, rows, strict=True) if row is None]
        if ended:
            await self._redis.srem(self._index, *ended)
        found = []
        for name, row in zip(names, rows, strict=True):
            try:
                if row is not None:
                    found.append(self._decoder.decode(row))
            except msgspec.DecodeError:
                log.warning("malformed row of gateway %s", name)
        return sorted(found, key=lambda each: (each.started_ms, each.name))

    def _key(self, name: str) -> str:
        return f"{self._index}:{name}"


class Reporter:
    """Writes the row of this process every second."""

    def __init__(
        self,
        gateways: Gateways,
        name: str,
        *,
        database: Database,
        requests: Requests,
        supervisor: Supervisor,
        batches: Callable[[], int],
        tasks: Callable[[], Mapping[str, TaskRun]],
        part: ServedPart,
    ) -> None:
        self._gateways = gateways
        self._name = name
        self._database = database
        self._requests = requests
        self._supervisor = supervisor
        self._batches = batches
        self._tasks = tasks
        self._part = part
        self._started_ms = _now_ms()
        self._queue_us: int | None = None
        self._schema_current = True
        self._schema_at = 0.0

    async def run(self, beat: Beat = no_beat) -> None:
        """Write the row every second until cancelled, then remove it."""
        try:
            while True:
                await self._write(await self._database_us())
                beat()
                await asyncio.sleep(WRITE_EVERY_S)
        finally:
            try:
                async with asyncio.timeout(WRITE_EVERY_S):
                    await self._gateways.remove(self._name)
            except QUEUE_OUTAGE as error:
                log.debug("could not remove the row of this gateway: %s", type(error).__name__)

    async def _write(self, database_us: int | None) -> None:
        started_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(ROW_S):
                await self._gateways.write(self._state(database_us))
        except QUEUE_OUTAGE as error:
            self._queue_us = None
            log.debug("could not write the row of this gateway: %s", type(error).__name__)
        else:
            self._queue_us = (time.monotonic_ns() - started_ns) // 1000

    async def _database_us(self) -> int | None:
        started_ns = time.monotonic_ns()
        try:
            await self._database.read(_probe)
            took_us = (time.monotonic_ns() - started_ns) // 1000
            if time.monotonic() - self._schema_at > SCHEMA_EVERY_S:
                self._schema_current = await asyncio.to_thread(
                    schema_is_current, self._database.engine
                )
                self._schema_at = time.monotonic()
        except SQL_OUTAGE:
            return None
        return took_us

    def _state(self, database_us: int | None) -> GatewayState:
        counted, (commits, committed) = _counted(), self._requests.ledger.committed
        return GatewayState(
            name=self._name,
            part=self._part,
            host=_host(),
            process=os.getpid(),
            version=installed_version(),
            started_ms=self._started_ms,
            at_ms=_now_ms(),
            **counted._asdict(),
            waiting=self._requests.waiting,
            commits=commits,
            committed=committed,
            database_us=database_us,
            queue_us=self._queue_us,
            schema_current=self._schema_current,
            batches=self._batches(),
            late=self._supervisor.late(),
            tasks=self._tasks(),
        )


async def list_gateways(server: QueueServer) -> list[GatewayView]:
    """Return the live gateway processes, the oldest first."""
    gateways = Gateways(server.redis, namespace=server.namespace)
    return [gateway_view(state) for state in await gateways.list()]


def gateway_view(state: GatewayState) -> GatewayView:
    return {
        "object": "gateway",
        "name": state.name,
        "part": state.part,
        "host": state.host,
        "process": state.process,
        "version": state.version,
        "started_at": moment(state.started_ms),
        "heard_at": moment(state.at_ms),
        "accepted": state.accepted,
        "refused": state.refused,
        "settled": state.settled,
        "failed": state.failed,
        "waiting": state.waiting,
        "batches": state.batches,
        "commit_size": round(state.committed / state.commits, 2) if state.commits else None,
        "database_ms": _milliseconds(state.database_us),
        "queue_ms": _milliseconds(state.queue_us),
        "schema": "current" if state.schema_current else "behind",
        "late_loops": dict(state.late),
    }


def list_tasks(states: Sequence[GatewayState], due: Mapping[str, datetime]) -> list[TaskView]:
    """Return the scheduled tasks of all gateways, the one that is due next first. ``due``: when
    each is due."""
    last: dict[str, tuple[TaskRun, str | None]] = {}
    for state in states:
        for name, run in state.tasks.items():
            known = last.get(name)
            if known is None or run.ended_ms > known[0].ended_ms:
                last[name] = (run, state.name if run.ended_ms else None)
    views: list[TaskView] = [
        {
            "object": "task",
            "name": name,
            "next_at": timestamp(due[name]) if name in due else None,
            "last_at": moment(run.ended_ms),
            "took_s": run.took_ms / 1000 if run.ended_ms else None,
            "failed": run.failed,
            "gateway": gateway,
        }
        for name, (run, gateway) in last.items()
    ]
    return sorted(views, key=lambda view: (view["next_at"] or "", view["name"]))


def _probe(connection: Connection) -> None:
    connection.execute(select(1)).scalar()


def _counted() -> _Counted:
    """Sum the counters of this process over their labels."""
    settled = failed = 0
    for labels, value in _samples(metrics.SETTLED):
        settled += value
        failed += value if labels["status"] in ("failed", "expired") else 0
    return _Counted(
        accepted=sum(value for _, value in _samples(metrics.ACCEPTED)),
        refused=sum(value for _, value in _samples(metrics.REFUSED)),
        settled=settled,
        failed=failed,
        charged_nanos=sum(value for _, value in _samples(metrics.CHARGED_NANOS)),
    )


def _samples(counter: Counter) -> list[tuple[Mapping[str, str], int]]:
    return [
        (sample.labels, int(sample.value))
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    ]


def _milliseconds(us: int | None) -> float | None:
    return None if us is None else round(us / 1000, 2)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@functools.cache
def _host() -> str:
    return socket.gethostname()
