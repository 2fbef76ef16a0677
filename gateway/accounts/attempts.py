"""Bounds attempts to enter the console: by network, and failures in total.

Counted in Redis for all gateways, and in this process while Redis does not answer. Beyond the
maximum every further attempt doubles the wait. Failures of the last hour are counted by minute, for
operators, and so is what browsers report about the console's pages.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

from redis.asyncio import Redis

from gateway.errors import TooManyRequests
from gateway.sql.outages import QUEUE_OUTAGE

log = logging.getLogger(__name__)

WINDOW_S: Final = 600
HOUR_S: Final = 3600
NETWORK_MAX: Final = 10
"""Attempts from one network in a window."""
FAILURES_MAX: Final = 300
"""Failures of all networks in a window."""
WAIT_S: Final = 30
WAIT_MAX_S: Final = 900
NAMES_MAX: Final = 10_000


class LastHour:
    """Counts something by label over the last 60 minutes, in Redis."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._name = name

    async def add(self, label: str) -> None:
        """Count one, best effort."""
        key = self._key(int(time.time() // 60))
        with contextlib.suppress(*QUEUE_OUTAGE):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hincrby(key, label, 1)
                pipe.expire(key, HOUR_S + 60)
                await pipe.execute()

    async def read(self) -> Mapping[str, int] | None:
        """Return the counts of the last hour by label; None if Redis does not answer."""
        minute = int(time.time() // 60)
        found: Counter[str] = Counter()
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for before in range(HOUR_S // 60):
                    pipe.hgetall(self._key(minute - before))
                for counts in await pipe.execute():
                    for label, count in counts.items():
                        text = label.decode() if isinstance(label, bytes) else str(label)
                        found[text] += int(count)
        except QUEUE_OUTAGE:
            return None
        return found

    def _key(self, minute: int) -> str:
        return f"{self._name}:{minute}"


class Attempts:
    def __init__(self, redis: Redis, *, namespace: str) -> None:
        self.failures = LastHour(redis, f"{namespace}:entrance:hour")
        """Failures to enter, by method."""
        self.reports = LastHour(redis, f"{namespace}:reports:hour")
        """Violations of the console's policy that browsers reported, by directive."""
        self._redis = redis
        self._namespace = namespace
        self._here: dict[str, tuple[int, float]] = {}
        self._minute = 0
        self._recorded: Counter[int] = Counter()

    async def begin(self, network: str) -> None:
        """Count an attempt from a network. Raise ``TooManyRequests`` if there were too many."""
        failures, left_s = await self._count("failures", 0)
        if failures >= FAILURES_MAX:
            raise _too_many(left_s)
        count, left_s = await self._count(network, 1)
        if count > NETWORK_MAX:
            doubled_s = min(WAIT_MAX_S, WAIT_S << min(count - NETWORK_MAX - 1, 10))
            wait_s = max(left_s, doubled_s)
            await self._extend(network, wait_s)
            raise _too_many(wait_s)

    async def succeeded(self, network: str) -> None:
        """Do not count an attempt that succeeded: many people can share a network."""
        await self._count(network, -1)

    async def failed(self, method: str) -> None:
        await self._count("failures", 1)
        await self.failures.add(method)

    def may_record(self, session_id: int, most: int) -> bool:
        """Count a refusal within a session. False if there were more in this minute."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute = minute
            self._recorded.clear()
        self._recorded[session_id] += 1
        return self._recorded[session_id] <= most

    async def _count(self, name: str, number: int) -> tuple[int, int]:
        """Add to a count; return it, and the seconds until it begins anew."""
        key = self._key(name)
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(key, 0, ex=WINDOW_S, nx=True)
                pipe.incrby(key, number)
                pipe.ttl(key)
                _, count, left_s = await pipe.execute()
            return count, max(left_s, 1)
        except QUEUE_OUTAGE as error:
            log.warning("attempts to enter are counted here: %s", type(error).__name__)
        now = time.monotonic()
        count, ends_at = self._here.get(name, (0, now + WINDOW_S))
        if ends_at <= now:
            count, ends_at = 0, now + WINDOW_S
        if len(self._here) >= NAMES_MAX:
            self._here.clear()
        self._here[name] = (count + number, ends_at)
        return count + number, max(round(ends_at - now), 1)

    async def _extend(self, name: str, wait_s: int) -> None:
        try:
            await self._redis.expire(self._key(name), wait_s)
        except QUEUE_OUTAGE:
            self._here[name] = (self._here.get(name, (0, 0.0))[0], time.monotonic() + wait_s)

    def _key(self, name: str) -> str:
        return f"{self._namespace}:entrance:{name}"


def _too_many(wait_s: int) -> TooManyRequests:
    return TooManyRequests(
        "too_many_attempts",
        f"There were too many attempts to enter. Try again in {wait_s} s.",
        retry_after_s=wait_s,
    )
