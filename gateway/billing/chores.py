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
from sqlalchemy.exc import DBAPIError

from gateway import metrics
from gateway.batches.files import Files
from gateway.billing.audit import audit_and_keep
from gateway.billing.close import SETTLED_AFTER, close_month, list_periods
from gateway.billing.rollups import CLOSED_AFTER, HOUR, HOURS_MAX, build_due
from gateway.database import Database
from gateway.ledger.expiry import expire_lots, give_allowances
from gateway.ledger.periods import month_of
from gateway.media.store import MediaStore
from gateway.payments.provider import PaymentProvider
from gateway.tables import chores
from gateway.voices.store import Voices

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 5.0
BATCH: Final = 200
NIGHT: Final = timedelta(hours=3, minutes=17)
"""When, in UTC, what takes long is done."""

_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Chore:
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


class Chores:
    def __init__(self, database: Database, chores: Sequence[Chore]) -> None:
        self._database = database
        self._chores = chores

    async def run(self) -> None:
        """Do what is due, for ever; what fails is logged and tried again when it is due again."""
        while True:
            try:
                known = await self._database.read(due_times)
                for chore in self._chores:
                    due = known.get(chore.name, _LONG_AGO) <= datetime.now(UTC)
                    if due and await self._database.write(functools.partial(take, chore=chore)):
                        await self._do(chore)
            except (DBAPIError, OSError) as error:
                log.warning("chores are put off: %s", type(error).__name__)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _do(self, chore: Chore) -> None:
        started = time.monotonic()
        try:
            await chore.do()
        except Exception:  # a boundary: one chore must not keep the others from being done
            log.exception("the chore %s failed", chore.name)
            metrics.CHORES.labels(chore.name, "failed").inc()
            return
        metrics.CHORES.labels(chore.name, "done").inc()
        metrics.CHORE_SECONDS.labels(chore.name).set(time.monotonic() - started)


def take(connection: Connection, chore: Chore, now: datetime | None = None) -> bool:
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


def credit_chores(database: Database) -> tuple[Chore, ...]:
    """Allowances at the start of a month, and the end of what has expired."""

    return (
        Chore("allowances", timedelta(minutes=1), _in_batches(database, give_allowances, BATCH)),
        Chore("expiry", timedelta(minutes=1), _in_batches(database, expire_lots, BATCH)),
    )


def usage_chores(database: Database) -> tuple[Chore, ...]:
    """The rollup of each hour, once it has closed."""
    build = _in_batches(database, build_due, HOURS_MAX)
    return (Chore("rollups", HOUR, build, delay=CLOSED_AFTER + timedelta(seconds=5)),)


def file_chores(files: Files) -> tuple[Chore, ...]:
    """The end of files whose time is over."""
    return (Chore("files", timedelta(minutes=1), files.clear_ended),)


def media_chores(media: MediaStore) -> tuple[Chore, ...]:
    """The end of what requests brought and made, once its time is over."""
    return (Chore("media", timedelta(minutes=1), media.clear_ended),)


def voice_chores(voices: Voices) -> tuple[Chore, ...]:
    """The end of voices and consents that were deleted, or never came to be."""
    return (Chore("voices", timedelta(minutes=1), voices.clear_ended),)


def audit_chores(database: Database, provider: PaymentProvider | None) -> tuple[Chore, ...]:
    """The nightly proof of the books, by the payment provider's list too."""

    async def reconcile() -> None:
        found = await audit_and_keep(database, provider)
        for finding in found.findings:
            log.error("the books do not agree: %s", finding)

    return (Chore("reconcile", timedelta(days=1), reconcile, delay=NIGHT),)


def close_chores(database: Database) -> tuple[Chore, ...]:
    """The close of months that have ended."""

    async def close() -> None:
        now = datetime.now(UTC)
        for period in await database.read(list_periods):
            if period.month < month_of(now - SETTLED_AFTER) and period.state != "closed":
                await asyncio.to_thread(close_month, database, period.month, actor="calendar")
                log.info("%s is closed", period.month)

    return (Chore("close", timedelta(days=1), close, delay=NIGHT),)


class _Batched(Protocol):
    """Does at most ``limit`` of what is to be done; returns how many it did."""

    def __call__(self, connection: Connection, now: datetime, *, limit: int) -> int: ...


def _in_batches(database: Database, work: _Batched, limit: int) -> Callable[[], Awaitable[None]]:
    """Do all of a work, in transactions that stay short."""

    async def do() -> None:
        did = limit
        while did == limit:
            did = await database.write(
                lambda connection: work(connection, datetime.now(UTC), limit=limit)
            )

    return do
