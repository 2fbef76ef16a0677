"""Finds what fell between two stools: holds that the queue does not know, and those out of time.

SQL is the truth. Whatever is held is either in the queue, or put there again, or closed; so every
accepted request ends, whoever died in between. Any number of gateways may sweep at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Final

from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError

from gateway import metrics
from gateway.database import Database
from gateway.ledger.holds import OpenHold, forget_old, open_holds, overdue_holds
from gateway.requests.dispatch import Dispatch
from gateway.requests.settle import Settler
from gateway.settings import Settings
from gateway.workflows.flows import Flows
from workers.contract.jobs import decode_job

log = logging.getLogger(__name__)

UNTOUCHED_S: Final = 2.0
"""Younger holds are still on their way into the queue."""
GRACE_S: Final = 20.0
"""Beyond its deadline a request has this long for its outcome to arrive: a lease and a beat."""
CHUNK: Final = 500
FORGET_EVERY: Final = 60


class Sweeper:
    def __init__(
        self,
        *,
        database: Database,
        dispatch: Dispatch,
        settler: Settler,
        flows: Flows,
        settings: Settings,
    ) -> None:
        self._flows = flows
        self._database = database
        self._dispatch = dispatch
        self._settler = settler
        self._settings = settings

    async def run(self) -> None:
        """Sweep for ever, and clear out now and then what has been kept long enough."""
        rounds = 0
        while True:
            try:
                await self.requeue_lost()
                await self.expire_overdue()
                await self._flows.stop_left_over()
                if rounds % FORGET_EVERY == 0:
                    await self.forget()
            except (RedisError, OSError, TimeoutError, DBAPIError) as error:
                log.warning("sweep interrupted, trying again: %s", type(error).__name__)
            rounds += 1
            await asyncio.sleep(self._settings.sweep_interval_s)

    async def requeue_lost(self) -> int:
        """Queue every open request again that the queue has lost; return how many."""
        before = datetime.now(UTC) - timedelta(seconds=UNTOUCHED_S)
        total = 0
        after = None
        while True:
            chunk = await self._database.read(
                functools.partial(open_holds, accepted_before=before, after=after, limit=CHUNK)
            )
            by_model: defaultdict[str, list[OpenHold]] = defaultdict(list)
            for found in chunk:
                by_model[found.model].append(found)
            for model, holds in by_model.items():
                total += await self._requeue(model, holds)
            if len(chunk) < CHUNK:
                break
            after = chunk[-1].request_id
        if total:
            metrics.REQUEUED.inc(total)
            log.warning("%d open requests were unknown to the queue and are queued again", total)
        return total

    async def _requeue(self, model: str, holds: list[OpenHold]) -> int:
        missing = await self._dispatch.missing(model, [found.request_id for found in holds])
        lost = [(found, decode_job(found.job)) for found in holds if found.request_id in missing]
        # A workflow is never queued itself: its steps are.
        flows = await self._flows.sweep(found.request_id for found, job in lost if job.workflow)
        entries = [self._dispatch.entry(job, found.job) for found, job in lost if not job.workflow]
        return flows + (await self._dispatch.requeue(model, entries) if entries else 0)

    async def expire_overdue(self) -> int:
        """Release what is past its deadline and still open; return how many."""
        before = datetime.now(UTC) - timedelta(seconds=GRACE_S)
        overdue = await self._database.read(
            lambda connection: overdue_holds(connection, deadline_before=before, limit=CHUNK)
        )
        for request_id in overdue:
            await self._settler.release(request_id, status="expired", reason="deadline")
        return len(overdue)

    async def forget(self) -> None:
        """Drop outputs and idempotency keys that have been kept for their time."""
        now = datetime.now(UTC)
        keys_before = now - timedelta(days=self._settings.idempotency_retention_days)
        await self._database.write(
            lambda connection: forget_old(connection, now=now, keys_before=keys_before)
        )
