"""Scheduled tasks, each run by one of the gateways at a time.

The gateway that updates a task's ``due_at`` owns the task. If it crashes while running it, the task
is due again after its next interval. So a task must be harmless if it runs again or concurrently.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from sqlalchemy import Connection, select, update
from sqlalchemy.exc import OperationalError

from gateway import metrics
from gateway.aside import delete_obsolete_notes
from gateway.audit_log import Author
from gateway.billing.reconciliation import run_reconciliation
from gateway.billing.statements.close import SETTLED_AFTER, close_month, list_periods
from gateway.billing.usage.minutes import (
    CLOSED_AFTER,
    HOUR,
    MINUTE,
    MINUTES_MAX,
    build_due_minutes,
    wait_for_bookings,
)
from gateway.billing.usage.rollups import DAYS_MAX, HOURS_MAX, build_due, build_due_days
from gateway.catalog.selling.terms import delete_old_changes
from gateway.catalog.store import LiveCatalog
from gateway.catalog.upstream_check import check_upstreams
from gateway.errors import Conflict
from gateway.ledger.concurrency import miscounts, recount
from gateway.ledger.expiry import expire_lots, give_allowances
from gateway.ledger.periods import month_of
from gateway.ledger.prices import PriceCache
from gateway.notices.due import due_notices
from gateway.notices.kinds import OPERATOR, Notice
from gateway.notices.price_changes import price_notices
from gateway.notices.store import publish
from gateway.notices.subscriptions import subscribed_accounts
from gateway.notices.upstreams import upstreams_changed
from gateway.operations.running.gateways import TaskRun
from gateway.payments.provider import PaymentProvider
from gateway.sql.database import Database, upsert
from gateway.sql.outages import OUTAGE
from gateway.sql.partitions import create_month, missing_months, rows_in_default
from gateway.supervision import Beat, no_beat
from gateway.tables.core import chores

log = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 5.0
BATCH: Final = 200
CHANGES: Final = 1000
ERASURE_ATTEMPTS: Final = 5
NOTICE_ACCOUNTS: Final = 100
"""Accounts whose notices are found together."""
NIGHT: Final = timedelta(hours=3, minutes=17)
"""Time of day, in UTC, of the tasks that take long."""

CALENDAR: Final = Author("calendar", "system")
"""Author of what is done because of its date."""

_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ScheduledTask:
    """A task with its interval, aligned to multiples of it: full hours, UTC midnights."""

    name: str
    every: timedelta
    run: Callable[[], Awaitable[None]]
    delay: timedelta = timedelta(0)
    """Delay from the start of each interval, so that other work has ended by then."""

    def next_due(self, now: datetime) -> datetime:
        """Return the next multiple of the interval since 1970, plus the delay."""
        every = self.every / timedelta(microseconds=1)
        since = (now - self.delay).timestamp() * 1e6
        start = datetime.fromtimestamp((since // every + 1) * every / 1e6, UTC)
        return start + self.delay


class Scheduler:
    """Runs tasks when they are due, concurrently: the nightly reconciliation takes long and must
    not delay tasks that run every minute."""

    def __init__(self, database: Database, tasks: Sequence[ScheduledTask]) -> None:
        self._database = database
        self._tasks = tasks
        self._running: dict[str, asyncio.Task[None]] = {}
        self.runs = {task.name: TaskRun() for task in tasks}
        """Last run of each task in this process."""

    async def run(self, beat: Beat = no_beat) -> None:
        """Start due tasks until cancelled. A task that fails runs again when it is next due.

        If this loop fails, tasks that it has started continue.
        """
        try:
            while True:
                try:
                    known = await self._database.read(due_times)
                    for task in self._tasks:
                        await self._start_if_due(task, known.get(task.name, _LONG_AGO))
                except OUTAGE as error:
                    log.warning("scheduled tasks are put off: %s", type(error).__name__)
                beat()
                await asyncio.sleep(CHECK_EVERY_S)
        except asyncio.CancelledError:
            for running in self._running.values():
                running.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            raise

    async def _start_if_due(self, task: ScheduledTask, due_at: datetime) -> None:
        if due_at > datetime.now(UTC) or task.name in self._running:
            return
        if await self._database.write(functools.partial(claim, task=task)):
            running = asyncio.create_task(self._run(task), name=f"scheduled {task.name}")
            self._running[task.name] = running
            running.add_done_callback(lambda _: self._running.pop(task.name, None))

    async def _run(self, task: ScheduledTask) -> None:
        started = time.monotonic()
        try:
            await task.run()
        except Exception:  # a boundary: one task must not stop the others
            log.exception("scheduled task %s failed", task.name)
            metrics.CHORES.labels(task.name, "failed").inc()
            self._note_run(task, started, failed=True)
            return
        metrics.CHORES.labels(task.name, "done").inc()
        metrics.CHORE_SECONDS.labels(task.name).set(time.monotonic() - started)
        self._note_run(task, started, failed=False)

    def _note_run(self, task: ScheduledTask, started: float, *, failed: bool) -> None:
        took_ms = round((time.monotonic() - started) * 1000)
        self.runs[task.name] = TaskRun(time.time_ns() // 1_000_000, took_ms, failed)


def claim(connection: Connection, task: ScheduledTask, now: datetime | None = None) -> bool:
    """Claim a task if it is due, so that no other gateway runs it; True if this gateway owns it.

    A task that has never run is due.
    """
    now = now or datetime.now(UTC)
    made = upsert(connection, chores).values(name=task.name, due_at=now)
    connection.execute(made.on_conflict_do_nothing())
    moved = connection.execute(
        update(chores)
        .where(chores.c.name == task.name, chores.c.due_at <= now)
        .values(due_at=task.next_due(now))
    )
    return bool(moved.rowcount)


def due_times(connection: Connection) -> dict[str, datetime]:
    """Return when each task is next due; tasks that have never run are absent."""
    return {row.name: row.due_at for row in connection.execute(select(chores))}


def credit_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Give monthly allowances, and expire lots."""
    return (
        ScheduledTask("allowances", MINUTE, _in_batches(database, give_allowances, BATCH)),
        ScheduledTask("expiry", MINUTE, _in_batches(database, expire_lots, BATCH)),
    )


