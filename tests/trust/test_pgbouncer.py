"""The gateway works behind a real PgBouncer that pools transactions.

Needs the program ``pgbouncer``, which no Python package brings, so it runs where ``-m services``
asks for it, as CI does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from gateway.ledger.holds import Held, hold
from gateway.sql.database import Database, migrate, open_engine, schema_is_current
from gateway.sql.lanes import REPORT
from gateway.sql.outages import SQL_OUTAGE
from tests.databases import own_postgres
from tests.ledger.books import HOLD, done, open_books

pytestmark = pytest.mark.services

CONFIG = """\
[databases]
* = host={data} user=postgres

[pgbouncer]
listen_addr =
listen_port = 6543
unix_socket_dir = {directory}
auth_type = any
pool_mode = transaction
default_pool_size = 2
logfile = {directory}/log
"""


@pytest.fixture
def pooled() -> Iterator[str]:
    """The URL of a database behind a pool of two server connections."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    assert program, "pgbouncer is not installed: apt-get install pgbouncer"
    user = "nobody" if os.geteuid() == 0 else None
    with own_postgres() as (_, url), tempfile.TemporaryDirectory(prefix="tg-") as directory:
        place = Path(directory)
        file = place / "pgbouncer.ini"
        file.write_text(CONFIG.format(data=make_url(url).query["host"], directory=directory))
        place.chmod(0o777)
        process = subprocess.Popen([program, str(file)], user=user, stderr=subprocess.DEVNULL)
        try:
            address = f"postgresql://postgres@/postgres?host={directory}&port=6543"
            _wait(address)
            yield address
        finally:
            process.kill()
            process.wait()


def _wait(address: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(address).close()
        except psycopg.OperationalError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


async def test_every_lane_works_behind_a_pool_of_transactions(pooled: str) -> None:
    migrate(pooled, prepare=False)
    database = Database(pooled, prepare=False)
    assert schema_is_current(database.engine)
    books = open_books(database, credit=1000 * HOLD)

    def order(connection: Connection) -> bool:
        return isinstance(hold(connection, [books.order()])[0], Held)

    def limits(connection: Connection) -> tuple[str, str, str]:
        names = ("statement_timeout", "lock_timeout", "timezone")
        row = connection.execute(text(f"SELECT {', '.join(map(_setting, names))}")).one()
        return row[0], row[1], row[2]

    # Many more statements of each kind than it takes psycopg to prepare them.
    assert all(await asyncio.gather(*(database.write(order) for _ in range(40))))
    request = books.order()
    await database.write(lambda connection: hold(connection, [request]))
    assert books.settle(done(request.request_id))[0] is not None
    for _ in range(10):
        assert await database.read(limits) == ("4s", "4s", "UTC")
        assert await database.write(limits) == ("8s", "5s", "UTC")
        assert (await database.report(limits, account_id=1))[0] == "8s"
        assert (await database.slow(limits))[0] == "30min"
    await database.close()


async def test_a_read_is_of_one_moment_behind_a_pool_of_transactions(pooled: str) -> None:
    database = Database(pooled, prepare=False)

    def level(connection: Connection) -> str:
        return str(connection.execute(text("SHOW transaction_isolation")).scalar_one())

    assert await database.read(level) == "repeatable read"
    assert await database.write(level) == "read committed"
    with database.snapshot() as connection:
        assert level(connection) == "repeatable read"
    await database.close()


def test_statement_ends_in_time_behind_a_pool_of_transactions(pooled: str) -> None:
    engine = open_engine(pooled, lane=replace(REPORT, statement_s=0.2), prepare=False)
    with pytest.raises(SQL_OUTAGE), engine.begin() as connection:
        connection.execute(text("SELECT pg_sleep(5)"))
    engine.dispose()


def test_without_the_setting_pgbouncer_refuses_with_a_reason(pooled: str) -> None:
    database = Database(pooled)

    with pytest.raises(OperationalError, match="unsupported startup parameter"):
        database.engine.connect()

    database.dispose()


def _setting(name: str) -> str:
    return f"current_setting('{name}')"
