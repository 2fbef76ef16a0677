"""Chores: what the books need now and then, done by one of the gateways.

Whoever moves a chore's ``due_at`` has it; should that gateway die while at it, the chore is due
again after its next interval. So a chore must be one that may be done again, or by two at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway import metrics
from gateway.aside import tidy
from gateway.billing.audit import audit_and_keep
from gateway.billing.statements.close import SETTLED_AFTER, close_month, list_periods
from gateway.billing.usage.rollups import CLOSED_AFTER, HOUR, HOURS_MAX, build_due
from gateway.files.retention import MediaStore
from gateway.files.store import Files
from gateway.ledger.concurrency import count_again, miscounts
from gateway.ledger.expiry import expire_lots, give_allowances
from gateway.ledger.holds import forget_keys, forget_outputs
from gateway.ledger.periods import month_of
from gateway.payments.provider import PaymentProvider
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE
from gateway.supervision import Beat, unheard
from gateway.tables.core import chores
from gateway.voices.store import Voices
from gateway.webhooks.deliveries import forget_ended

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 5.0
BATCH: Final = 200
ERASURE_ATTEMPTS: Final = 5
FORGET_BATCH: Final = 500
"""Outputs deleted in one transaction: some 10 ms of SQLite's only writer."""
NIGHT: Final = timedelta(hours=3, minutes=17)
"""When, in UTC, what takes long is done."""

