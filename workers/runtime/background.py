"""Runs work that needs no device on other threads, in order for each owner.

Files are decoded and encoded here while the step loop continues. Results are returned to the loop's
thread by ``take``; the threads touch no other state of an owner. Knows neither engines nor jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

LIMIT_US: Final = 900 * 1_000_000
"""Maximum duration of a task. A thread that hangs can only be ended with its process."""


class StuckError(Exception):
    """A task has not ended within ``LIMIT_US``."""


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """A task that has ended; ``error`` is its exception if it failed."""

    owner: Hashable
    name: str
    result: Any
    error: Exception | None
    spent_us: int


@dataclass(slots=True, eq=False)
class _Task:
    owner: Hashable
    name: str
    work: Callable[[], Any]
    started_us: int = 0


class Background:
    """``start`` runs a function on some thread; by default it is called directly.

    ``wake`` is called in that thread when a task has ended.
    """

    def __init__(
        self,
        now_us: Callable[[], int],
        start: Callable[[Callable[[], None]], object] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._now_us = now_us
        self._start = start or (lambda work: work())
        self._wake = wake
        self._queues: dict[Hashable, deque[_Task]] = {}
        self._running: dict[Hashable, _Task] = {}
        self._done: deque[Done] = deque()

    def put(self, owner: Hashable, name: str, work: Callable[[], Any]) -> None:
        """Queue a task behind the earlier tasks of the same owner."""
        self._queues.setdefault(owner, deque()).append(_Task(owner, name, work))
        self._start_next(owner)

    def drop(self, owner: Hashable) -> None:
        """Drop tasks that have not started. A running one continues, and ``take`` returns its
        result."""
        self._queues.pop(owner, None)

    def pending(self, owner: Hashable) -> int:
        """Return the number of an owner's tasks whose results have not been taken."""
        return len(self._queues.get(owner, ())) + (owner in self._running)

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def take(self) -> list[Done]:
        """Return the tasks that have ended since. Raise ``StuckError`` if one runs for too long."""
        taken: list[Done] = []
        while self._done:
            done = self._done.popleft()
            del self._running[done.owner]
            taken.append(done)
            self._start_next(done.owner)
        now_us = self._now_us()
        for task in self._running.values():
            if task.started_us and now_us - task.started_us > LIMIT_US:
                raise StuckError(f"{task.name} has not ended in {LIMIT_US // 1_000_000} s")
        return taken

    def _start_next(self, owner: Hashable) -> None:
        queue = self._queues.get(owner)
        if not queue or owner in self._running:
            return
        task = self._running[owner] = queue.popleft()
        if not queue:
            del self._queues[owner]
        self._start(lambda: self._run(task))

    def _run(self, task: _Task) -> None:
        task.started_us = self._now_us()
        result, error = None, None
        try:
            result = task.work()
        except Exception as raised:
            error = raised
        spent_us = self._now_us() - task.started_us
        self._done.append(Done(task.owner, task.name, result, error, spent_us))
        self._wake()