def usage_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Build the rollup of each minute and hour once it has closed, and of each day once its hours
    are."""
    hours = _in_batches(database, build_due, HOURS_MAX)
    days = _in_batches(database, _build_days, DAYS_MAX)

    async def build() -> None:
        closed_at = await database.slow_write(wait_for_bookings)
        await _in_batches(database, functools.partial(_build_minutes, closed_at), MINUTES_MAX)()
        await hours()
        await days()

    return (ScheduledTask("rollups", MINUTE, build, delay=CLOSED_AFTER + timedelta(seconds=5)),)


def _build_minutes(
    closed_at: datetime, connection: Connection, now: datetime, *, limit: int
) -> int:
    return build_due_minutes(connection, closed_at, limit=limit)


def _build_days(connection: Connection, now: datetime, *, limit: int) -> int:
    return build_due_days(connection, limit=limit)


def erasure_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Erase deleted rows, which can contain prompts, from SQLite's write-ahead log.

    If the log is in use, the next run tries again.
    """

    async def empty() -> None:
        for _ in range(ERASURE_ATTEMPTS):
            if await asyncio.to_thread(database.empty_log):
                return
            await asyncio.sleep(1)
        log.warning("could not empty the write-ahead log: it is in use by a reader")

    return (ScheduledTask("erasure", MINUTE, empty),)


def aside_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Delete obsolete notes on rows set aside."""

    async def tidy_notes() -> None:
        await database.write(
            lambda connection: delete_obsolete_notes(connection, datetime.now(UTC))
        )

    return (ScheduledTask("set aside", MINUTE, tidy_notes),)


def price_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Delete what no gateway needs from the journal of price changes."""
    return (ScheduledTask("price changes", HOUR, _in_batches(database, _delete_changes, CHANGES)),)


def _delete_changes(connection: Connection, now: datetime, *, limit: int) -> int:
    return delete_old_changes(connection, limit=limit)


def reconciliation_tasks(
    database: Database, provider: PaymentProvider | None
) -> tuple[ScheduledTask, ...]:
    """Reconcile the books every night, including the payment provider's payments."""

    async def reconcile() -> None:
        try:
            found = await run_reconciliation(database, provider)
        except Conflict as error:
            log.info("the nightly reconciliation is left out: %s", error)
            return
        for finding in found.findings:
            log.error("reconciliation failed: %s", finding)

    return (ScheduledTask("reconcile", timedelta(days=1), reconcile, delay=NIGHT),)


def upstream_tasks(
    database: Database, live: LiveCatalog, environ: Mapping[str, str]
) -> tuple[ScheduledTask, ...]:
    """Compare the catalog every night with what upstreams publish, if their credential is set."""

    async def check() -> None:
        found, asked = await check_upstreams(live.entries(), environ)
        metrics.UPSTREAMS_CHECKED.set(asked)
        for level in ("error", "warning"):
            count = sum(finding.level == level for finding in found)
            metrics.UPSTREAM_FINDINGS.labels(level).set(count)
        errors = [finding for finding in found if finding.level == "error"]
        for finding in errors:
            log.error("upstream of %s: %s", finding.model, finding.message)
        if errors:
            await database.slow_write(lambda c: publish(c, [upstreams_changed(errors)]))

    return (ScheduledTask("upstreams", timedelta(days=1), check, delay=NIGHT),)