_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ScheduledTask:
    """Something to do every so often; on the hour and on the day where the interval is that."""

    name: str
    every: timedelta
    do: Callable[[], Awaitable[None]]
    delay: timedelta = timedelta(0)
    """From the start of each interval, for what others must have ended before."""

    def next_due(self, now: datetime) -> datetime:
        """Give the next multiple of the interval since 1970, and the delay."""
        every = self.every / timedelta(microseconds=1)
        since = (now - self.delay).timestamp() * 1e6
        start = datetime.fromtimestamp((since // every + 1) * every / 1e6, UTC)
        return start + self.delay


class Scheduler:
    """Does chores when they are due, each beside the others: the nightly proof takes long, and
    what expires every minute does not wait for it."""

    def __init__(self, database: Database, chores: Sequence[ScheduledTask]) -> None:
        self._database = database
        self._chores = chores
        self._doing: dict[str, asyncio.Task[None]] = {}

    async def run(self, beat: Beat = unheard) -> None:
        """Do what is due until cancelled; a chore that fails is tried again when it is due again.

        Should this loop fail, the chores that it began go on.
        """
        try:
            while True:
                try:
                    known = await self._database.read(due_times)
                    for chore in self._chores:
                        await self._begin_if_due(chore, known.get(chore.name, _LONG_AGO))
                except OUTAGE as error:
                    log.warning("chores are put off: %s", type(error).__name__)
                beat()
                await asyncio.sleep(LOOK_EVERY_S)
        except asyncio.CancelledError:
            for task in self._doing.values():
                task.cancel()
            await asyncio.gather(*self._doing.values(), return_exceptions=True)
            raise

    async def _begin_if_due(self, chore: ScheduledTask, due_at: datetime) -> None:
        if due_at > datetime.now(UTC) or chore.name in self._doing:
            return
        if await self._database.write(functools.partial(take, chore=chore)):
            task = asyncio.create_task(self._do(chore), name=f"chore {chore.name}")
            self._doing[chore.name] = task
            task.add_done_callback(lambda _: self._doing.pop(chore.name, None))

    async def _do(self, chore: ScheduledTask) -> None:
        started = time.monotonic()
        try:
            await chore.do()
        except Exception:  # a boundary: one chore must not keep the others from being done
            log.exception("the chore %s failed", chore.name)
            metrics.CHORES.labels(chore.name, "failed").inc()
            return
        metrics.CHORES.labels(chore.name, "done").inc()
        metrics.CHORE_SECONDS.labels(chore.name).set(time.monotonic() - started)


def take(connection: Connection, chore: ScheduledTask, now: datetime | None = None) -> bool:
    """Take a chore if it is due, so that no other gateway does; one never done before is."""
    now = now or datetime.now(UTC)
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    connection.execute(insert(chores).values(name=chore.name, due_at=now).on_conflict_do_nothing())
    moved = connection.execute(
        update(chores)
        .where(chores.c.name == chore.name, chores.c.due_at <= now)
        .values(due_at=chore.next_due(now))
    )
    return bool(moved.rowcount)


def due_times(connection: Connection) -> dict[str, datetime]:
    """Say when each chore is due next; those never done before are absent."""
    return {row.name: row.due_at for row in connection.execute(select(chores))}


def credit_chores(database: Database) -> tuple[ScheduledTask, ...]:
    """Allowances at the start of a month, and the end of what has expired."""

    return (
        ScheduledTask(
            "allowances", timedelta(minutes=1), _in_batches(database, give_allowances, BATCH)
        ),
        ScheduledTask("expiry", timedelta(minutes=1), _in_batches(database, expire_lots, BATCH)),
    )


def usage_chores(database: Database) -> tuple[ScheduledTask, ...]:
    """The rollup of each hour, once it has closed."""
    build = _in_batches(database, build_due, HOURS_MAX)
    return (ScheduledTask("rollups", HOUR, build, delay=CLOSED_AFTER + timedelta(seconds=5)),)


def erasure_chores(database: Database) -> tuple[ScheduledTask, ...]:
    """The end of deleted rows in SQLite's write-ahead log, where jobs with prompts are among them.

    Of a log that is in use at the moment the next round takes care.
    """

    async def empty() -> None:
        for _ in range(ERASURE_ATTEMPTS):
            if await asyncio.to_thread(database.empty_log):
                return
            await asyncio.sleep(1)
        log.warning("the write-ahead log could not be emptied: a reader holds it")

    return (ScheduledTask("erasure", timedelta(minutes=1), empty),)


def file_chores(files: Files) -> tuple[ScheduledTask, ...]:
    """The end of files whose time is over."""
    return (ScheduledTask("files", timedelta(minutes=1), files.delete_ended),)


def media_chores(media: MediaStore) -> tuple[ScheduledTask, ...]:
    """The end of what requests brought and made, once its time is over."""
    return (ScheduledTask("media", timedelta(minutes=1), media.delete_ended),)


def voice_chores(voices: Voices) -> tuple[ScheduledTask, ...]:
    """The end of voices and consents that were deleted, or never came to be."""
    return (ScheduledTask("voices", timedelta(minutes=1), voices.delete_ended),)


def sweep_chores(database: Database, *, keys_kept: timedelta) -> tuple[ScheduledTask, ...]:
    """The end of outputs and idempotency keys whose time is over, and of notes on what was set
    aside and has ended since."""

    def forget(connection: Connection, now: datetime, *, limit: int) -> int:
        done = forget_outputs(connection, now, limit=limit)
        # While either has a full batch left there is another round.
        return max(done, forget_keys(connection, now - keys_kept, limit=limit))

    async def tidy_notes() -> None:
        await database.write(lambda connection: tidy(connection, datetime.now(UTC)))

    return (
        ScheduledTask("outputs", timedelta(minutes=1), _in_batches(database, forget, FORGET_BATCH)),
        ScheduledTask("set aside", timedelta(minutes=1), tidy_notes),
    )


def audit_chores(database: Database, provider: PaymentProvider | None) -> tuple[ScheduledTask, ...]:
    """The nightly proof of the books, by the payment provider's list too."""

    async def reconcile() -> None:
        found = await audit_and_keep(database, provider)
        for finding in found.findings:
            log.error("the books do not agree: %s", finding)

    return (ScheduledTask("reconcile", timedelta(days=1), reconcile, delay=NIGHT),)


def count_chores(database: Database) -> tuple[ScheduledTask, ...]:
    """The repair of counts of open requests, which gateways of an earlier version get wrong."""

    async def repair() -> None:
        found = await database.slow(lambda connection: list(miscounts(connection)))
        ids = sorted({wrong.account_id for wrong in found})
        for start in range(0, len(ids), BATCH):
            some = ids[start : start + BATCH]
            await database.slow_write(functools.partial(count_again, ids=some))
        if ids:
            log.warning("open requests of %d accounts were counted again", len(ids))

    return (ScheduledTask("open requests", HOUR, repair),)


def webhook_chores(database: Database, *, days: float) -> tuple[ScheduledTask, ...]:
    """The end of webhook deliveries whose retention is over."""

    def forget(connection: Connection, now: datetime, *, limit: int) -> int:
        return forget_ended(connection, now - timedelta(days=days), limit=limit)

    return (ScheduledTask("webhooks", timedelta(minutes=5), _in_batches(database, forget, BATCH)),)


def close_chores(database: Database) -> tuple[ScheduledTask, ...]:
    """The close of months that have ended."""

    async def close() -> None:
        now = datetime.now(UTC)
        for period in await database.slow(list_periods):
            if period.state == "closed" or period.month >= month_of(now - SETTLED_AFTER):
                continue
            try:
                await asyncio.to_thread(close_month, database, period.month, actor="calendar")
            except ValueError as error:
                # A row that does not name a month: the audit reports it, the others are closed.
                log.error("%r cannot be closed: %s", period.month, error)
            else:
                log.info("%s is closed", period.month)

    return (ScheduledTask("close", timedelta(days=1), close, delay=NIGHT),)


class _Batched(Protocol):
    """Does at most ``limit`` of what is to be done; returns how many it did."""

    def __call__(self, connection: Connection, now: datetime, *, limit: int) -> int: ...


def _in_batches(database: Database, work: _Batched, limit: int) -> Callable[[], Awaitable[None]]:
    """Do all of a work, in transactions that stay short."""

    async def do() -> None:
        did = limit
        while did == limit:
            did = await database.slow_write(
                lambda connection: work(connection, datetime.now(UTC), limit=limit)
            )

    return do
