"""Lanes to the database: each has separate threads, connections and time limits.

The path of requests (``write`` and ``read``) shares nothing with lists and reports (``report``) or
with exports, closing and proofs (``slow``). Every statement has a time limit. On PostgreSQL the
server enforces it, and the client drops a silent server shortly afterwards; on SQLite the statement
is interrupted. Knows no tables.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
import psycopg
import sqlalchemy
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import OperationalError

R = TypeVar("R")

CONNECT_S: Final = 3
SILENT_S: Final = 1.0
"""Time after a statement's limit at which a server without an answer counts as unreachable."""
POOL_WAIT_S: Final = 10.0
STEPS: Final = 20_000
"""Instructions of SQLite's virtual machine between checks of the clock: about a millisecond."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Limits of one kind of work. ``threads`` is also the number of connections."""

    name: str
    threads: int
    statement_s: float | None
    lock_s: float
    """Time to wait for a row lock; on SQLite, for another process such as the command line."""
    patience_s: float | None
    """Time for which a caller waits for a thread and the result; None is unlimited."""
    reads: bool = False
    """Whether its transactions are read-only, each on one snapshot."""
    idle_s: float | None = 10.0
    """Time after which PostgreSQL ends an idle transaction, whose gateway may have been paused."""
    cache_kib: int = 16_384
    """Page cache of each SQLite connection."""


# Authentication (read) and a hold (write) follow one another, each with its own patience, so that a
# client learns within about ten seconds that the database is unreachable.
WRITE: Final = Lane("write", 4, statement_s=8, lock_s=5, patience_s=9, cache_kib=65_536)
READ: Final = Lane("read", 4, statement_s=4, lock_s=4, patience_s=5, reads=True, cache_kib=65_536)
REPORT: Final = Lane("report", 4, statement_s=8, lock_s=4, patience_s=9, reads=True)
PAGE: Final = Lane("page", 2, statement_s=2, lock_s=2, patience_s=2.1, reads=True)
"""Reads of pages for people: few and short, so that a page fails and no order waits for it."""
SLOW: Final = Lane("slow", 6, statement_s=1800, lock_s=10, patience_s=None, idle_s=None)
MIGRATE: Final = Lane("migrate", 3, statement_s=None, lock_s=10, patience_s=None, idle_s=None)
"""One connection has the turn, one migrates, and one builds indexes."""


class SilentAwareConnection(psycopg.Connection[Any]):
    """A connection that drops a server which accepts statements and then stays silent.

    ``statement_timeout`` is enforced by the server, and its kernel answers TCP keepalives, so
    neither detects a server that is stopped, nor a proxy that keeps the connection open.
    """

    limit_s: float | None = None

    def wait(
        self,
        gen: Generator[Any, Any, R],
        interval: float = 0.1,
        timeout: float | None = None,
    ) -> R:
        try:
            answer: R = super().wait(gen, interval, self.limit_s if timeout is None else timeout)
            return answer
        except psycopg.OperationalError:
            if self.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                self.close()
            raise


def open_engine(
    url: str, *, lane: Lane = SLOW, pool_size: int | None = None, prepare: bool = True
) -> Engine:
    """Create an engine for ``sqlite:///…`` or ``postgresql://…``; it connects when first used.

    Without ``prepare``, connections keep no state between transactions, as PgBouncer's transaction
    mode requires: no prepared statements, and settings are sent with each transaction.
    """
    parsed = make_url(url)
    size = lane.threads if pool_size is None else pool_size
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed.database or "", lane, size)
    if parsed.get_backend_name() != "postgresql":
        raise ValueError(f"{parsed.get_backend_name()} is not supported; use SQLite or PostgreSQL")
    return _postgresql(parsed, lane, size, prepare=prepare)


