"""Faults: each breaks something for a while and reports it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final, TypeAlias

import redis.asyncio as redis

from tests.soak.ground import Ground, Process

Fault: TypeAlias = Callable[[Ground, random.Random], Awaitable[None]]

PAUSE_S: Final = 6.0
"""Mean time from one fault to the next."""


async def kill_gateway(ground: Ground, chance: random.Random) -> None:
    chance.choice(ground.gateways).send(signal.SIGKILL)


async def end_gateway(ground: Ground, chance: random.Random) -> None:
    chance.choice(ground.gateways).send(signal.SIGTERM)


async def stop_gateway(ground: Ground, chance: random.Random) -> None:
    await _hold(chance.choice(ground.gateways), chance.uniform(2, 15))


async def kill_worker(ground: Ground, chance: random.Random) -> None:
    _worker(ground, chance).send(signal.SIGKILL)


async def drain_worker(ground: Ground, chance: random.Random) -> None:
    _worker(ground, chance).send(signal.SIGTERM)


async def stop_worker(ground: Ground, chance: random.Random) -> None:
    await _hold(_worker(ground, chance), chance.uniform(2, 25))


async def kill_engine(ground: Ground, chance: random.Random) -> None:
    for child in _worker(ground, chance).children()[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def kill_queue(ground: Ground, chance: random.Random) -> None:
    ground.queue.send(signal.SIGKILL)
    ground.wipes.append(datetime.now(UTC))


async def stop_queue(ground: Ground, chance: random.Random) -> None:
    await _hold(ground.queue, chance.uniform(2, 12))


async def wipe_queue(ground: Ground, chance: random.Random) -> None:
    client = redis.Redis(unix_socket_path=str(ground.queue_socket), socket_timeout=5)
    try:
        await client.flushall()
        ground.wipes.append(datetime.now(UTC))
    finally:
        await client.aclose()


async def cut_off_queue(ground: Ground, chance: random.Random) -> None:
    assert ground.queue_network is not None
    ground.queue_network.go_silent()
    await asyncio.sleep(chance.uniform(2, 12))
    ground.queue_network.mend()


async def cut_off_database(ground: Ground, chance: random.Random) -> None:
    assert ground.sql_network is not None
    ground.sql_network.go_silent()
    await asyncio.sleep(chance.uniform(2, 15))
    ground.sql_network.mend()


async def crash_database(ground: Ground, chance: random.Random) -> None:
    assert ground.postgres is not None
    async with ground.database_crash:
        await asyncio.to_thread(ground.postgres.stop)
        try:
            await asyncio.sleep(chance.uniform(0, 4))
        finally:
            await asyncio.to_thread(ground.postgres.start)


async def lock_database(ground: Ground, chance: random.Random) -> None:
    """Another program holds SQLite's only write lock."""
    path = ground.directory / "tollgate.db"
    seconds = chance.uniform(1, 9)

    def hold() -> None:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5)
        try:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")
        finally:
            connection.close()

    with contextlib.suppress(sqlite3.OperationalError):
        await asyncio.to_thread(hold)


ALWAYS: Final[dict[Fault, int]] = {
    kill_gateway: 4,
    end_gateway: 1,
    stop_gateway: 2,
    kill_worker: 4,
    drain_worker: 2,
    stop_worker: 2,
    kill_engine: 4,
    kill_queue: 2,
    stop_queue: 2,
    wipe_queue: 3,
    cut_off_queue: 2,
}
OF_DATABASE: Final[dict[str, dict[Fault, int]]] = {
    "postgresql": {cut_off_database: 3, crash_database: 3},
    "sqlite": {lock_database: 3},
}


async def break_things(ground: Ground, chance: random.Random, done: Counter[str]) -> None:
    """Break one thing after the other, sometimes several at a time, until cancelled."""
    faults = ALWAYS | OF_DATABASE[ground.kind]
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(chance.expovariate(1 / PAUSE_S))
            fault = chance.choices(list(faults), list(faults.values()))[0]
            done[fault.__name__] += 1
            group.create_task(_quietly(fault, ground, chance))


async def _quietly(fault: Fault, ground: Ground, chance: random.Random) -> None:
    """A fault may find its victim gone already."""
    with contextlib.suppress(redis.RedisError, OSError):
        await fault(ground, chance)


async def _hold(process: Process, seconds: float) -> None:
    process.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        process.send(signal.SIGCONT)


def _worker(ground: Ground, chance: random.Random) -> Process:
    """Mostly one that starts fast: the other's models take longer to load than faults pause."""
    return chance.choices(
        ground.workers, [1 if "heavy" in each.name else 4 for each in ground.workers]
    )[0]
