"""The sweeper: re-enqueues open requests that the queue lost, and closes overdue ones.

SQL is the truth: every held request is queued, re-enqueued or closed, so every accepted request
ends, whichever process crashes. One gateway at a time sweeps, under a lease. If a marker key on the
queue server is missing, the server was wiped and all holds are checked; otherwise only the young
ones and, in turns, a part of the older ones. Rows that cannot be processed are set aside.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Container, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, cast

from redis.asyncio import Redis

from gateway import metrics
from gateway.aside import Aside
from gateway.dispatch.enqueue import Dispatch
from gateway.errors import Unavailable
from gateway.ids import first_request_id
from gateway.leases import Lease
from gateway.ledger.holds import OpenId, overdue_holds, read_jobs, read_open_ids
from gateway.requests.settle import Settler
from gateway.settings import Settings
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.workflows.runner import WorkflowRunner
from workers.contract.jobs import RequestId, decode_job
from workers.contract.queue import LIVE_S, QueueEntry

log = logging.getLogger(__name__)

UNTOUCHED_S: Final = 2.0
"""Minimum age of a checked hold. Younger ones are still being enqueued."""
YOUNG_S: Final = 120.0
"""Maximum age of holds that every sweep checks. By then an enqueue has failed or succeeded, and a
queue server that lost its last seconds of data has restarted."""
GRACE_S: Final = 20.0
"""Time after a deadline in which an outcome can still arrive: one lease and one heartbeat."""
CHUNK: Final = 1000
"""Number of holds per check."""
TURN: Final = 2000
"""Number of older holds checked in one sweep."""
JOBS: Final = 100
"""Number of lost jobs read and enqueued at a time."""
OVERDUE: Final = 250
"""Number of overdue requests closed at a time."""
OVERDUE_PAGES: Final = 20
LEASE_S: Final = 5.0
"""Time after two missed sweeps until another gateway takes over."""
WHOLE: Final = b"whole"
"""Value of the marker while all holds are checked. Otherwise it is the last id of the turn."""


class Sweeper:
    """``in_doubt`` has the requests that this gateway is about to close, so they are not run."""

    def __init__(
        self,
        *,
        database: Database,
        redis: Redis,
        dispatch: Dispatch,
        settler: Settler,
        flows: WorkflowRunner,
        aside: Aside,
        in_doubt: Container[RequestId],
        settings: Settings,
    ) -> None:
        self._flows = flows
        self._in_doubt = in_doubt
        self._database = database
        self._redis = redis
        self._dispatch = dispatch
        self._settler = settler
        self._aside = aside
        self._interval_s = settings.sweep_interval_s
        self._expired_at = -math.inf
        self._mark = _mark(settings.namespace)
        self._lease = Lease(database, "sweep", held_s=2 * self._interval_s + LEASE_S)

    async def run(self, beat: Beat = no_beat) -> None:
        """Sweep until cancelled, while this gateway holds the lease."""
        try:
            while True:
                try:
                    await self.turn(beat)
                except OUTAGE as error:
                    log.warning("sweep interrupted, trying again: %s", type(error).__name__)
                beat()
                await asyncio.sleep(self._interval_s)
        except asyncio.CancelledError:
            async with asyncio.timeout(1):
                await self._lease.release()
            raise

    async def turn(self, beat: Beat = no_beat) -> None:
        """Sweep once, if this gateway holds or can acquire the lease."""
        if await self._lease.acquire():
            await self.sweep(beat)

    async def sweep(self, beat: Beat = no_beat) -> None:
        """Close overdue requests, even if the queue is unreachable, then re-enqueue lost ones."""
        await self.expire_overdue(beat)
        await self.requeue_lost(beat)
        await self._flows.sweep_idle()
        await self._flows.stop_orphans()

    # --- Lost jobs --------------------------------------------------------------------------------

    async def requeue_lost(self, beat: Beat = no_beat) -> int:
        """Enqueue the open requests that the queue does not know. Return their number."""
        mark = cast(bytes | None, await self._redis.get(self._mark))
        now = datetime.now(UTC)
        until = first_request_id(now - timedelta(seconds=UNTOUCHED_S))
        if mark is None or mark == WHOLE:
            total = await self._check_all(until, beat)
        else:
            young = first_request_id(now - timedelta(seconds=YOUNG_S))
            total = await self._check(RequestId(young), until, beat)
            total += await self._check_turn(RequestId(mark.decode()), RequestId(young), beat)
        if total:
            metrics.REQUEUED.inc(total)
            log.warning("re-enqueued %d open requests that the queue did not know", total)
        return total

    async def _check_all(self, until: RequestId, beat: Beat) -> int:
        """Check every hold: the queue server is new or was wiped, or the last full check failed.

        The marker is set before the first hold is read, so a wipe during the check removes it.
        """
        await self._redis.set(self._mark, WHOLE, ex=LIVE_S)
        total = await self._check(RequestId(""), until, beat)
        await self._redis.set(self._mark, b"", ex=LIVE_S, xx=True)
        return total

    async def _check(self, after: RequestId, until: RequestId, beat: Beat) -> int:
        """Check the holds between two ids, in batches."""
        total = 0
        while True:
            if not await self._lease.renew_if_needed():
                raise TimeoutError("another gateway holds the lease")
            found = await self._ids(after, until, CHUNK)
            total += await self._requeue(found)
            beat()
            if len(found) < CHUNK:
                break
            after = found[-1].request_id
            if time.monotonic() - self._expired_at > self._interval_s:
                # After a long queue was wiped this takes minutes, and deadlines pass meanwhile.
                await self.expire_overdue(beat)
        return total

    async def _check_turn(self, after: RequestId, until: RequestId, beat: Beat) -> int:
        """Check some of the older holds, starting where the last turn ended."""
        total = 0
        for _ in range(TURN // CHUNK):
            found = await self._ids(after, until, CHUNK)
            total += await self._requeue(found)
            beat()
            after = found[-1].request_id if len(found) == CHUNK else RequestId("")
            if not after:
                break
        await self._redis.set(self._mark, after, ex=LIVE_S, xx=True)
        return total

    async def _ids(self, after: RequestId, until: RequestId, limit: int) -> list[OpenId]:
        return await self._database.read(
            lambda connection: read_open_ids(connection, after=after, until=until, limit=limit)
        )

    async def _requeue(self, found: Sequence[OpenId]) -> int:
        by_model: defaultdict[str, list[RequestId]] = defaultdict(list)
        for one in found:
            if one.request_id not in self._in_doubt:
                by_model[one.queue].append(one.request_id)
        total = 0
        for model, ids in by_model.items():
            missing = sorted(await self._dispatch.missing(model, ids))
            for start in range(0, len(missing), JOBS):
                total += await self._requeue_jobs(model, missing[start : start + JOBS])
        return total

    async def _requeue_jobs(self, model: str, ids: Sequence[str]) -> int:
        before = datetime.now(UTC) - timedelta(seconds=UNTOUCHED_S)
        rows = await self._database.read(lambda connection: read_jobs(connection, ids))
        entries: list[QueueEntry] = []
        workflows: list[RequestId] = []
        for row in rows:
            if row.accepted_at >= before:
                continue
            try:
                job = decode_job(row.job)
                if job.workflow:
                    # The steps of a workflow are queued, not the workflow.
                    workflows.append(row.request_id)
                else:
                    entries.append(self._dispatch.entry(job, row.job))
            except Exception as error:  # a boundary: a job of another version, or damaged
                await self._aside.note("request", row.request_id, error)
        count = await self._flows.sweep(workflows)
        return count + (await self._dispatch.requeue(model, entries) if entries else 0)

    # --- Overdue requests -------------------------------------------------------------------------

    async def expire_overdue(self, beat: Beat = no_beat) -> int:
        """Close open requests that are past their deadline. Return the number of attempts."""
        self._expired_at = time.monotonic()
        before = datetime.now(UTC) - timedelta(seconds=GRACE_S)
        after: tuple[datetime, str] | None = None
        total = 0
        for _ in range(OVERDUE_PAGES):
            page = await self._database.read(
                functools.partial(overdue_holds, deadline_before=before, after=after, limit=OVERDUE)
            )
            await asyncio.gather(*(self._expire(request_id) for _, request_id in page))
            beat()
            total += len(page)
            if len(page) < OVERDUE:
                break
            after = page[-1]
        return total

    async def _expire(self, request_id: RequestId) -> None:
        """Close a request; one that cannot be closed is set aside."""
        try:
            await self._settler.give_up(request_id, status="expired", reason="deadline")
        except (Unavailable, *OUTAGE) as error:
            log.warning(
                "could not close overdue %s, retrying: %s", request_id, type(error).__name__
            )
        except Exception as error:
            await self._aside.note("request", request_id, error)


async def check_all_soon(redis: Redis, namespace: str) -> None:
    """Let the next sweep, of whichever gateway, check every hold."""
    await redis.delete(_mark(namespace))


def _mark(namespace: str) -> str:
    return f"{namespace}:sweep"
