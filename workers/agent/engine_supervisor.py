"""The agent's side of the engine process: starts it, submits jobs, watches it, restarts it.

Knows no queue. If the process ends for any reason, all its jobs are lost, and ``crashed`` is called
before the next process starts. A process that has jobs but reports no progress is killed, because
nothing else reliably frees its device.

A job on its last attempt is a suspect: it may have caused the previous crashes. The process runs at
most one suspect at a time. Every job in a process that crashes loses an attempt, so without this
rule one poison job would dead-letter the jobs that run beside it three times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import msgspec

from workers.agent.environment import engine_environment
from workers.contract.announcements import Work
from workers.contract.jobs import Cancelled, Event, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.contract.queue import CRASHES_MAX
from workers.engines import registry
from workers.protocol.engine import CancelReason, Hardware
from workers.protocol.host import Report
from workers.protocol.ipc import (
    AddModel,
    Admit,
    Cancel,
    Command,
    Configure,
    JobHandoff,
    KeepAlive,
    Loaded,
    Loading,
    LoadModel,
    Measure,
    Measured,
    Ready,
    RemoveModel,
    Stepped,
    Unloaded,
    Withdraw,
    Withdrawn,
    pack,
    report_unpacker,
)
from workers.protocol.ipc import Report as Message

log = logging.getLogger(__name__)

BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 30.0
STABLE_S: Final = 60.0
"""Lifetime after which a process counts as stable and the backoff is reset."""
FAILURES_MAX: Final = 5
"""Consecutive unstable processes after which the models count as unavailable."""
_WATCH_S: Final = 1.0
_EXIT_S: Final = 2.0


class EngineSupervisor:
    """Runs one engine process for all local models while ``run`` is running."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        worker: str,
        preload: bool,
        threads: int | None,
        budget_bytes: int | None = None,
        report: Report,
        crashed: Callable[[Collection[RequestId]], Awaitable[None]],
        changed: Callable[[], None],
        withdrawn: Callable[[Collection[RequestId]], None] = lambda _: None,
    ) -> None:
        self.ready = False
        self.problems: dict[str, str] = {}
        """Reason by model, for models that could not be loaded."""
        self.loaded: set[str] = set()
        self.cold: set[str] = set()
        """Models that are not in memory for lack of room, and are loaded for their next job."""
        self.hardware: dict[str, Hardware] = {}
        """Device and precision of each loaded model."""
        self.busy_us = 0
        self.measured = Measured()
        """The last measurement of the running process."""
        self._earlier = Measured()
        """Work of the processes that have ended."""
        self._earlier_busy_us: Counter[str] = Counter()
        """Busy time in them, by model."""
        self.pid: int | None = None
        self._configure = Configure(worker, (), preload, budget_bytes)
        self._serving: dict[str, registry.Serving] = {}
        self._step_limits_s: dict[str, float] = {}
        self._replaced: set[str] = set()
        """Models that were unloaded because their entry changed; their jobs wait."""
        self._has_models = asyncio.Event()
        self._threads = threads
        self._report = report
        self._crashed = crashed
        self._changed = changed
        self._withdrawn = withdrawn
        self._transport: asyncio.WriteTransport | None = None
        self._submitted: dict[RequestId, str] = {}
        self._abandoned: set[RequestId] = set()
        self._waiting: dict[RequestId, JobHandoff] = {}
        """Jobs not sent yet: the process still has an abandoned attempt of the job, or another
        suspect, or is not running."""
        self._suspect: RequestId | None = None
        self._loading: str | None = None
        self._reported_s = 0.0
        self._failures = 0
        """Consecutive processes that were not stable."""
        for spec in specs:
            self.load(spec)

    @property
    def loading(self) -> tuple[str, ...]:
        """Models that are neither loaded nor failed; none if they load at their first job."""
        if not self._configure.preload:
            return ()
        known = self.loaded | self.cold | self.problems.keys()
        return tuple(spec.name for spec in self._configure.models if spec.name not in known)

    def takes(self, model: str) -> bool:
        """Whether the process takes jobs of a model now."""
        loads = self._configure.preload and model not in self.loaded and model not in self.cold
        return self.ready and not loads and model not in self.problems

    def obstacle(self, model: str) -> str | None:
        """Return why jobs of a model should not be accepted, or None. While a process that crashed
        is started again, they wait."""
        if model in self.problems:
            return "its engine could not be loaded; see the worker's log"
        waits = model in self._replaced or 0 < self._failures < FAILURES_MAX
        if self.takes(model) or (waits and self._failures < FAILURES_MAX):
            return None
        if self._failures:
            return f"its engine process has ended {self._failures} times in a row"
        return "it is still loading"

    # --- Models -----------------------------------------------------------------------------------

    def load(self, spec: ModelSpec) -> None:
        """Serve another model, now and in every later process."""
        self._serving[spec.name] = registry.serving(spec)
        self._step_limits_s[spec.name] = registry.step_limit_s(spec)
        self._set_models((*self._configure.models, spec))
        self._has_models.set()
        self._send(AddModel(spec))

    def unload(self, model: str, *, replaced: bool) -> None:
        """Free a model without jobs. If it is ``replaced``, jobs wait for the next ``load``."""
        self._set_models(tuple(spec for spec in self._configure.models if spec.name != model))
        self.loaded.discard(model)
        self.cold.discard(model)
        self.problems.pop(model, None)
        del self._earlier_busy_us[model]
        self._replaced.discard(model)
        if replaced:
            self._replaced.add(model)
        self._send(RemoveModel(model))

    def preload(self, model: str) -> None:
        """Load a model that would be loaded for its first job."""
        if model not in self.loaded:
            self._send(LoadModel(model))

    def measure(self) -> None:
        """Ask the process to report what it has done; ``measured`` is the answer."""
        self._send(Measure())

    @property
    def work(self) -> Work:
        """What all processes have done so far, as last measured."""
        past, now = self._earlier, self.measured
        models = self._earlier_busy_us.copy()
        models.update(_busy_us(now))
        return Work(
            at_ms=time.time_ns() // 1_000_000,
            busy_us=past.busy_us + now.busy_us,
            steps=past.steps + now.steps,
            models=dict(models),
        )

    def holds(self, model: str) -> bool:
        """Whether the process has jobs of a model, abandoned ones included, or will get some."""
        waiting = (handoff.job.model for handoff in self._waiting.values())
        return model in self._submitted.values() or model in waiting

    def _set_models(self, models: tuple[ModelSpec, ...]) -> None:
        self._configure = msgspec.structs.replace(self._configure, models=models)

    # --- Host -------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[JobHandoff]) -> None:
        if not self._submitted:
            self._reported_s = time.monotonic()
        admitted = []
        for handoff in jobs:
            request_id = handoff.job.request_id
            suspect = handoff.attempt >= CRASHES_MAX
            waits = suspect and self._suspect is not None
            if not self._is_connected or request_id in self._submitted or waits:
                self._waiting[request_id] = handoff
                continue
            if suspect:
                self._suspect = request_id
            self._submitted[request_id] = handoff.job.model
            admitted.append(handoff)
        if admitted:
            self._send(Admit(tuple(admitted)))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._report((), ((request_id, Cancelled(reason=reason)),))
        elif request_id in self._submitted:
            self._send(Cancel(request_id, reason))

    def abandon(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)
        if request_id in self._submitted:
            self._abandoned.add(request_id)
            self._send(Cancel(request_id, "operator"))

    def withdraw(self) -> None:
        """Remove the jobs that have not started; they are passed to ``withdrawn``."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._withdrawn(tuple(waiting))
        self._send(Withdraw())

    @property
    def _is_connected(self) -> bool:
        """Whether the process can be reached. One that was killed is noticed here first."""
        return self._transport is not None and not self._transport.is_closing()

    def _send(self, command: Command) -> None:
        if self._transport is not None and self._is_connected:
            self._transport.write(pack(command))

    # --- Life cycle of the process ----------------------------------------------------------------

    async def run(self) -> None:
        """Keep a process running, once there is a model, until cancelled; then stop it."""
        while True:
            await self._has_models.wait()
            started_s = time.monotonic()
            reason = await self._run_process()
            log.error("engine process ended", extra={"reason": reason})
            steady = time.monotonic() - started_s > STABLE_S
            self._failures = 1 if steady else self._failures + 1
            self._changed()
            await self._crashed(self._waiting)
            self._waiting = {}
            await asyncio.sleep(min(BACKOFF_MIN_S * 2 ** (self._failures - 1), BACKOFF_MAX_S))

    async def _run_process(self) -> str:
        """Run a process until it ends. Return the reason."""
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
        self._loading = next((spec.name for spec in self._configure.models), None)
        self._reported_s = time.monotonic()
        self._send(self._configure)
        watchdog = asyncio.create_task(self._watch(process))
        try:
            code = await process.wait()
            return watchdog.result() if watchdog.done() else f"exit status {code}"
        finally:
            watchdog.cancel()
            self._reset()
            transport.close()
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                # The process exits when it detects the closed socket.
                async with asyncio.timeout(_EXIT_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _reset(self) -> None:
        self.ready = False
        self._transport = None
        self._loading = None
        self.loaded.clear()
        self.cold.clear()
        self._submitted.clear()
        self._abandoned.clear()
        self._suspect = None
        past, now = self._earlier, self.measured
        self._earlier = Measured(past.busy_us + now.busy_us, past.steps + now.steps)
        self._earlier_busy_us.update(_busy_us(now))
        self.measured = Measured()
        self._changed()

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Kill the process after too long without a report. Return the reason."""
        while True:
            limit_s = self._silence_limit_s()
            silent_s = time.monotonic() - self._reported_s
            if limit_s is not None and silent_s > limit_s:
                process.kill()
                return f"killed after {silent_s:.1f} s without progress"
            await asyncio.sleep(min(_WATCH_S, limit_s / 4) if limit_s is not None else _WATCH_S)

    def _silence_limit_s(self) -> float | None:
        if self._loading is not None:
            return self._serving[self._loading].load_limit_s
        if self._submitted:
            models = set(self._submitted.values())
            return max(self._step_limits_s[model] for model in models)
        return None

    # --- Reports of the process -------------------------------------------------------------------

    def on_report(self, message: Message) -> None:
        self._reported_s = time.monotonic()
        match message:
            case Stepped():
                self._on_step(message)
            case KeepAlive():
                pass
            case Measured():
                self.measured = message
            case Withdrawn(request_ids):
                for request_id in request_ids:
                    self._remove(request_id)
                self._withdrawn(request_ids)
            case Loading(model):
                self._loading = model
            case Loaded(model, problem, device, dtype):
                self._loading = None if self.ready else self._loading
                if all(spec.name != model for spec in self._configure.models):
                    return  # it was removed meanwhile
                self._replaced.discard(model)
                if problem is not None:
                    log.error("could not load a model", extra={"model": model, "problem": problem})
                    self.problems[model] = problem
                else:
                    self.problems.pop(model, None)
                    self.cold.discard(model)
                    self.loaded.add(model)
                    self.hardware[model] = Hardware(device, dtype)
                self._changed()
            case Unloaded(model):
                self._loading = None if self.ready else self._loading
                if any(spec.name == model for spec in self._configure.models):
                    self._replaced.discard(model)
                    self.loaded.discard(model)
                    self.cold.add(model)
                    self._changed()
            case Ready():
                self.ready = True
                self._loading = None
                self._changed()

    def _remove(self, request_id: RequestId) -> None:
        del self._submitted[request_id]
        self._abandoned.discard(request_id)
        if request_id == self._suspect:
            self._suspect = None

    def _on_step(self, step: Stepped) -> None:
        self.busy_us = step.busy_us
        events: Sequence[tuple[RequestId, Event]] = step.events
        outcomes: Sequence[tuple[RequestId, Outcome]] = step.outcomes
        if self._abandoned:
            events = [pair for pair in events if pair[0] not in self._abandoned]
        left = [request_id for request_id, _ in outcomes]
        if self._abandoned:
            outcomes = [pair for pair in outcomes if pair[0] not in self._abandoned]
        for request_id in left:
            self._remove(request_id)
        if events or outcomes:
            self._report(events, outcomes)
        if self._waiting and left:
            waiting, self._waiting = self._waiting, {}
            self.submit(tuple(waiting.values()))


def _busy_us(measured: Measured) -> dict[str, int]:
    return {model: each.busy_us for model, each in measured.models.items()}


class _Link(asyncio.Protocol):
    def __init__(self, host: EngineSupervisor) -> None:
        self._host = host
        self._unpacker = report_unpacker()

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._host.on_report(message)
