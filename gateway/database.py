"""The SQL database: SQLite or PostgreSQL, synchronous, its transactions run in threads.

On SQLite there is one writer thread with one connection, so writers never wait for a lock in the
file; readers have connections of their own (write-ahead log). A transaction is one function on a
connection, run from begin to commit without waiting for anything but the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    BigInteger,
    Connection,
    DateTime,
    Dialect,
    Engine,
    TypeDecorator,
    cast,
    create_engine,
    event,
    func,
)
from sqlalchemy.engine import make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.visitors import InternalTraversal

T = TypeVar("T")

BUSY_TIMEOUT_MS: Final = 5_000
"""How long a SQLite writer waits for another process, such as the command line."""
READERS: Final = 4
POOL: Final = 8

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC: TIMESTAMPTZ on PostgreSQL, integer microseconds on SQLite.

    Naive values are refused, because nobody could say which moment they mean.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(DateTime(timezone=True))
        return dialect.type_descriptor(BigInteger())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        if dialect.name == "postgresql":
            return value
        return (value - _EPOCH) // _MICROSECOND

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name == "postgresql":
            moment: datetime = value
            return moment.astimezone(UTC)
        return _EPOCH + timedelta(microseconds=value)


class time_bucket(ColumnElement[int]):  # reads as the SQL function that it is
    """Number of the span of so many seconds since 1970 in which a moment lies."""

    type = BigInteger()
    inherit_cache = True
    _traverse_internals = [
        ("column", InternalTraversal.dp_clauseelement),
        ("seconds", InternalTraversal.dp_plain_obj),
    ]

    def __init__(self, column: ColumnElement[datetime], seconds: int) -> None:
        self.column = column
        self.seconds = seconds


@compiles(time_bucket, "sqlite")
def _time_bucket_sqlite(element: time_bucket, compiler: SQLCompiler, **kw: Any) -> str:
    return f"({compiler.process(element.column, **kw)} / {element.seconds * 1_000_000})"


@compiles(time_bucket, "postgresql")
def _time_bucket_postgresql(element: time_bucket, compiler: SQLCompiler, **kw: Any) -> str:
    column = compiler.process(element.column, **kw)
    return f"CAST(floor(extract(epoch FROM {column}) / {element.seconds}) AS BIGINT)"


class microseconds(ColumnElement[int]):  # reads as the SQL function that it is
    """A moment as microseconds since 1970, without making an object of it."""

    type = BigInteger()
    inherit_cache = True
    _traverse_internals = [("column", InternalTraversal.dp_clauseelement)]

    def __init__(self, column: ColumnElement[datetime]) -> None:
        self.column = column


@compiles(microseconds, "sqlite")
def _microseconds_sqlite(element: microseconds, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.column, **kw)


@compiles(microseconds, "postgresql")
def _microseconds_postgresql(element: microseconds, compiler: SQLCompiler, **kw: Any) -> str:
    column = compiler.process(element.column, **kw)
    return f"CAST(extract(epoch FROM {column}) * 1000000 AS BIGINT)"


def exact_sum(column: ColumnElement[Any]) -> ColumnElement[int]:
    """Sum integers as an integer, nothing as 0: PostgreSQL would widen the sum to NUMERIC."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


def open_engine(url: str, *, pool_size: int = POOL) -> Engine:
    """Make an engine for ``sqlite:///…`` or ``postgresql://…``; it connects when first used."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed.database or "", pool_size)
    if parsed.get_backend_name() != "postgresql":
        raise ValueError(f"{parsed.get_backend_name()} is not supported; use SQLite or PostgreSQL")
    return create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_timeout=10,
        connect_args={"connect_timeout": 5, "options": "-c lock_timeout=10s -c timezone=UTC"},
    )


def _sqlite(path: str, pool_size: int) -> Engine:
    if not path or path == ":memory:":
        raise ValueError("SQLite needs a file: sqlite:////path/to/tollgate.db")
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=sqlalchemy.QueuePool,
        pool_size=pool_size,
        max_overflow=0,
        connect_args={
            "isolation_level": None,
            "check_same_thread": False,
            "cached_statements": 512,
        },
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        for pragma in (
            "journal_mode=WAL",
            # Nothing that was acknowledged may be lost with the power.
            "synchronous=FULL",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "foreign_keys=ON",
            "cache_size=-65536",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # SELECT … FOR UPDATE compiles to nothing on SQLite: the write lock is taken here instead.
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


class Database:
    """Runs transactions in threads: ``await database.write(function)`` commits what it did."""

    def __init__(self, url: str) -> None:
        self.engine = open_engine(url)
        sqlite = self.engine.dialect.name == "sqlite"
        # Whatever a transaction reads is of one moment; SQLite knows it no other way.
        snapshot = {} if sqlite else {"isolation_level": "REPEATABLE READ"}
        self._reading = self.engine.execution_options(reads=True, **snapshot)
        self._writer = ThreadPoolExecutor(1 if sqlite else 4, thread_name_prefix="sql-write")
        self._reader = ThreadPoolExecutor(READERS, thread_name_prefix="sql-read")

    async def write(self, function: Callable[[Connection], T]) -> T:
        """Run a function in one transaction; it is committed when this returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, self._transact, self.engine, function)

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function that only reads, in one transaction of its own, on one snapshot."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self._transact, self._reading, function)

    @staticmethod
    def _transact(engine: Engine, function: Callable[[Connection], T]) -> T:
        with engine.begin() as connection:
            return function(connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A writing transaction in this thread, for the command line and for tests."""
        with self.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A transaction in this thread that only reads, and sees one moment."""
        with self._reading.begin() as connection:
            yield connection

    async def close(self) -> None:
        self._writer.shutdown()
        self._reader.shutdown()
        self.engine.dispose()


def migrate(url: str) -> None:
    """Bring a database to the newest schema; does nothing if it is there already."""
    engine = open_engine(url, pool_size=1)
    try:
        with engine.begin() as connection:
            config = _alembic()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def schema_is_current(engine: Engine) -> bool:
    """Say whether a database has the schema that this code was written for."""
    heads = set(ScriptDirectory.from_config(_alembic()).get_heads())
    with engine.execution_options(reads=True).begin() as connection:
        return set(MigrationContext.configure(connection).get_current_heads()) == heads


def _alembic() -> Config:
    config = Config()
    location = importlib.resources.files("migrations")
    config.set_main_option("script_location", str(Path(str(location))))
    return config