def recount_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Repair counts of open requests, which gateways of an earlier version do not maintain."""

    async def repair() -> None:
        found = await database.slow(lambda connection: list(miscounts(connection)))
        ids = sorted({wrong.account_id for wrong in found})
        for start in range(0, len(ids), BATCH):
            some = ids[start : start + BATCH]
            await database.slow_write(functools.partial(recount, ids=some))
        if ids:
            log.warning("corrected the counts of open requests of %d accounts", len(ids))

    return (ScheduledTask("open requests", HOUR, repair),)


def notice_tasks(database: Database, *, credit_low_nanos: int | None) -> tuple[ScheduledTask, ...]:
    """Write notices that are due."""
    due = functools.partial(due_notices, credit_low_nanos=credit_low_nanos)
    prices = functools.partial(price_notices, cache=PriceCache())
    return (
        ScheduledTask("notices", MINUTE, _telling(database, due)),
        ScheduledTask("price notices", timedelta(minutes=15), _telling(database, prices)),
    )


def partition_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Create the partitions of the next months, and watch the default ones. Only on PostgreSQL."""

    async def create() -> None:
        now = datetime.now(UTC)
        for month in await database.slow(lambda connection: missing_months(connection, now)):
            try:
                await database.slow_write(functools.partial(create_month, month=month))
            except OperationalError as error:
                # There are months of time left, and bookings must not wait for this.
                log.warning("the partitions of %s are not created yet: %s", month, error.orig)
        for table, rows in (await database.slow(rows_in_default)).items():
            metrics.DEFAULT_PARTITION_ROWS.labels(table).set(rows)
            if rows:
                log.warning("%s has %d rows outside of its monthly partitions", table, rows)

    return (ScheduledTask("partitions", HOUR, create),)


def close_tasks(database: Database) -> tuple[ScheduledTask, ...]:
    """Close months that have ended."""

    async def close() -> None:
        now = datetime.now(UTC)
        for period in await database.slow(list_periods):
            if period.state == "closed" or period.month >= month_of(now - SETTLED_AFTER):
                continue
            try:
                await asyncio.to_thread(close_month, database, period.month, author=CALENDAR)
            except ValueError as error:
                # A row whose name is not a month: reconciliation reports it; the others are closed.
                log.error("%r cannot be closed: %s", period.month, error)
            else:
                log.info("%s is closed", period.month)

    return (ScheduledTask("close", timedelta(days=1), close, delay=NIGHT),)


def _telling(
    database: Database, find: Callable[[Connection, Sequence[int], datetime], Sequence[Notice]]
) -> Callable[[], Awaitable[None]]:
    """Return a task that finds notices and writes them, for a page of accounts at a time."""

    async def tell(ids: Sequence[int]) -> None:
        now = datetime.now(UTC)
        found = await database.slow(lambda connection: find(connection, ids, now))
        if found:
            await database.slow_write(lambda connection: publish(connection, found))

    async def tell_all() -> None:
        after = OPERATOR - 1
        while ids := await database.slow(
            functools.partial(subscribed_accounts, after=after, limit=NOTICE_ACCOUNTS)
        ):
            try:
                await tell(ids)
            except OUTAGE:
                raise
            except Exception:
                log.exception("notices of %d accounts could not be found together", len(ids))
                for account_id in ids:
                    await _alone(tell, account_id)
            after = ids[-1]

    return tell_all


async def _alone(tell: Callable[[Sequence[int]], Awaitable[None]], account_id: int) -> None:
    try:
        await tell([account_id])
    except OUTAGE:
        raise
    except Exception:  # a row that cannot be read must not stop the notices of other accounts
        log.exception("notices of account %d could not be found", account_id)


class _Batched(Protocol):
    """Processes at most ``limit`` rows; returns their number."""

    def __call__(self, connection: Connection, now: datetime, *, limit: int) -> int: ...


def _in_batches(database: Database, work: _Batched, limit: int) -> Callable[[], Awaitable[None]]:
    """Return a task that calls ``work`` in short transactions until nothing is left."""

    async def do() -> None:
        did = limit
        while did == limit:
            did = await database.slow_write(
                lambda connection: work(connection, datetime.now(UTC), limit=limit)
            )

    return do
