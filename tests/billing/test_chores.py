"""Chores are done when they are due, by one gateway."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from gateway.scheduled import ScheduledTask, Scheduler, take
from gateway.sql.database import Database

NOON = datetime(2026, 3, 1, 12, 0, 1, tzinfo=UTC)


async def nothing() -> None:
    pass


def test_a_chore_is_taken_once_when_it_is_due(database: Database) -> None:
    chore = ScheduledTask("tidy", timedelta(hours=1), nothing, delay=timedelta(seconds=30))

    with database.transaction() as connection:
        assert take(connection, chore, NOON)
        assert not take(connection, chore, NOON + timedelta(seconds=28))
        assert take(connection, chore, NOON + timedelta(seconds=29))
        assert not take(connection, chore, NOON + timedelta(minutes=60))
        assert take(connection, chore, NOON + timedelta(minutes=60, seconds=29))


def test_after_a_long_pause_it_is_done_once_and_not_as_often_as_was_missed(
    database: Database,
) -> None:
    chore = ScheduledTask("tidy", timedelta(minutes=1), nothing)

    with database.transaction() as connection:
        take(connection, chore, NOON)
        assert take(connection, chore, NOON + timedelta(days=3))
        assert not take(connection, chore, NOON + timedelta(days=3, seconds=5))


async def test_of_many_gateways_one_does_it(database: Database) -> None:
    done = []

    async def work() -> None:
        done.append(1)

    chore = ScheduledTask("tidy", timedelta(days=1), work)
    tasks = [asyncio.create_task(Scheduler(database, [chore]).run()) for _ in range(5)]
    async with asyncio.timeout(30):
        while not done:  # noqa: ASYNC110  # any of them may be first
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()

    assert done == [1]


async def test_one_that_fails_does_not_keep_others_from_being_done(database: Database) -> None:
    done = asyncio.Event()

    async def fail() -> None:
        raise RuntimeError("as planned")

    async def work() -> None:
        done.set()

    chores = Scheduler(
        database,
        [
            ScheduledTask("bad", timedelta(days=1), fail),
            ScheduledTask("good", timedelta(days=1), work),
        ],
    )
    task = asyncio.create_task(chores.run())

    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()