def _postgresql(url: URL, lane: Lane, size: int, *, prepare: bool) -> Engine:
    limits = {
        "statement_timeout": lane.statement_s,
        "lock_timeout": lane.lock_s,
        "idle_in_transaction_session_timeout": lane.idle_s,
    }
    settings = {name: f"{(seconds or 0) * 1000:.0f}" for name, seconds in limits.items()}
    settings["timezone"] = "UTC"
    # Compiling a query of 25 partitions takes 2 s, and running it as it is 13 ms.
    settings["jit"] = "off"
    if lane.reads:
        # A span of settlements is a few entries of their index. With the default, PostgreSQL also
        # reads the ids of all receipts that it can have, of eight days, to save a few blocks.
        settings["cpu_index_tuple_cost"] = "0.03"
        # A span's block ranges lie together; with the default, they cost as if scattered on a disk.
        settings["random_page_cost"] = "1.1"
    if lane is PAGE:
        # Starting two workers takes 20 ms, of a page that should take 50, and their processors
        # from orders.
        settings["max_parallel_workers_per_gather"] = "0"
        # A plan for any span reads a minute as it would a year.
        settings["plan_cache_mode"] = "force_custom_plan"
    if lane is WRITE and prepare:
        # PostgreSQL would plan prepared statements on partitioned tables anew each time, which
        # takes longer than they do. A generic plan leaves out partitions by parameters as well.
        settings["plan_cache_mode"] = "force_generic_plan"
    arguments: dict[str, Any] = {
        # BEGIN and COMMIT are sent explicitly, so that settings travel in the same round trip.
        "autocommit": True,
        "connect_timeout": CONNECT_S,
        "application_name": f"tollgate {lane.name}",
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 2,
        "tcp_user_timeout": 9000,
    }
    local = ""
    if prepare:
        # Session settings, which cost transactions nothing.
        arguments["options"] = " ".join(f"-c {name}={value}" for name, value in settings.items())
    else:
        arguments["prepare_threshold"] = None
        local = "".join(f"; SET LOCAL {name} = '{value}'" for name, value in settings.items())
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        json_serializer=_encode_json,
        pool_size=size,
        max_overflow=0,
        pool_pre_ping=True,
        pool_timeout=POOL_WAIT_S,
        connect_args=arguments,
    )

    @event.listens_for(engine, "do_connect")
    def connect(_: Any, __: Any, places: Any, names: Any) -> SilentAwareConnection:
        made: SilentAwareConnection = SilentAwareConnection.connect(*places, **names)
        made.limit_s = None if lane.statement_s is None else lane.statement_s + SILENT_S
        return made

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        level = "REPEATABLE READ" if options.get("reads", lane.reads) else "READ COMMITTED"
        durable = connection.info.get("durable", True)
        flush = "" if durable else "; SET LOCAL synchronous_commit = off"
        # One round trip; only queries without parameters can be combined.
        connection.exec_driver_sql(f"BEGIN ISOLATION LEVEL {level}{local}{flush}")

    return engine


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _sqlite(path: str, lane: Lane, size: int) -> Engine:
    if not path or path == ":memory:":
        raise ValueError("SQLite needs a file: sqlite:////path/to/tollgate.db")
    engine = create_engine(
        f"sqlite:///{path}",
        json_serializer=_encode_json,
        poolclass=sqlalchemy.QueuePool,
        pool_size=size,
        max_overflow=0,
        pool_timeout=POOL_WAIT_S,
        connect_args={
            "isolation_level": None,
            "check_same_thread": False,
            "cached_statements": 512,
        },
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        for pragma in (
            "journal_mode=WAL",
            # Committed data must survive a power failure.
            "synchronous=FULL",
            f"busy_timeout={lane.lock_s * 1000:.0f}",
            "foreign_keys=ON",
            f"cache_size=-{lane.cache_kib}",
            # Deleted jobs are overwritten, because they contain clients' prompts.
            "secure_delete=ON",
        ):
            connection.execute(f"PRAGMA {pragma}")
        clock = record.info["clock"] = _Clock()
        record.info["synchronous"] = "FULL"
        connection.set_progress_handler(clock.is_up, STEPS)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        info, driver = connection.info, cast(Any, connection.connection.driver_connection)
        limit_s = math.inf if lane.statement_s is None else lane.statement_s
        info["clock"].ends_at = time.monotonic() + limit_s
        synchronous = "FULL" if info.get("durable", True) else "NORMAL"
        # SELECT … FOR UPDATE compiles to nothing on SQLite: the write lock is taken here instead.
        reads = connection.get_execution_options().get("reads", lane.reads)
        start = "BEGIN" if reads else "BEGIN IMMEDIATE"
        try:
            if synchronous != info["synchronous"]:
                driver.execute(f"PRAGMA synchronous={synchronous}")
                info["synchronous"] = synchronous
            driver.execute(start)
        except sqlite3.Error as error:
            # As by ``exec_driver_sql``, which takes longer than SQLite.
            connection._handle_dbapi_exception(error, start, None, None, None)

    @event.listens_for(engine, "checkin")
    def rest(_: Any, record: Any) -> None:
        if "clock" in record.info:
            record.info["clock"].ends_at = math.inf

    @event.listens_for(engine, "handle_error")
    def unreadable(context: ExceptionContext) -> None:
        # The class of errors of a damaged file: an outage, not an error in the caller's data.
        error = context.original_exception
        if type(error) is sqlite3.DatabaseError:
            raise OperationalError(context.statement, context.parameters, error) from error

    return engine


class _Clock:
    """Interrupts the transaction of one SQLite connection at its time limit."""

    def __init__(self) -> None:
        self.ends_at = math.inf

    def is_up(self) -> int:
        return time.monotonic() > self.ends_at


def deadlocked(error: OperationalError) -> bool:
    """Whether PostgreSQL ended a transaction to resolve a deadlock."""
    return isinstance(error.orig, psycopg.errors.DeadlockDetected)


def ran_too_long(error: BaseException) -> bool:
    """Whether the database ended a statement at the time limit of its lane."""
    cause = getattr(error, "orig", None)
    if isinstance(cause, sqlite3.OperationalError):
        return cause.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT
    return isinstance(cause, psycopg.errors.QueryCanceled)
