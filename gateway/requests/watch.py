"""What this process last heard of the queue: how long each one is, and which workers serve what.

Asked before anything is held, so that a request that cannot be run soon costs nobody anything. A
queue server that is slow or away trips the breaker: 503 at once instead of a hold that waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.catalog.availability import availability
from gateway.catalog.schema import Entry
from gateway.errors import TooManyRequests, Unavailable
from workers.contract.queue import Load, Queue
from workers.contract.streams import Announcement, Workers

log = logging.getLogger(__name__)

REFRESH_S: Final = 0.5
START_REFRESH_S: Final = 0.1
"""While no worker serves anything: the first one is being waited for."""
PATIENCE_S: Final = 1.0
"""A refresh that takes longer counts as failed: a slow queue is worse than a dead one."""
STALE_S: Final = 3.0
"""Beyond this age of the last good refresh the breaker is open."""
RECENT_S: Final = 30.0
"""Queues asked for within this time are refreshed; the others cost nothing."""


class Watch:
    def __init__(self, redis: Redis, *, namespace: str) -> None:
        self._redis = redis
        self._namespace = namespace
        self._workers = Workers(redis, namespace=namespace)
        self._asked: dict[str, float] = {}
        self._loads: dict[str, Load] = {}
        self._announcements: tuple[Announcement, ...] = ()
        self._heard = -math.inf

    async def run(self) -> None:
        """Refresh for ever."""
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self.refresh()
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("queue server does not answer: %s", type(error).__name__)
            serving = any(worker.models for worker in self._announcements)
            await asyncio.sleep(REFRESH_S if serving else START_REFRESH_S)

    async def refresh(self) -> None:
        announcements = await self._workers.list()
        horizon = time.monotonic() - RECENT_S
        models = [model for model, asked in self._asked.items() if asked > horizon]
        loads = {
            model: await Queue(self._redis, model, namespace=self._namespace).load()
            for model in models
        }
        self._announcements = tuple(announcements)
        self._loads = loads
        self._heard = time.monotonic()

    @property
    def healthy(self) -> bool:
        return time.monotonic() - self._heard < STALE_S

    @property
    def announcements(self) -> tuple[Announcement, ...]:
        return self._announcements

    @property
    def loads(self) -> dict[str, Load]:
        return self._loads

    def check(self, entry: Entry, *, waits: bool, wait_max_s: float) -> None:
        """Raise ``Unavailable`` or ``TooManyRequests`` if a request had better not be accepted."""
        if not self.healthy:
            raise Unavailable(
                "queue_unavailable",
                "The queue server does not answer; nothing was accepted or charged.",
                retry_after_s=2,
            )
        missing = availability(entry, self._announcements)
        if missing is not None and (waits or entry.upstream is not None):
            raise Unavailable(
                missing.code,
                f"{entry.name} is not available: {missing.reason}",
                retry_after_s=None if entry.upstream is not None else 5,
            )
        self._asked[entry.name] = time.monotonic()
        load = self._loads.get(entry.name)
        wait_s = load.wait_s if load is not None else 0.0
        if wait_s > wait_max_s:
            raise TooManyRequests(
                "queue_full",
                f"The queue of {entry.name} is about {wait_s:.0f} s long, and at most "
                f"{wait_max_s:.0f} s are accepted for this kind of request.",
                retry_after_s=max(1, math.ceil(wait_s - wait_max_s)),
            )
