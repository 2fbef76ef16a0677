"""Runs batches: each gateway leases batches that no other runs, and completes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from gateway.accounts.keys import key_by_id
from gateway.aside import Aside
from gateway.batches import store
from gateway.batches.endpoint import BatchEndpoint
from gateway.batches.run import Run
from gateway.batches.store import Batch, LeaseLost
from gateway.batches.stored import StoredOutputs
from gateway.errors import TollgateError
from gateway.files.store import Files
from gateway.requests.service import Requests
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE
from gateway.supervision import Beat, no_beat
from workers.contract.blobs import BlobError

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0


class Runner:
    def __init__(
        self,
        *,
        database: Database,
        files: Files,
        requests: Requests,
        endpoints: Mapping[str, BatchEndpoint],
        stored: StoredOutputs,
        settings: Settings,
    ) -> None:
        self._database = database
        self._files = files
        self._requests = requests
        self.endpoints = endpoints
        """Endpoints that batches can call, by path."""
        self._stored = stored
        self._settings = settings
        self._aside = Aside(database)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of batches that this process runs."""
        return len(self._running)

    def wake(self) -> None:
        """Look for batches immediately."""
        self._news.set()

    async def run(self, beat: Beat = no_beat) -> None:
        """Claim and run batches, as many as one gateway may, until cancelled.

        If this loop fails, the batches that it started continue.
        """
        try:
            while True:
                self._news.clear()
                for batch in await self._claim():
                    task = asyncio.create_task(self._run(batch), name=batch.id)
                    self._running[batch.id] = task
                beat()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._news.wait()
        except asyncio.CancelledError:
            tasks = tuple(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _claim(self) -> list[Batch]:
        free = self._settings.batches_running - len(self._running)
        lease = timedelta(seconds=self._settings.batch_lease_s)
        if free <= 0:
            return []
        now = datetime.now(UTC)
        try:
            waiting = await self._database.read(
                lambda connection: store.any_unclaimed(connection, now=now)
            )
            if not waiting:
                return []
            return await self._database.write(
                lambda connection: store.claim(connection, now=now, lease=lease, count=free)
            )
        except OUTAGE as error:
            log.warning("could not claim batches: %s", type(error).__name__)
            return []

    async def _run(self, batch: Batch) -> None:
        """Run one batch. If that fails, it is claimed again after its lease has expired."""
        try:
            await self._try(batch)
        except asyncio.CancelledError:
            # The gateway is stopping; let another one claim the batch immediately.
            with contextlib.suppress(*OUTAGE):
                await self._database.write(lambda connection: store.release(connection, batch))
            raise
        finally:
            self._running.pop(batch.id, None)
            self._news.set()

    async def _try(self, batch: Batch) -> None:
        try:
            key = await self._database.read(lambda connection: key_by_id(connection, batch.key_id))
            run = Run(
                batch,
                key,
                self.endpoints[batch.endpoint],
                database=self._database,
                files=self._files,
                requests=self._requests,
                stored=self._stored,
                settings=self._settings,
            )
            await run.run()
        except* LeaseLost:
            log.warning("lost the lease of %s to another gateway", batch.id)
        except* (*OUTAGE, BlobError, TollgateError) as group:
            names = {type(error).__name__ for error in group.exceptions}
            log.warning("postponed %s: %s", batch.id, ", ".join(sorted(names)))
        except* Exception as group:  # a boundary: the other batches continue
            log.exception("%s failed, retrying later", batch.id)
            await self._postpone(batch, group.exceptions[0])

    async def _postpone(self, batch: Batch, error: Exception) -> None:
        """Set aside a batch whose run failed; the pause doubles with each failure."""
        with contextlib.suppress(*OUTAGE):
            times = await self._aside.count("batch", batch.id, error)
            pause = timedelta(seconds=self._settings.batch_lease_s * 2 ** min(times, 10))
            until = datetime.now(UTC) + min(pause, store.PAUSE_MAX)
            await self._database.write(
                lambda connection: store.postpone(connection, batch, until=until)
            )
