"""The supervisor of background loops: a gateway either serves or exits.

A loop that fails is logged with its traceback, counted and restarted after a pause. If a loop keeps
failing, or the supervisor itself fails, the process exits with ``EXIT_CODE``, so that its service
manager restarts it. Every loop beats after each completed round, including rounds in which the
database or the queue was unreachable. A loop that has not beaten for too long makes the process not
live; after twice that time a thread ends the process, even if the event loop is blocked. Knows
nothing of what the loops do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from gateway import metrics
from gateway.failpoints import hangs, raise_if_faltering

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_CODE: Final = 70
"""``EX_SOFTWARE`` of sysexits.h: the process exited because it could not continue."""
PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
IDLE_BEAT_S: Final = 2.0
"""Interval of the beats of an idle loop."""
DRAIN_S: Final = 5.0
"""Time after the shutdown grace at which a failed process exits even if it has not drained."""
STOP_MARGIN_S: Final = 10.0
"""Time beyond the shutdown grace after which a process that was asked to stop is killed."""

CHECK_EVERY_S: Final = 1.0
CHECKS_SILENT_MAX: Final = 5
"""Consecutive checks of the watchdog that must find a loop silent: after SIGSTOP or a pause of the
machine, the process has this many seconds to beat again."""

Beat: TypeAlias = Callable[[], None]
"""Called by a loop after each completed round."""
Work: TypeAlias = Callable[[Beat], Awaitable[None]]


def no_beat() -> None:
    """Default beat, for a loop that runs without a supervisor."""


@dataclass(slots=True, eq=False)
class _Loop:
    name: str
    work: Work
    beaten_at: float = field(default_factory=time.monotonic)
    failures: int = 0
    """Failures since the last beat."""

    def beat(self) -> None:
        raise_if_faltering(self.name)
        self.beaten_at = time.monotonic()
        self.failures = 0


class Supervisor:
    """Runs background loops until ``running`` exits."""

    def __init__(
        self,
        *,
        failures_max: int,
        silence_max_s: float,
        grace_s: float,
        end: Callable[[float], None] | None = None,
    ) -> None:
        """``end`` ends the process within the given number of seconds; tests replace it."""
        self._failures_max = failures_max
        self._silence_max_s = silence_max_s
        self._grace_s = grace_s
        self._end = end or end_process
        self._loops: list[_Loop] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.failed: str | None = None
        """Reason why the process exits; None while it serves."""

    def start(self, name: str, work: Work, *, copies: int = 1) -> None:
        """Run a loop until the supervisor stops."""
        for _ in range(copies):
            loop = _Loop(name, work)
            self._loops.append(loop)
            task = asyncio.create_task(self._keep(loop), name=name)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def late(self, *, times: float = 1.0) -> dict[str, float]:
        """Return the loops that have been silent for too long, and for how many seconds."""
        now = time.monotonic()
        return {
            loop.name: round(now - loop.beaten_at, 1)
            for loop in tuple(self._loops)
            if now - loop.beaten_at > self._silence_max_s * times
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """On exit, cancel every loop and wait until it has ended.

        An exception that is raised through this context comes from the application's lifespan after
        its start. The server would continue without the lifespan, so the process is ended.
        """
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        try:
            yield
        except BaseException as error:
            self.fail(f"the application's lifespan ended: {error!r}")
            raise
        finally:
            over.set()
            self._stopping = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(self, reason: str) -> None:
        """End the process: drain as on SIGTERM, but exit with ``EXIT_CODE`` and a time limit."""
        if self.failed is None:
            self.failed = reason
            log.critical("this gateway exits: %s", reason)
            self._end(self._grace_s + DRAIN_S)

    async def _keep(self, loop: _Loop) -> None:
        pause_s = PAUSE_MIN_S
        while True:
            try:
                if hangs(loop.name):
                    await asyncio.Event().wait()
                await loop.work(loop.beat)
                raise RuntimeError("the loop returned")
            except asyncio.CancelledError:
                if self._stopping or _is_cancelled():
                    raise
                # Something that the loop awaited was cancelled, not the loop itself.
                log.exception("the loop %s was interrupted", loop.name)
            except Exception:  # the boundary of every background loop
                log.exception("the loop %s failed", loop.name)
                if self._stopping:
                    return  # Another round would never be cancelled.
            pause_s = PAUSE_MIN_S if loop.failures == 0 else min(pause_s * 2, PAUSE_MAX_S)
            loop.failures += 1
            metrics.LOOP_FAILURES.labels(loop.name).inc()
            if loop.failures >= self._failures_max:
                self.fail(f"the loop {loop.name} failed {loop.failures} times in a row")
                return
            await asyncio.sleep(pause_s)

    def _watch(self, over: threading.Event) -> None:
        """Run in a thread: end the process if a loop is silent for twice the limit."""
        looks = 0
        while not over.wait(CHECK_EVERY_S):
            late = self.late(times=2)
            looks = looks + 1 if late else 0
            if looks >= CHECKS_SILENT_MAX:
                self.fail(f"silent for too long: {', '.join(sorted(late))}")
                return

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self._stopping and self.failed is None:
            self.fail(f"the loop {task.get_name()} ended")


def end_process(within_s: float) -> None:
    """Send SIGTERM to this process, and force its end if that takes too long."""
    timer = threading.Timer(within_s, exit_now)
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGTERM)


def exit_now() -> None:
    """Exit the process immediately with ``EXIT_CODE``."""
    logging.shutdown()
    os._exit(EXIT_CODE)


async def next_of(queue: asyncio.Queue[T], beat: Beat) -> T:
    """Take the next item of a queue; beat while it is empty."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_BEAT_S):
                return await queue.get()
        beat()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
