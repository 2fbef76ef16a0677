"""The SQL database: SQLite or PostgreSQL, synchronous, its transactions run in threads.

On SQLite there is one writer thread with one connection, so writers never wait for a lock in the
file; readers have connections of their own (write-ahead log). A transaction is one function on a
connection, run from begin to commit without waiting for anything but the database; it may run again
if it loses to another one (a deadlock), so it does nothing outside. ``lanes.py`` bounds it.
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
    String,
    TypeDecorator,
    cast,
    func,
    type_coerce,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.visitors import InternalTraversal

from gateway.concurrency_limiter import ConcurrencyLimiter
from gateway.sql.lanes import MIGRATE, READ, REPORT, SLOW, WRITE, Lane, deadlocked
from gateway.sql.lanes import open_engine as open_engine

T = TypeVar("T")

LOG_WAIT_MS: Final = 100
"""How long emptying SQLite's write-ahead log may keep writers waiting."""
REPORTS_PER_ACCOUNT: Final = 2
"""Lists and reports of one account that run at a time, of the lane's four."""
REPORTS_WAITING: Final = 16
"""Those that wait behind them; the next one gets 429."""
LONG_REPORTS: Final = 2
"""Reports in the slow lane at a time; its other threads are for closing, audits and exports."""

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


class _Wide(TypeDecorator[int]):
    """An integer of any size, as billions and the rest."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> int | None:
        if value is None:
            return None
        high, _, low = value.partition(":")
        return int(high) * 10**9 + int(low)


def wide_sum(column: ColumnElement[Any]) -> ColumnElement[int]:
    """Sum integers to one that may exceed 64 bits, which SQLite cannot: in two parts."""
    high, low = exact_sum(column // 10**9), exact_sum(column % 10**9)
    return type_coerce(cast(high, String) + ":" + cast(low, String), _Wide())


class DatabaseTimeout(PoolTimeout):
    """The database did not answer in time; what was written may still be committed."""


class Database:
    """Runs transactions in threads: ``await database.write(function)`` commits what it did.

    ``read`` is for what a request waits for, ``report`` for lists and reports, ``slow`` and
    ``slow_write`` for what takes minutes. Each is a lane with threads and connections of its own.
    """

    def __init__(self, url: str, *, prepare: bool = True) -> None:
        self._lanes = {
            lane.name: _Threads(url, lane, prepare=prepare) for lane in (WRITE, READ, REPORT, SLOW)
        }
        self.engine = self._lanes["slow"].engine
        sqlite = self.engine.dialect.name == "sqlite"
        # Whatever a transaction reads is of one moment; SQLite knows it no other way.
        isolation = {} if sqlite or not prepare else {"isolation_level": "REPEATABLE READ"}
        self._snapshot = self.engine.execution_options(reads=True, **isolation)
        # A writer beside SQLite's only one would wait for its lock in the file, by polling.
        self._slow_writer = self._lanes["write" if sqlite else "slow"].executor
        self._report_limiter = ConcurrencyLimiter(REPORTS_PER_ACCOUNT, waiting_max=REPORTS_WAITING)
        self._long_report_limiter = ConcurrencyLimiter(1, waiting_max=REPORTS_PER_ACCOUNT)
        self._long = asyncio.Semaphore(LONG_REPORTS)

    async def write(self, function: Callable[[Connection], T]) -> T:
        """Run a function in one transaction; it is committed when this returns."""
        return await self._lanes["write"].run(function)

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function that only reads, in one transaction of its own, on one snapshot."""
        return await self._lanes["read"].run(function)

    async def report(self, function: Callable[[Connection], T], *, account_id: int | None) -> T:
        """Read a list or a report for an account; None where no account asks.

        An account has a few of them at a time and some more waiting, so that it cannot keep the
        others from theirs. Raise ``TooManyRequests`` beyond that.
        """
        async with self._report_limiter.acquire(account_id):
            return await self._lanes["report"].run(function)

    async def long_report(self, function: Callable[[Connection], T], *, account_id: int) -> T:
        """Read a report that may take minutes: one of an account at a time, and few in all."""
        async with self._long_report_limiter.acquire(account_id), self._long:
            return await self.slow(function)

    async def slow(self, function: Callable[[Connection], T]) -> T:
        """Read on one snapshot for minutes: exports, audits, closing."""
        loop = asyncio.get_running_loop()
        executor = self._lanes["slow"].executor
        return await loop.run_in_executor(executor, _transact, self._snapshot, function)

    async def slow_write(self, function: Callable[[Connection], T]) -> T:
        """Run a function in one transaction for minutes, which nothing may wait for."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._slow_writer, _transact, self.engine, function)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A writing transaction in this thread, for the command line and for tests."""
        with self.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A transaction in this thread that only reads, and sees one moment."""
        with self._snapshot.begin() as connection:
            yield connection

    def empty_log(self) -> bool:
        """Move SQLite's write-ahead log into the database file and cut it to nothing, because it
        contains old versions of rows. False if readers were in the way for ``LOG_WAIT_MS``."""
        if self.engine.dialect.name != "sqlite":
            return True
        with contextlib.closing(self.engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={LOG_WAIT_MS}")
            try:
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                row = cursor.fetchone()
                return row is not None and not row[0]
            finally:
                cursor.execute(f"PRAGMA busy_timeout={SLOW.lock_s * 1000:.0f}")

    def dispose(self) -> None:
        """Close the connections of every lane."""
        for lane in self._lanes.values():
            lane.engine.dispose()

    async def close(self) -> None:
        for lane in self._lanes.values():
            # Threads that wait for a silent database end when its time is up, not sooner.
            await asyncio.to_thread(lane.executor.shutdown, cancel_futures=True)
        self.dispose()


class _Threads:
    """The threads and connections of one lane."""

    def __init__(self, url: str, lane: Lane, *, prepare: bool) -> None:
        self.engine = open_engine(url, lane=lane, prepare=prepare)
        alone = self.engine.dialect.name == "sqlite" and lane is WRITE
        self.executor = ThreadPoolExecutor(
            1 if alone else lane.threads, thread_name_prefix=f"sql-{lane.name}"
        )
        self._lane = lane

    async def run(self, function: Callable[[Connection], T]) -> T:
        """Raise ``DatabaseTimeout`` if the lane's patience ends before the transaction does; what
        has not begun by then never does."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._lane.patience_s) as patience:
                return await loop.run_in_executor(self.executor, _transact, self.engine, function)
        except TimeoutError:
            if not patience.expired():
                raise
            raise DatabaseTimeout(
                f"the database did not answer within {self._lane.patience_s:g} s"
            ) from None


def _transact(engine: Engine, function: Callable[[Connection], T]) -> T:
    try:
        with engine.begin() as connection:
            return function(connection)
    except OperationalError as error:
        if not deadlocked(error):
            raise
    # PostgreSQL has let the other one go first, and nothing of this one is left.
    with engine.begin() as connection:
        return function(connection)


def migrate(url: str, *, prepare: bool = True) -> None:
    """Bring a database to the newest schema; does nothing if it is there already."""
    engine = open_engine(url, lane=MIGRATE, prepare=prepare)
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
