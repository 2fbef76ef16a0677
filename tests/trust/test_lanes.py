"""Requests share no connections with reports, and no account can occupy all reports."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Connection, text

from gateway.errors import TooManyRequests
from gateway.sql import lanes
from gateway.sql.database import (
    REPORTS_PER_ACCOUNT,
    REPORTS_WAITING,
    Database,
    DatabaseTimeout,
    open_engine,
)
from gateway.sql.lanes import REPORT, SLOW
from gateway.sql.outages import SQL_OUTAGE

ENDLESS = """
    WITH RECURSIVE counted (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted)
    SELECT count(*) FROM counted
"""


class Gate:
    """A report that runs until it is let go."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self, connection: Connection) -> int:
        self.begun.release()
        self.opened.wait(timeout=30)
        return one(connection)

    async def wait_for(self, count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(self.begun.acquire, timeout=10)


def one(connection: Connection) -> int:
    return int(connection.execute(text("SELECT 1")).scalar_one())


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


async def test_authentication_and_holds_go_on_while_reports_take_all_they_can(
    database: Database, gate: Gate
) -> None:
    reports = [
        asyncio.create_task(database.report(gate, account_id=account))
        for account in range(REPORT.threads * 2)
    ]
    slow = [asyncio.create_task(database.slow(gate)) for _ in range(SLOW.threads * 2)]
    await gate.wait_for(REPORT.threads + SLOW.threads)

    assert await database.read(one) == 1
    assert await database.write(one) == 1

    gate.opened.set()
    assert await asyncio.gather(*reports, *slow) == [1] * len([*reports, *slow])
    await database.close()


async def test_one_account_cannot_take_the_reports_of_the_others(
    database: Database, gate: Gate
) -> None:
    most = REPORTS_PER_ACCOUNT + REPORTS_WAITING
    greedy = [asyncio.create_task(database.report(gate, account_id=1)) for _ in range(most)]
    await gate.wait_for(REPORTS_PER_ACCOUNT)

    assert await database.report(one, account_id=2) == 1
    with pytest.raises(TooManyRequests) as refused:
        await database.report(one, account_id=1)

    assert refused.value.code == "too_many_reports"
    assert refused.value.retry_after_s
    gate.opened.set()
    await asyncio.gather(*greedy)
    assert await database.report(one, account_id=1) == 1
    await database.close()


async def test_long_reports_leave_threads_for_closing_and_reconciliation(
    database: Database, gate: Gate
) -> None:
    reports = [
        asyncio.create_task(database.long_report(gate, account_id=account)) for account in range(9)
    ]
    await gate.wait_for(1)

    assert await asyncio.gather(*(database.slow(one) for _ in range(8))) == [1] * 8

    gate.opened.set()
    await asyncio.gather(*reports)
    await database.close()


def test_statement_ends_when_its_time_is_up(database_url: str) -> None:
    engine = open_engine(database_url, lane=replace(REPORT, statement_s=0.3))

    with pytest.raises(SQL_OUTAGE), engine.begin() as connection:
        connection.execute(text(ENDLESS))

    # The connection is as good as before.
    with engine.begin() as connection:
        assert one(connection) == 1
    engine.dispose()


async def test_caller_is_answered_although_the_transaction_is_not(
    database_url: str, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr("gateway.sql.database.READ", replace(lanes.READ, threads=1, patience_s=0.3))
    database = Database(database_url)
    ran = []

    stuck = asyncio.create_task(database.read(gate))
    await gate.wait_for(1)
    with pytest.raises(DatabaseTimeout):
        await database.read(lambda connection: ran.append(one(connection)))
    with pytest.raises(DatabaseTimeout):
        await stuck

    gate.opened.set()
    assert await database.read(one) == 1
    assert ran == [], "what had not begun when its caller left was run"
    await database.close()


async def test_writes_that_follow_one_another_share_a_connection(database: Database) -> None:
    def connected(connection: Connection) -> int:
        return id(connection.connection.driver_connection)

    used = {await database.write(connected, durable=durable) for durable in (True, False, True)}
    await database.read(one)
    used.add(await database.write(connected))

    assert len(used) == 1
    await database.close()


async def test_connection_that_the_server_closed_is_replaced(database: Database) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no server")

    def number(connection: Connection) -> int:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())

    first = await database.write(number)
    with database.transaction() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend({first}, 5000)"))

    assert await database.write(number) != first
    await database.close()


async def test_write_that_fails_leaves_nothing_to_the_next(database: Database) -> None:
    def make(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE made (id INTEGER)"))

    def broken(connection: Connection) -> None:
        make(connection)
        raise ValueError("after a change")

    with pytest.raises(ValueError, match="after a change"):
        await database.write(broken)
    await database.write(make)

    assert await database.write(lambda c: c.execute(text("SELECT * FROM made")).all()) == []
    await database.close()


async def test_write_that_is_stuck_does_not_block_the_next(database: Database, gate: Gate) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time")
    stuck = asyncio.create_task(database.write(gate))
    await gate.wait_for(1)

    assert await database.write(one) == 1

    gate.opened.set()
    assert await stuck == 1
    await database.close()


def test_each_lane_has_its_own_connections(database_url: str) -> None:
    """All of a lane's connections in use, and the others still have theirs."""
    database = Database(database_url)
    engines = [lane.engine for lane in database._lanes.values()]
    assert len({id(engine.pool) for engine in engines}) == len(engines) == 5
    with contextlib.ExitStack() as stack:
        for _ in range(REPORT.threads):
            stack.enter_context(database._lanes["report"].engine.connect())
        for name in ("read", "page", "write", "slow"):
            with database._lanes[name].engine.begin() as connection:
                assert one(connection) == 1
    database.dispose()
