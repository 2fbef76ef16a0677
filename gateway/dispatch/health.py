"""The last known state of the queue server: the load of each queue, and the workers' models.

Checked before credit is held, so that a request that cannot run soon is refused without a hold. A
queue server that is slow or unreachable opens the circuit breaker: requests get 503 immediately
instead of a hold that waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

from redis.asyncio import Redis

from gateway.catalog.availability import availability, loads_soon
from gateway.catalog.schema import CatalogEntry
from gateway.dispatch.waiting import Waiting, Weight
from gateway.errors import TooManyRequests, Unavailable
from gateway.sql.outages import QUEUE_OUTAGE
from gateway.supervision import Beat, no_beat
from workers.contract.announcements import Announcement, Workers
from workers.contract.load import Load
from workers.contract.queue import loads

log = logging.getLogger(__name__)

REFRESH_S: Final = 0.5
START_REFRESH_S: Final = 0.1
"""Interval while no worker serves anything, or requests are about to be refused for want of one, so
that a worker that has just started is noticed quickly."""
PATIENCE_S: Final = 1.0
"""Timeout of a refresh; a slow queue server is worse than an unreachable one."""
STALE_S: Final = 3.0
"""Age of the last successful refresh beyond which the circuit breaker is open."""
_MARK_MS: Final = 60_000
RECENT_S: Final = 30.0
"""Time since a queue's last request within which the queue is refreshed."""


class QueueHealth:
    def __init__(
        self, redis: Redis, *, namespace: str, weight: Weight = lambda account: 1.0
    ) -> None:
        self._redis = redis
        self._weight = weight
        self._namespace = namespace
        self._workers = Workers(redis, namespace=namespace)
        self._asked: dict[str, float] = {}
        self._loads: dict[str, Load] = {}
        self._waiting: dict[str, Waiting] = {}
        self._announcements: tuple[Announcement, ...] = ()
        self._refreshed_at = -math.inf
        self._tried_at = -math.inf
        self._trying = asyncio.Lock()

    async def run(self, beat: Beat = no_beat) -> None:
        """Refresh until cancelled."""
        while True:
            await self.try_refresh()
            beat()
            serving = any(worker.models for worker in self._announcements)
            await asyncio.sleep(REFRESH_S if serving else START_REFRESH_S)

    async def try_refresh(self, older_than_s: float = 0.0) -> None:
        """Refresh if the last attempt is old enough. An outage is only logged."""
        async with self._trying:
            if time.monotonic() - self._tried_at < older_than_s:
                return
            self._tried_at = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self.refresh()
            except QUEUE_OUTAGE as error:
                log.warning("queue server does not respond: %s", type(error).__name__)

    async def refresh(self) -> None:
        """Read the state in a few round trips, however many models there are.

        A server that refuses writes (full, or a replica) cannot queue jobs, so it counts as
        unreachable.
        """
        await self._redis.set(f"{self._namespace}:watch", b"", px=_MARK_MS)
        announcements = await self._workers.list()
        horizon = time.monotonic() - RECENT_S
        models = [model for model, asked in self._asked.items() if asked > horizon]
        # Until a queue is empty, it is a demand, although nothing more is asked of it.
        models += [name for name, load in self._loads.items() if load.live and name not in models]
        found = await loads(self._redis, models, namespace=self._namespace)
        self._announcements = tuple(announcements)
        self._loads = found
        self._waiting = {model: Waiting(load, self._weight) for model, load in found.items()}
        self._refreshed_at = time.monotonic()

    @property
    def healthy(self) -> bool:
        return self.age_s < STALE_S

    @property
    def age_s(self) -> float:
        """Seconds since the state was last read; infinite if it never was."""
        return time.monotonic() - self._refreshed_at

    @property
    def announcements(self) -> tuple[Announcement, ...]:
        return self._announcements

    @property
    def loads(self) -> dict[str, Load]:
        return self._loads

    async def check(
        self, entry: CatalogEntry, *, account: str, waits: bool, wait_max_s: float
    ) -> None:
        """Raise ``Unavailable`` or ``TooManyRequests`` if a request should not be accepted.

        ``account`` is the name of the account's flow in the queue.
        """
        if not self.healthy:
            raise Unavailable(
                "queue_unavailable",
                "The queue server does not respond; nothing was accepted or charged.",
                retry_after_s=2,
            )
        if waits or entry.upstream is not None:
            await self.check_served(entry)
        self._asked[entry.name] = time.monotonic()
        waiting = self._waiting.get(entry.name)
        wait_s = waiting.seconds(account) if waiting is not None else 0.0
        if wait_s > wait_max_s:
            raise TooManyRequests(
                "queue_full",
                f"Your next request to {entry.name} would be queued for about {wait_s:.0f} s, and "
                f"at most {wait_max_s:.0f} s are accepted for this kind of request.",
                retry_after_s=max(1, math.ceil(wait_s - wait_max_s)),
            )

    async def check_served(self, entry: CatalogEntry) -> None:
        """Raise ``Unavailable`` if no worker serves a model, or is about to."""
        missing = availability(entry, self._announcements)
        if missing is not None:
            await self.try_refresh(START_REFRESH_S)
            missing = availability(entry, self._announcements)
        # Loading takes less time than most retries, and the request waits no longer than others.
        if missing is not None and not loads_soon(entry, self._announcements):
            # Retrying does not help if the model is not configured, so tell clients not to.
            set_up = missing.code != "upstream_not_configured"
            raise Unavailable(
                missing.code,
                f"{entry.name} is not available: {missing.reason}.",
                retry_after_s=5 if set_up else None,
                should_retry=set_up,
            )
