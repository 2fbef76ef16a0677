"""Limits the concurrent calls of each account: a few run, some more wait, others are refused.

Keeps one account from using up a resource that all accounts share. Pure asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from gateway.errors import TooManyRequests

WAIT_S: Final = 5.0
"""Maximum time that a call waits before it is refused."""


@dataclass(slots=True)
class _Queue:
    free: asyncio.Semaphore
    calls: int = field(default=0)


class ConcurrencyLimiter:
    """Runs at most ``concurrent_max`` calls of each account; at most ``waiting_max`` wait."""

    def __init__(self, concurrent_max: int, *, waiting_max: int) -> None:
        self._at_once = concurrent_max
        self._calls_max = concurrent_max + waiting_max
        self._queues: dict[int, _Queue] = {}

    @contextlib.asynccontextmanager
    async def acquire(self, account_id: int | None) -> AsyncIterator[None]:
        """Wait until a call of the account may run; None is not limited.

        Raise ``TooManyRequests`` if too many calls wait, or after ``WAIT_S``.
        """
        if account_id is None:
            yield
            return
        queue = self._queues.get(account_id)
        if queue is None:
            queue = self._queues[account_id] = _Queue(asyncio.Semaphore(self._at_once))
        if queue.calls >= self._calls_max:
            raise _too_many(queue)
        queue.calls += 1
        try:
            await self._take(queue)
            try:
                yield
            finally:
                queue.free.release()
        finally:
            queue.calls -= 1
            if not queue.calls:
                del self._queues[account_id]

    async def _take(self, queue: _Queue) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await queue.free.acquire()
        except TimeoutError:
            raise _too_many(queue) from None


def _too_many(queue: _Queue) -> TooManyRequests:
    return TooManyRequests(
        "too_many_reports",
        f"This account has {queue.calls} lists and reports running or waiting; try again when "
        "some of them have ended.",
        retry_after_s=1,
    )
