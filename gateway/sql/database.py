"""The SQL database: SQLite or PostgreSQL, synchronous, with transactions run in threads.

On SQLite there is one writer thread with one connection, so writers never wait for a lock in the
file; readers have separate connections (write-ahead log). A transaction is a function of a
connection, run from begin to commit without waiting for anything but the database. It can run again
after a deadlock, so it must have no other side effects. ``lanes.py`` sets its limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    Connection,
    DateTime,
    Dialect,
    Engine,
    String,
    Table,
    TypeDecorator,
    cast,
    func,
    type_coerce,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.visitors import InternalTraversal

from gateway.checks.moments import EPOCH, MICROSECOND
from gateway.concurrency_limiter import ConcurrencyLimiter
from gateway.sql.connections import WriteConnections
from gateway.sql.lanes import PAGE, READ, REPORT, SLOW, WRITE, Lane, deadlocked
from gateway.sql.lanes import open_engine as open_engine
from gateway.sql.migrations import migrate as migrate
from gateway.sql.migrations import schema_is_current as schema_is_current
from gateway.time_limit import TimeLimit

T = TypeVar("T")

LOG_WAIT_MS: Final = 100
"""Time for which emptying SQLite's write-ahead log may delay writers."""
REPORTS_PER_ACCOUNT: Final = 2
"""Maximum lists and reports of one account that run concurrently, of the lane's four."""
REPORTS_WAITING: Final = 16
"""Maximum that wait behind them; further ones get 429."""
LONG_REPORTS: Final = 2
"""Maximum reports in the slow lane; its other threads are for closing, proofs and exports."""


for_page: Final = ContextVar("for_page", default=False)
"""Whether ``read`` and ``report`` use the lane of pages. Set for one call of the console, whose
services need not know of it."""


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC: TIMESTAMPTZ on PostgreSQL, integer microseconds on SQLite.

    Naive values are refused because they are ambiguous.
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
            raise ValueError(f"{value!r} has no time zone; use an aware datetime")
        if dialect.name == "postgresql":
            return value
        return (value - EPOCH) // MICROSECOND

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if dialect.name == "postgresql":
            moment: datetime = value
            return moment.astimezone(UTC)
        return EPOCH + timedelta(microseconds=value)


class time_bucket(ColumnElement[int]):  # lower case, like other SQL functions
    """Number of the interval of ``seconds`` since 1970 that contains a moment."""

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


class microseconds(ColumnElement[int]):  # lower case, like other SQL functions
    """A moment as microseconds since 1970, without conversion to a ``datetime``."""

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


