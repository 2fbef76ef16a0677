"""Migrating a database while older gateways serve from it, and building indexes of large tables.

A new database is migrated in one transaction. An existing one is migrated in one transaction per
version, so locks are short, and a migration that is interrupted continues at the version where it
stopped. Processes that migrate the same database take turns: on PostgreSQL by an advisory lock, on
SQLite by its one writer.

Statements that lock a table give up after ``partitions.LOCK_S``, so that bookings never wait longer
behind them, and are tried again.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from gateway.sql.lanes import MIGRATE, deadlocked, open_engine
from gateway.sql.partitions import create_ahead, is_partitioned, wait_briefly

T = TypeVar("T")
Migrated: TypeAlias = Callable[[Connection, str | None, str], None]

TRIES: Final = 3000
"""Maximum number of tries of a transaction because another one locks its table: about 50 minutes,
longer than any report."""
PAUSE_S: Final = 0.5
"""Pause between two tries, in which the transactions that waited behind the first one run."""
_TURN: Final = 0x746F6C6C67617465
"""Key of the advisory lock: the word "tollgate" in ASCII."""

_LEAVES: Final = text(
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
    "WHERE i.inhparent = to_regclass(:table) ORDER BY c.relname"
)
_IS_PARTITIONED: Final = text("SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(:table)")
_IS_VALID: Final = text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)")
_INDEXED: Final = text(
    "SELECT EXISTS (SELECT FROM pg_inherits i JOIN pg_index x ON x.indexrelid = i.inhrelid "
    "WHERE i.inhparent = to_regclass(:name) AND x.indrelid = to_regclass(:leaf))"
)


def migrate(url: str, *, prepare: bool = True, migrated: Migrated | None = None) -> None:
    """Migrate a database to the newest schema, and create the partitions of the next months. No
    effect if it is current.

    ``migrated`` is called in the transaction of the last version if the schema has changed, with
    the names of the schema that this call found and of the new one.
    """
    engine = open_engine(url, lane=MIGRATE, prepare=prepare)
    found: list[str | None] = []

    def step(connection: Connection) -> bool:
        config = _alembic()
        old = MigrationContext.configure(connection).get_current_revision()
        found.append(old)
        script = ScriptDirectory.from_config(config)
        pending = [each.revision for each in script.iterate_revisions("head", old or "base")]
        if not pending:
            return False
        # Nothing uses a new database yet, so it has nothing to wait for.
        version = pending[0] if old is None else pending[-1]
        config.attributes["connection"] = connection
        command.upgrade(config, version)
        if version == pending[0] and migrated is not None:
            migrated(connection, found[0], version)
        return len(pending) > 1 and old is not None

    def partitions(connection: Connection) -> None:
        create_ahead(connection, datetime.now(UTC))

    try:
        with _turn(engine):
            while _patiently(engine, step):
                pass
            _patiently(engine, partitions)
    finally:
        engine.dispose()


def schema_is_current(engine: Engine) -> bool:
    """Whether a database has the schema of this version of the code."""
    heads = set(ScriptDirectory.from_config(_alembic()).get_heads())
    with engine.execution_options(reads=True).begin() as connection:
        return set(MigrationContext.configure(connection).get_current_heads()) == heads


def build_index(connection: Connection, name: str, table: str, *, columns: str, where: str) -> None:
    """Build an index of a table; on PostgreSQL while bookings continue, partition by partition.

    There it uses connections beside the caller's, whose transaction must not have locked the table.
    Partitions that have the index already are skipped, and an index that an interrupted build left
    invalid is dropped and built again.
    """
    condition = f" WHERE {where}" if where else ""
    if not _is_visible(connection, table):
        connection.exec_driver_sql(f"CREATE INDEX {name} ON {table} ({columns}){condition}")
        return
    engine = connection.engine
    _drop_snapshot(connection)

    def read(query: Any, **values: str) -> Any:
        with engine.begin() as beside:
            return beside.execute(query, values).scalar()

    def run(statement: str) -> None:
        _patiently(engine, lambda beside: beside.exec_driver_sql(statement))

    if not read(_IS_PARTITIONED, table=table):
        _build_beside(
            engine, name, f"{table} ({columns}){condition}", valid=read(_IS_VALID, name=name)
        )
        return
    # Of the table alone this is a row in the catalog of the server; partitions that are created
    # from now on get the index with it.
    run(f"CREATE INDEX IF NOT EXISTS {name} ON ONLY {table} ({columns}){condition}")
    with engine.begin() as beside:
        leaves = beside.execute(_LEAVES, {"table": table}).scalars().all()
    for leaf in leaves:
        if read(_INDEXED, name=name, leaf=leaf):
            continue
        part = f"{leaf}_{name.removeprefix(f'ix_{table}_')}_idx"
        valid = read(_IS_VALID, name=part)
        _build_beside(engine, part, f"{leaf} ({columns}){condition}", valid=valid)
        run(f"ALTER INDEX {name} ATTACH PARTITION {part}")


def _build_beside(engine: Engine, name: str, of: str, *, valid: bool | None) -> None:
    """Build an index of one table concurrently, unless it is there and ``valid``."""
    if valid is False:
        _patiently(engine, lambda beside: beside.exec_driver_sql(f"DROP INDEX {name}"))
    if not valid:
        _run_alone(engine, f"CREATE INDEX CONCURRENTLY {name} ON {of}")


def drop_index(connection: Connection, name: str, table: str) -> None:
    """Drop an index of a table; on PostgreSQL in a transaction beside the caller's, tried again
    while bookings hold the table."""
    if not _is_visible(connection, table):
        connection.exec_driver_sql(f"DROP INDEX {name}")
        return
    _patiently(
        connection.engine, lambda beside: beside.exec_driver_sql(f"DROP INDEX IF EXISTS {name}")
    )


def _is_visible(connection: Connection, table: str) -> bool:
    """Whether other connections see a table, which is not created in this very transaction."""
    if not is_partitioned(connection):
        return False
    with connection.engine.begin() as beside:
        query = text("SELECT to_regclass(:table) IS NOT NULL")
        return bool(beside.execute(query, {"table": table}).scalar())


@contextlib.contextmanager
def _turn(engine: Engine) -> Iterator[None]:
    """Wait until no other process migrates this database."""
    if engine.dialect.name != "postgresql":
        yield
        return
    with engine.begin() as connection:
        query = text("SELECT pg_try_advisory_xact_lock(:key)")
        # A statement that waits would have a snapshot, and concurrent builds wait for snapshots.
        while not connection.execute(query, {"key": _TURN}).scalar():
            _drop_snapshot(connection)
            time.sleep(PAUSE_S)
        _drop_snapshot(connection)
        yield


def _drop_snapshot(connection: Connection) -> None:
    """Run a statement without a snapshot. The server keeps that of a prepared query until the
    next statement of its transaction, and concurrent builds would wait for it."""
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")


def _patiently(engine: Engine, step: Callable[[Connection], T]) -> T:
    """Run a step in one transaction, again while another transaction locks what it needs."""
    for _ in range(TRIES):
        try:
            with engine.begin() as connection:
                if is_partitioned(connection):
                    wait_briefly(connection)
                return step(connection)
        except OperationalError as error:
            locked = isinstance(error.orig, psycopg.errors.LockNotAvailable)
            if not (locked or deadlocked(error)):
                raise
            logging.getLogger(__name__).info("waiting for a lock: %s", error.orig)
        time.sleep(PAUSE_S)
    raise TimeoutError("another transaction locks a table; end it and migrate again")


def _run_alone(engine: Engine, statement: str) -> None:
    """Run a statement outside of a transaction, without a limit to its waits.

    A concurrent build blocks no booking, but it waits for the snapshots of reports.
    """
    connection = engine.raw_connection()
    try:
        driver: Any = connection.driver_connection
        limited = driver.execute("SHOW lock_timeout").fetchone()[0] != "0"
        # Behind PgBouncer there is no limit and no session to set it in.
        if limited:
            driver.execute("SET lock_timeout = 0")
        try:
            driver.execute(statement)
        finally:
            if limited:
                driver.execute("RESET lock_timeout")
    finally:
        connection.close()


def _alembic() -> Config:
    config = Config()
    location = importlib.resources.files("migrations")
    config.set_main_option("script_location", str(Path(str(location))))
    return config
