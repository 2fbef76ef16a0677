"""Power failures: transactions that did not reach the disk are lost, from the last one backwards.

On SQLite, the disk is a copy of the files as of the last commit that synced them. On PostgreSQL,
the server is stopped immediately, which loses what its log writer has not flushed.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, event, select, text

from gateway.ledger.holds import Held, HoldRequest, Replayed
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Closing
from gateway.ledger.writer import LedgerWriter
from gateway.sql.database import Database
from gateway.tables.core import holds, receipts
from tests.databases import Databases, Server, own_postgres
from tests.ledger.books import HOLD, Books, done, open_books


class Machine(Protocol):
    """A database, and the power failure of its machine."""

    url: str

    def watch(self, database: Database) -> None: ...

    def sync(self) -> None:
        """Take note of what a commit has just synced."""

    def fail(self) -> str:
        """Lose what is not synced; return the address of what is left."""


class SqliteMachine:
    def __init__(self, url: str, path: Path, disk: Path) -> None:
        self.url, self._path, self._disk = url, path, disk
        self._synced = True
        disk.mkdir()

    def watch(self, database: Database) -> None:
        @event.listens_for(database._lanes["write"].engine, "commit")
        def look(connection: Connection) -> None:
            level = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
            self._synced = self._synced or level == 2

        self.sync()

    def sync(self) -> None:
        if self._synced:
            for suffix in ("", "-wal"):
                shutil.copy(f"{self._path}{suffix}", self._disk)
        self._synced = False

    def fail(self) -> str:
        return f"sqlite:///{self._disk / self._path.name}"


class PostgresMachine:
    def __init__(self, server: Server, url: str) -> None:
        self._server, self.url = server, url

    def watch(self, database: Database) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            # By default the log is flushed within 0.6 s.
            connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
            connection.execute("SELECT pg_reload_conf()")
        time.sleep(0.5)

    def sync(self) -> None: ...

    def fail(self) -> str:
        self._server.stop()
        self._server.start()
        return self.url


@contextmanager
def machine(kind: str, folder: Path, postgres: str) -> Iterator[Machine]:
    if kind == "sqlite":
        url = Databases("sqlite", folder, postgres).make()
        yield SqliteMachine(url, Path(url.removeprefix("sqlite:///")), folder / "disk")
    else:
        with own_postgres() as (server, url):
            yield PostgresMachine(server, url)


class Program:
    """Requests that begin and end, and what their clients have been told."""

    def __init__(self, books: Books, machine: Machine) -> None:
        self._books, self._machine = books, machine
        self._ledger: LedgerWriter = books.writer()
        self.open: dict[str, HoldRequest] = {}
        self.costs: dict[str, int] = {}
        self.unsynced: set[str] = set()

    async def hold(self, *, durable: bool) -> HoldRequest:
        name = None if not durable else f"name {len(self.open)} {len(self.costs)}"
        request = self._books.order(
            durable=durable, idempotency_key=name, body_sha256=b"body" if name else None
        )
        assert await self._ledger.hold(request) == Held(request.request_id)
        self.open[request.request_id] = request
        self.unsynced = set() if durable else {*self.unsynced, request.request_id}
        self._machine.sync()
        return request

    async def settle(self, request: HoldRequest) -> None:
        closing = await self._ledger.settle(done(request.request_id))
        assert isinstance(closing, Closing)
        del self.open[request.request_id]
        self.costs[request.request_id] = closing.closed.cost_nanos
        self.unsynced = set()
        self._machine.sync()


@pytest.mark.parametrize(
    ("kind", "seed"), [("sqlite", seed) for seed in range(8)] + [("postgresql", 8)]
)
async def test_power_failure_loses_only_holds_of_requests_that_nobody_was_told_of(
    kind: str, seed: int, tmp_path: Path, postgres: str
) -> None:
    chance = random.Random(seed)
    with machine(kind, tmp_path, postgres) as host:
        database = Database(host.url)
        books = open_books(database, credit=1000 * HOLD)
        host.watch(database)
        program = Program(books, host)
        for _ in range(40):
            if program.open and chance.random() < 0.4:
                await program.settle(chance.choice(list(program.open.values())))
            else:
                await program.hold(durable=chance.random() < 0.3)
        # The charge of a request whose hold was not synced by itself, and then one more hold.
        await program.settle(await program.hold(durable=False))
        await program.hold(durable=False)
        if kind == "postgresql":
            with database.transaction() as connection:
                assert not flushed(connection)

        url = host.fail()

        await database.close()
        after = replace(books, database=Database(url))
        with after.database.transaction() as connection:
            assert reconcile(connection, now=datetime.now(UTC)) == []
            charged = dict(
                connection.execute(select(receipts.c.request_id, receipts.c.charge_nanos)).all()
            )
            held = set(connection.execute(select(holds.c.request_id)).scalars())
        assert charged == program.costs
        assert set(program.open) - held == program.unsynced
        assert held <= set(program.open)

        # Clients send again what was not answered: by its key it is found, else it is new.
        ledger = after.writer()
        for request in program.open.values():
            again = msgspec.structs.replace(request, request_id=books.order().request_id)
            answer = await ledger.hold(again)
            if request.durable:
                assert answer == Replayed(request.request_id)
            else:
                assert answer == Held(again.request_id)
                assert await ledger.settle(done(again.request_id))
        for lost in program.unsynced:
            assert await ledger.settle(done(program.open[lost].request_id)) is None
        with after.database.transaction() as connection:
            assert reconcile(connection, now=datetime.now(UTC)) == []
        await after.database.close()


def flushed(connection: Connection) -> bool:
    """Whether PostgreSQL has flushed all of its log."""
    found = connection.execute(
        text("SELECT pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn()")
    )
    return bool(found.scalar_one())
