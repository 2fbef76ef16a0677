"""Limits how long futures are awaited, with one timer for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class TimeLimit:
    """Fails futures with ``error()`` if they are not done after ``seconds``."""

    def __init__(self, seconds: float, error: Callable[[], Exception] = TimeoutError) -> None:
        self._seconds = seconds
        self._error = error
        self._limited: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def apply(self, future: asyncio.Future[T]) -> asyncio.Future[T]:
        """Limit a future from now on, and return it."""
        loop, limited = future.get_loop(), self._limited
        while limited and limited[0][1].done():
            limited.popleft()
        limited.append((loop.time() + self._seconds, future))
        if self._timer is None:
            self._timer = loop.call_at(limited[0][0], self._expire)
        return future

    def _expire(self) -> None:
        """Fail the futures whose time is up. All have the same limit, so they are in order."""
        now, limited = asyncio.get_running_loop().time(), self._limited
        while limited and (limited[0][1].done() or limited[0][0] <= now):
            _, future = limited.popleft()
            if not future.done():
                future.set_exception(self._error())
        self._timer = None
        if limited:
            self._timer = asyncio.get_running_loop().call_at(limited[0][0], self._expire)