def upsert(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT of the connection's dialect, which supports ``on_conflict_do_…``."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    return insert(table)


def exact_sum(column: ColumnElement[Any]) -> ColumnElement[int]:
    """Sum integers as BIGINT, or 0 without rows: PostgreSQL would widen the sum to NUMERIC."""
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


class _Wide(TypeDecorator[int]):
    """An integer of any size, transferred as billions and remainder."""

    impl = String
    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> int | None:
        if value is None:
            return None
        high, _, low = value.partition(":")
        return int(high) * 10**9 + int(low)


def wide_sum(column: ColumnElement[Any]) -> ColumnElement[int]:
    """Sum integers to a result that can exceed 64 bits, in two parts, because SQLite overflows."""
    high, low = exact_sum(column // 10**9), exact_sum(column % 10**9)
    return type_coerce(cast(high, String) + ":" + cast(low, String), _Wide())


class DatabaseTimeout(PoolTimeout):
    """The database did not answer in time; the transaction may still be committed."""


class Database:
    """Runs transactions in threads: ``await database.write(function)`` commits what it did.

    ``write`` and ``read`` are for the path of requests, ``report`` for lists and reports, ``slow``
    and ``slow_write`` for work that takes minutes. Pages read in another lane (``for_page``). Each
    lane has separate threads and connections.
    """

    def __init__(self, url: str, *, prepare: bool = True) -> None:
        self.url, self.prepare = url, prepare
        self._lanes = {
            lane.name: _Threads(url, lane, prepare=prepare)
            for lane in (WRITE, READ, REPORT, PAGE, SLOW)
        }
        self.engine = self._lanes["slow"].engine
        self._snapshot = self.engine.execution_options(reads=True)
        self._writing = WriteConnections(self._lanes["write"].engine)
        sqlite = self.engine.dialect.name == "sqlite"
        # A second writer on SQLite would wait for the lock in the file by polling.
        self._slow_writer = self._lanes["write" if sqlite else "slow"].executor
        self._report_limiter = ConcurrencyLimiter(REPORTS_PER_ACCOUNT, waiting_max=REPORTS_WAITING)
        self._page_limiter = ConcurrencyLimiter(1, waiting_max=REPORTS_WAITING)
        self._long_report_limiter = ConcurrencyLimiter(1, waiting_max=REPORTS_PER_ACCOUNT)
        self._long = asyncio.Semaphore(LONG_REPORTS)

    async def write(self, function: Callable[[Connection], T], *, durable: bool = True) -> T:
        """Run a function in one transaction, which is committed when this returns.

        If it is not ``durable``, it survives a crash of this process, but a power failure can lose
        it until a durable transaction is committed after it.
        """
        transact = functools.partial(self._writing.transact, function, durable=durable)
        return await self._lanes["write"].run(transact)

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a read-only function in one transaction, on one snapshot."""
        return await self._reader("read").read(function)

    async def prepare_pages(self, function: Callable[[Connection], object]) -> None:
        """Run a read-only function on all connections of pages."""
        threads, all_open = self._lanes[PAGE.name], threading.Barrier(PAGE.threads)

        def run(connection: Connection) -> None:
            all_open.wait(PAGE.patience_s)  # else one could be used twice
            function(connection)

        await asyncio.gather(*(threads.read(run) for _ in range(PAGE.threads)))

    async def report(self, function: Callable[[Connection], T], *, account_id: int | None) -> T:
        """Read a list or a report for an account; None is not limited.

        An account can run a few concurrently and have some more waiting, so that it cannot block
        other accounts. Raise ``TooManyRequests`` beyond that.
        """
        limiter = self._page_limiter if for_page.get() else self._report_limiter
        async with limiter.acquire(account_id):
            return await self._reader("report").read(function)

    async def long_report(self, function: Callable[[Connection], T], *, account_id: int) -> T:
        """Read a report that can take minutes: one per account at a time, and few in total."""
        async with self.long_reports(account_id):
            return await self.slow(function)

    @contextlib.asynccontextmanager
    async def long_reports(self, account_id: int | None) -> AsyncIterator[None]:
        """Wait until a report that can take minutes may run; None waits for all accounts only."""
        async with self._long_report_limiter.acquire(account_id), self._long:
            yield

    async def slow(self, function: Callable[[Connection], T]) -> T:
        """Run a read-only function that can take minutes, on one snapshot: exports, proofs."""
        loop = asyncio.get_running_loop()
        executor = self._lanes["slow"].executor
        return await loop.run_in_executor(executor, _transact, self._snapshot, function)

    async def slow_write(self, function: Callable[[Connection], T]) -> T:
        """Run a function that can take minutes in one transaction; no request may wait for it."""
        loop = asyncio.get_running_loop()
        transact = functools.partial(_transact, self.engine, function)
        return await loop.run_in_executor(self._slow_writer, _try_twice, transact)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a writing transaction in this thread, for the command line and tests."""
        with self.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Open a read-only transaction in this thread, on one snapshot."""
        with self._snapshot.begin() as connection:
            yield connection

    def empty_log(self) -> bool:
        """Checkpoint SQLite's write-ahead log and truncate it, because it contains old versions of
        rows. False if readers blocked this for ``LOG_WAIT_MS``."""
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

    def _reader(self, name: str) -> _Threads:
        return self._lanes["page" if for_page.get() else name]

    def dispose(self) -> None:
        """Close the connections of every lane."""
        self._writing.close()
        for lane in self._lanes.values():
            lane.engine.dispose()

    async def close(self) -> None:
        for lane in self._lanes.values():
            # Threads that wait for a silent database end at its time limit, not sooner.
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
        patience_s = math.inf if lane.patience_s is None else lane.patience_s
        message = f"the database did not answer within {patience_s:g} s"
        self._limit = TimeLimit(patience_s, lambda: DatabaseTimeout(message))

    def read(self, function: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run a function in one transaction of this lane's engine, like ``run``."""
        return self.run(functools.partial(_transact, self.engine, function))

    def run(self, transact: Callable[[], T]) -> asyncio.Future[T]:
        """Run a transaction. The future fails with ``DatabaseTimeout`` if it does not end within
        the lane's patience; a transaction that has not begun by then is dropped."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # Not by ``run_in_executor``, whose pair of chained futures takes as long as a transaction.
        self.executor.submit(_run, transact, answer)
        return self._limit.apply(answer)


def _run(transact: Callable[[], T], answer: asyncio.Future[T]) -> None:
    """Run a transaction in a thread, unless nothing waits for it any more."""
    if answer.done():
        return
    try:
        resolve = functools.partial(answer.set_result, _try_twice(transact))
    except BaseException as error:  # a boundary: any error is raised to the caller
        resolve = functools.partial(answer.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        answer.get_loop().call_soon_threadsafe(_resolve, answer, resolve)


def _resolve(answer: asyncio.Future[T], resolve: Callable[[], None]) -> None:
    if not answer.done():
        resolve()


def _try_twice(transact: Callable[[], T]) -> T:
    try:
        return transact()
    except OperationalError as error:
        if not deadlocked(error):
            raise
    # PostgreSQL has rolled this transaction back in favour of the other one.
    return transact()


def _transact(engine: Engine, function: Callable[[Connection], T]) -> T:
    with engine.begin() as connection:
        return function(connection)
