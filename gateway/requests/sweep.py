"""Finds open requests that would be lost otherwise: unknown to the queue, or past their deadline.

SQL is the truth. Whatever is held is in the queue, or queued again, or closed; so every accepted
request ends, whichever process dies. One gateway at a time sweeps, under a lease. A key in the
queue server, which is gone when the server was wiped, decides whether every hold is checked or only
the young ones and, by turns, a part of the others. A row that cannot be worked on is set aside.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
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
"""Younger holds are still on their way into the queue."""
YOUNG_S: Final = 120.0
"""Holds up to this age are checked in every sweep: what can fail between hold and queue has failed
by then, and a queue server that lost its last seconds has been used again."""
GRACE_S: Final = 20.0
"""Time after its deadline in which the outcome of a request may arrive: a lease and a beat."""
CHUNK: Final = 1000
"""Holds checked at a time."""
TURN: Final = 2000
"""Older holds checked in one sweep, by turns."""
JOBS: Final = 100
"""Jobs read at a time, of holds that the queue lost."""
OVERDUE: Final = 250
"""Overdue requests that are closed at a time."""
OVERDUE_PAGES: Final = 20
LEASE_S: Final = 5.0
"""Time beyond two intervals after which another gateway takes over the sweep."""
WHOLE: Final = b"whole"
"""Value of the mark while all holds are checked, after a wipe; then it is the place of the turn."""


class Sweeper:
    def __init__(
        self,
        *,
        database: Database,
        redis: Redis,
        dispatch: Dispatch,
        settler: Settler,
        flows: WorkflowRunner,
        aside: Aside,
        settings: Settings,
    ) -> None:
        self._flows = flows
        self._database = database
        self._redis = redis
        self._dispatch = dispatch
        self._settler = settler
        self._aside = aside
        self._interval_s = settings.sweep_interval_s
        self._expired_at = -math.inf
        self._mark = f"{settings.namespace}:sweep"
        self._lease = Lease(database, "sweep", held_s=2 * self._interval_s + LEASE_S)

    async def run(self, beat: Beat = no_beat) -> None:
        """Sweep until cancelled, whenever this gateway has the lease."""
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
        """Sweep once, if this gateway has the lease or can take it."""
        if await self._lease.acquire():
            await self.sweep(beat)

    async def sweep(self, beat: Beat = no_beat) -> None:
        """Close what is overdue, whatever the queue does; then queue what it has lost."""
        await self.expire_overdue(beat)
        await self.requeue_lost(beat)
        await self._flows.sweep_idle()
        await self._flows.stop_orphans()

    # --- What the queue lost ----------------------------------------------------------------------

    async def requeue_lost(self, beat: Beat = no_beat) -> int:
        """Queue open requests again that the queue has lost; return how many."""
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
            log.warning("%d open requests were unknown to the queue and are queued again", total)
        return total

    async def _check_all(self, until: RequestId, beat: Beat) -> int:
        """Check every hold: the queue server is new, was wiped, or the last one to do this died.

        The mark stands from before the first hold is read; a wipe in between takes it away again.
        """
        await self._redis.set(self._mark, WHOLE, ex=LIVE_S)
        total = await self._check(RequestId(""), until, beat)
        await self._redis.set(self._mark, b"", ex=LIVE_S, xx=True)
        return total

    async def _check(self, after: RequestId, until: RequestId, beat: Beat) -> int:
        """Check the holds between two ids, in bounded batches."""
        total = 0
        while True:
            if not await self._lease.renew_if_needed():
                raise TimeoutError("another gateway sweeps by now")
            found = await self._ids(after, until, CHUNK)
            total += await self._requeue(found)
            beat()
            if len(found) < CHUNK:
                break
            after = found[-1].request_id
            if time.monotonic() - self._expired_at > self._interval_s:
                # After a wipe of a long queue this takes minutes; deadlines pass meanwhile.
                await self.expire_overdue(beat)
        return total

    async def _check_turn(self, after: RequestId, until: RequestId, beat: Beat) -> int:
        """Check some of the older holds, from where the last turn ended."""
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
            by_model[one.model].append(one.request_id)
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
                    # It is never queued itself: its steps are.
                    workflows.append(row.request_id)
                else:
                    entries.append(self._dispatch.entry(job, row.job))
            except Exception as error:  # a boundary: of another version, or damaged
                await self._aside.note("request", row.request_id, error)
        count = await self._flows.sweep(workflows)
        return count + (await self._dispatch.requeue(model, entries) if entries else 0)

    # --- What is out of time ----------------------------------------------------------------------

    async def expire_overdue(self, beat: Beat = no_beat) -> int:
        """Release what is past its deadline and still open; return how many were tried."""
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
        """Release one request; one that cannot be closed is set aside and stops no other."""
        try:
            await self._settler.give_up(request_id, status="expired", reason="deadline")
        except (Unavailable, *OUTAGE) as error:
            log.warning("%s is released later: %s", request_id, type(error).__name__)
        except Exception as error:
            await self._aside.note("request", request_id, error)
