"""Scheduled tasks run when they are due, each on one gateway."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from gateway.scheduled import ScheduledTask, Scheduler, claim
from gateway.sql.database import Database

NOON = datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)


async def nothing() -> None:
    pass


def test_due_task_is_claimed_once(database: Database) -> None:
    task = ScheduledTask("tidy", timedelta(hours=1), nothing, delay=timedelta(seconds=30))

    with database.transaction() as connection:
        assert claim(connection, task, NOON)
        assert not claim(connection, task, NOON + timedelta(seconds=28))
        assert claim(connection, task, NOON + timedelta(seconds=29))
        assert not claim(connection, task, NOON + timedelta(minutes=60))
        assert claim(connection, task, NOON + timedelta(minutes=60, seconds=29))


def test_task_runs_once_after_a_pause_of_several_intervals(database: Database) -> None:
    task = ScheduledTask("tidy", timedelta(minutes=1), nothing)

    with database.transaction() as connection:
        claim(connection, task, NOON)
        assert claim(connection, task, NOON + timedelta(days=3))
        assert not claim(connection, task, NOON + timedelta(days=3, seconds=5))


async def test_task_runs_on_one_of_several_gateways(database: Database) -> None:
    done = []

    async def work() -> None:
        done.append(1)

    task = ScheduledTask("tidy", timedelta(days=1), work)
    gateways = [asyncio.create_task(Scheduler(database, [task]).run()) for _ in range(5)]
    async with asyncio.timeout(30):
        while not done:  # noqa: ASYNC110  # any of them may be first
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    for gateway in gateways:
        gateway.cancel()

    assert done == [1]


async def test_failing_task_does_not_stop_the_others(database: Database) -> None:
    done = asyncio.Event()

    async def fail() -> None:
        raise RuntimeError("as planned")

    async def work() -> None:
        done.set()

    scheduler = Scheduler(
        database,
        [
            ScheduledTask("bad", timedelta(days=1), fail),
            ScheduledTask("good", timedelta(days=1), work),
        ],
    )
    running = asyncio.create_task(scheduler.run())

    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
