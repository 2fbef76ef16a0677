"""The agent's side of the engine process: starts it, feeds it, watches it, starts it again.

Knows no queue. When the process dies, for whatever reason, everything in it is lost, and the owner
is told so before the next one starts. A process that has work but shows no progress is killed: only
that is sure to give its device back.

A job on its last attempt is suspected of having killed the others, and of such the process has one
at a time: whatever is in a process when it dies loses an attempt, so that one bad job would
otherwise take all down that run beside it three times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from workers.agent.environment import engine_environment
from workers.contract.jobs import Cancelled, Event, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.contract.queue import CRASHES_MAX
from workers.engines import registry
from workers.protocol.engine import CancelReason
from workers.protocol.host import Report
from workers.protocol.ipc import (
    Admit,
    Cancel,
    Command,
    Configure,
    JobHandoff,
    Loaded,
    Loading,
    Moving,
    Ready,
    Stepped,
    Withdraw,
    Withdrawn,
    pack,
    report_unpacker,
)

log = logging.getLogger(__name__)

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 30.0
STEADY_S: Final = 60.0
"""A process that lived so long was well: the next backoff starts small again."""
FAILURES_MAX: Final = 5
"""Short lives in a row after which its models count as unavailable."""
_WATCH_S: Final = 1.0
_GOODBYE_S: Final = 2.0


class EngineSupervisor:
    """One engine process for all models that run here, alive for as long as ``run`` is."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        worker: str,
        preload: bool,
        threads: int | None,
        report: Report,
        crashed: Callable[[Collection[RequestId]], Awaitable[None]],
        changed: Callable[[], None],
        withdrawn: Callable[[Collection[RequestId]], None] = lambda _: None,
    ) -> None:
        self.ready = False
        self.problems: dict[str, str] = {}
        """Models that could not be loaded, and why."""
        self.loaded: set[str] = set()
        self.busy_us = 0
        self.pid: int | None = None
        self._configure = Configure(worker=worker, models=tuple(specs), preload=preload)
        self._serving = {spec.name: registry.serving(spec) for spec in specs}
        self._step_limits_s = {spec.name: registry.step_limit_s(spec) for spec in specs}
        self._threads = threads
        self._report = report
        self._crashed = crashed
        self._changed = changed
        self._withdrawn = withdrawn
        self._transport: asyncio.WriteTransport | None = None
        self._inside: dict[RequestId, str] = {}
        self._abandoned: set[RequestId] = set()
        self._parked: dict[RequestId, JobHandoff] = {}
        """Not in the process yet: it still has what they were abandoned as, or another suspect, or
        there is none."""
        self._suspect: RequestId | None = None
        self._loading: str | None = None
        self._heard_s = 0.0
        self._failures = 0
        """Processes in a row that did not live long."""

    @property
    def available(self) -> bool:
        """Whether jobs are worth accepting: it runs, or is just being replaced after a crash."""
        return self.ready or 0 < self._failures < FAILURES_MAX

    @property
    def state(self) -> str:
        """Why it is not available, in a sentence."""
        if self._failures:
            return f"its engine process has ended {self._failures} times in a row"
        return "it is still being loaded"

    # --- Host -------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[JobHandoff]) -> None:
        if not self._inside:
            self._heard_s = time.monotonic()
        admitted = []
        for handed in jobs:
            request_id = handed.job.request_id
            suspect = handed.attempt >= CRASHES_MAX
            waits = suspect and self._suspect is not None
            if self._transport is None or request_id in self._inside or waits:
                self._parked[request_id] = handed
                continue
            if suspect:
                self._suspect = request_id
            self._inside[request_id] = handed.job.model
            admitted.append(handed)
        if admitted:
            self._send(Admit(tuple(admitted)))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        if self._parked.pop(request_id, None) is not None:
            self._report((), ((request_id, Cancelled(reason=reason)),))
        elif request_id in self._inside:
            self._send(Cancel(request_id, reason))

    def abandon(self, request_id: RequestId) -> None:
        self._parked.pop(request_id, None)
        if request_id in self._inside:
            self._abandoned.add(request_id)
            self._send(Cancel(request_id, "operator"))

    def withdraw(self) -> None:
        """Have ``withdrawn`` be called with the jobs that have not begun, which leave."""
        parked, self._parked = self._parked, {}
        if parked:
            self._withdrawn(tuple(parked))
        self._send(Withdraw())

    def _send(self, command: Command) -> None:
        if self._transport is not None:
            self._transport.write(pack(command))

    # --- The life of the process ------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a process alive for ever; when cancelled, end it."""
        while True:
            started_s = time.monotonic()
            reason = await self._live_once()
            log.error("engine process ended", extra={"reason": reason})
            steady = time.monotonic() - started_s > STEADY_S
            self._failures = 1 if steady else self._failures + 1
            self._changed()
            await self._crashed(self._parked)
            self._parked = {}
            await asyncio.sleep(min(BACKOFF_MIN_S * 2 ** (self._failures - 1), BACKOFF_MAX_S))

    async def _live_once(self) -> str:
        """Start a process; return why it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "workers.runtime.process", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs.fileno(),),
                env=engine_environment(os.environ, threads=self._threads),
            )
        self.pid = process.pid
        log.info("engine process started", extra={"engine_pid": self.pid})
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        transport, _ = await loop.create_unix_connection(lambda: _Link(self), sock=ours)
        self._transport = transport
        self._loading = self._configure.models[0].name
        self._heard_s = time.monotonic()
        self._send(self._configure)
        watchdog = asyncio.create_task(self._watch(process))
        try:
            code = await process.wait()
            return watchdog.result() if watchdog.done() else f"exit status {code}"
        finally:
            watchdog.cancel()
            self._forget()
            transport.close()
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                # It ends by itself when it finds that nobody is there any more.
                async with asyncio.timeout(_GOODBYE_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _forget(self) -> None:
        self.ready = False
        self._transport = None
        self._loading = None
        self.loaded.clear()
        self._inside.clear()
        self._abandoned.clear()
        self._suspect = None
        self._changed()

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Kill the process when it has been silent for too long; return the reason."""
        while True:
            limit_s = self._silence_limit_s()
            silent_s = time.monotonic() - self._heard_s
            if limit_s is not None and silent_s > limit_s:
                process.kill()
                return f"killed after {silent_s:.1f} s without progress"
            await asyncio.sleep(min(_WATCH_S, limit_s / 4) if limit_s is not None else _WATCH_S)

    def _silence_limit_s(self) -> float | None:
        if self._loading is not None:
            return self._serving[self._loading].load_limit_s
        if self._inside:
            models = set(self._inside.values())
            return max(self._step_limits_s[model] for model in models)
        return None

    # --- What the process says --------------------------------------------------------------------

    def hear(self, message: Ready | Loading | Loaded | Moving | Stepped | Withdrawn) -> None:
        self._heard_s = time.monotonic()
        match message:
            case Stepped():
                self._hear_step(message)
            case Moving():
                pass
            case Withdrawn(request_ids):
                for request_id in request_ids:
                    self._leave(request_id)
                self._withdrawn(request_ids)
            case Loading(model):
                self._loading = model
            case Loaded(model, problem):
                self._loading = None if self.ready else self._loading
                if problem is not None:
                    log.error("model not loaded", extra={"model": model, "problem": problem})
                    self.problems[model] = problem
                else:
                    self.problems.pop(model, None)
                    self.loaded.add(model)
                self._changed()
            case Ready():
                self.ready = True
                self._loading = None
                self._changed()

    def _leave(self, request_id: RequestId) -> None:
        del self._inside[request_id]
        self._abandoned.discard(request_id)
        if request_id == self._suspect:
            self._suspect = None

    def _hear_step(self, step: Stepped) -> None:
        self.busy_us = step.busy_us
        events: Sequence[tuple[RequestId, Event]] = step.events
        outcomes: Sequence[tuple[RequestId, Outcome]] = step.outcomes
        if self._abandoned:
            events = [pair for pair in events if pair[0] not in self._abandoned]
        left = [request_id for request_id, _ in outcomes]
        if self._abandoned:
            outcomes = [pair for pair in outcomes if pair[0] not in self._abandoned]
        for request_id in left:
            self._leave(request_id)
        if events or outcomes:
            self._report(events, outcomes)
        if self._parked and left:
            parked, self._parked = self._parked, {}
            self.submit(tuple(parked.values()))


class _Link(asyncio.Protocol):
    def __init__(self, host: EngineSupervisor) -> None:
        self._host = host
        self._unpacker = report_unpacker()

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._host.hear(message)
