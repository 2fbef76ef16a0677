"""The loop of short steps that runs all engines of a device: who is admitted, steps and leaves.

Single-threaded and pure: the clocks are injected; it knows no queue, no process, no tensor and no
price. Its caller feeds it jobs and cancels between turns, and each turn is at most one step of one
engine. Three invariants hold whatever the engines do:

- every job that was handed in ends in exactly one outcome;
- a cancelled request, or one past its deadline, leaves within one step of its engine;
- ``gpu_us`` of all outcomes sum to the time that was spent inside the engines (``busy_us``).
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from workers.contract.jobs import (
    Cancelled,
    Event,
    Failed,
    FailureCode,
    Job,
    Outcome,
    RequestId,
    Sound,
    Tokens,
    Usage,
)
from workers.engines.protocol import Admitted, CancelReason, Engine, StepReport, Wait
from workers.fairness import DeficitRoundRobin
from workers.metering import PHASES, Stopwatch, TokenTimes, apportion

log = logging.getLogger(__name__)

QUANTUM_US: Final = 10_000
"""Of device time per round and unit of weight: about a decode step, so that turns stay short."""


class DeviceLostError(Exception):
    """The device answers no more; only a new process can have it back."""


@dataclass(slots=True)
class TurnReport:
    """What happened since the last turn: events that somebody reads along, and outcomes."""

    events: list[tuple[RequestId, Event]] = field(default_factory=list)
    outcomes: list[tuple[RequestId, Outcome]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Run:
    """One job on its way through the loop; times in microseconds."""

    job: Job
    lane: _Lane
    queue_us: int
    leased_us: int
    files: Sequence[bytes]
    """Until it is admitted."""
    load_us: int = 0
    said: TokenTimes = field(default_factory=TokenTimes)
    spent: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    cancelled: CancelReason | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One engine, those it has admitted, and the line of those that wait for room or weights."""

    model: str
    engine: Engine
    loaded: bool = False
    load_began_us: int = 0
    load_ended_us: int = 0
    broken: str | None = None
    admitted: dict[RequestId, _Run] = field(default_factory=dict)
    line: deque[_Run] = field(default_factory=deque)
    full: bool = False


class StepLoop:
    """``now_us`` is a monotonic clock, ``unix_ms`` the wall clock of deadlines."""

    def __init__(
        self,
        *,
        worker: str,
        now_us: Callable[[], int],
        unix_ms: Callable[[], int],
        quantum_us: int = QUANTUM_US,
    ) -> None:
        self.busy_us = 0
        self._worker = worker
        self._now_us = now_us
        self._unix_ms = unix_ms
        self._quantum_us = quantum_us
        self._turns = DeficitRoundRobin(quantum_us)
        self._watch = Stopwatch(now_us)
        self._lanes: dict[str, _Lane] = {}
        self._runs: dict[RequestId, _Run] = {}
        self._deadlines: list[tuple[int, RequestId]] = []
        self._starved: _Lane | None = None
        self._report = TurnReport()

    # --- What the caller does between turns -------------------------------------------------------

    def add(self, model: str, engine: Engine, *, weight: float = 1.0) -> None:
        """Serve a model; its weights are loaded by ``load``."""
        self._turns.add(model, weight)
        self._lanes[model] = _Lane(model, engine)

    def load(self, model: str) -> str | None:
        """Load an engine; return why that could not be, after failing the jobs that wait for it."""
        lane = self._lanes[model]
        lane.load_began_us = self._now_us()
        try:
            lane.engine.load()
        except Exception as error:
            _raise_if_device_is_lost(error)
            log.exception("model could not be loaded", extra={"model": model})
            lane.broken = f"{type(error).__name__}: {error}"
        lane.load_ended_us = self._now_us()
        lane.loaded = lane.broken is None
        while lane.broken and lane.line:
            self._fail(lane.line.popleft(), "model_load_failed", "The model could not be loaded.")
        return lane.broken

    def unload(self) -> None:
        """Give all memory back; for a loop that is idle."""
        for lane in self._lanes.values():
            if lane.loaded:
                lane.engine.unload()
                lane.loaded = False

    def admit(
        self, job: Job, *, queue_us: int, leased_us: int, files: Sequence[bytes] = ()
    ) -> None:
        """Take a job that waited ``queue_us`` in the queue and was leased at ``leased_us``."""
        if job.request_id in self._runs:
            raise ValueError(f"{job.request_id} is in the loop already")
        lane = self._lanes[job.model]
        run = _Run(job, lane, queue_us, leased_us, files)
        self._runs[job.request_id] = run
        if lane.broken is not None:
            self._fail(run, "model_load_failed", "The model could not be loaded.")
            return
        lane.line.append(run)
        if job.deadline_ms:
            heapq.heappush(self._deadlines, (job.deadline_ms, job.request_id))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """End a request with what it used so far; one that has ended already stays as it is."""
        run = self._runs.get(request_id)
        if run is None or run.cancelled is not None:
            return
        run.cancelled = reason
        if request_id not in run.lane.admitted:
            run.lane.line.remove(run)
            self._end(run, Cancelled(reason=reason))
            return
        try:
            run.lane.engine.cancel(request_id, reason)
        except Exception as error:
            self._break_off(run.lane, error)

    @property
    def missing_model(self) -> str | None:
        """A model that somebody waits for and that is not loaded yet."""
        for lane in self._lanes.values():
            if lane.line and not lane.loaded:
                return lane.model
        return None

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing: nobody is here, and there is nothing left to report."""
        return not self._runs and not self._report.outcomes

    # --- One turn ---------------------------------------------------------------------------------

    def turn(self) -> TurnReport:
        """Apply deadlines, admit who fits, let one engine do one step; report what happened."""
        self._apply_deadlines()
        for lane in self._lanes.values():
            if lane.line and lane.loaded and not lane.full:
                self._admit_line(lane)
        ready = [model for model, lane in self._lanes.items() if lane.admitted]
        if ready:
            self._step(self._lanes[self._turns.choose(ready)])
        report, self._report = self._report, TurnReport()
        return report

    def _apply_deadlines(self) -> None:
        if not self._deadlines:
            return
        now_ms = self._unix_ms()
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            deadline_ms, request_id = heapq.heappop(self._deadlines)
            run = self._runs.get(request_id)
            if run is not None and run.job.deadline_ms == deadline_ms:
                self.cancel(request_id, "deadline")

    def _admit_line(self, lane: _Lane) -> None:
        """Admit from the head of the line, for at most a quantum while others wait to step."""
        spent_us = 0
        while lane.line and spent_us < self._quantum_us:
            if self._starved not in (None, lane):
                return
            run = lane.line[0]
            self._watch.start()
            try:
                admission = lane.engine.admit(run.job, self._watch, run.files)
            except Exception as error:
                _raise_if_device_is_lost(error)
                log.exception("admission failed", extra={"request_id": run.job.request_id})
                admission = _describe(error)
            spent = self._watch.stop(rest="preprocess")
            busy_us = sum(spent)
            spent_us += busy_us
            self._charge(lane, busy_us, [run], [1.0], spent)
            if isinstance(admission, Wait):
                self._hold_line(lane)
                return
            lane.line.popleft()
            self._starved = None
            if isinstance(admission, Admitted):
                self._take_in(run)
            else:
                self._end(run, admission)

    def _take_in(self, run: _Run) -> None:
        lane = run.lane
        lane.admitted[run.job.request_id] = run
        run.files = ()
        if run.leased_us < lane.load_ended_us:
            run.load_us = lane.load_ended_us - max(lane.load_began_us, run.leased_us)

    def _hold_line(self, lane: _Lane) -> None:
        """Nobody more until somebody has left, or never if there is nobody who could leave.

        A lane that is empty and still has no room lacks what the others hold: nobody else is
        admitted until it had its turn, or it would wait for ever.
        """
        if lane.admitted:
            lane.full = True
        elif any(other.admitted for other in self._lanes.values()):
            lane.full = True
            self._starved = lane
        else:
            run = lane.line.popleft()
            self._starved = None
            self._fail(run, "out_of_memory", "The request needs more memory than there is.")

    def _step(self, lane: _Lane) -> None:
        runs = list(lane.admitted.values())
        cancelled = [run for run in runs if run.cancelled is not None]
        self._watch.start()
        try:
            report = lane.engine.step(self._watch)
        except Exception as error:
            spent = self._watch.stop(rest="forward")
            self._charge(lane, sum(spent), runs, [1.0] * len(runs), spent)
            self._survive(lane, error)
        else:
            spent = self._watch.stop(rest="forward")
            weights = [report.weights.get(run.job.request_id, 0.0) for run in runs]
            self._charge(lane, sum(spent), runs, weights, spent)
            self._apply(lane, report)
        for run in cancelled:
            if run.job.request_id in lane.admitted:
                log.error("engine kept a cancelled request", extra={"model": lane.model})
                self._end(run, Cancelled(reason=run.cancelled or "operator"))

    def _apply(self, lane: _Lane, report: StepReport) -> None:
        for request_id, event in report.events:
            run = lane.admitted.get(request_id)
            if run is None:
                log.error("event of a request not admitted", extra={"request_id": request_id})
                continue
            if isinstance(event, Tokens):
                run.said.say(event.index, event.count, self._now_us())
            elif isinstance(event, Sound):
                run.said.hear(event.index, self._now_us())
            if run.job.stream:
                self._report.events.append((request_id, event))
        for request_id, outcome in report.outcomes:
            run = lane.admitted.get(request_id)
            if run is None:
                log.error("outcome of a request not admitted", extra={"request_id": request_id})
                continue
            self._end(run, outcome)

    # --- Metering and ends ------------------------------------------------------------------------

    def _charge(
        self, lane: _Lane, busy_us: int, runs: list[_Run], weights: list[float], spent: list[int]
    ) -> None:
        self.busy_us += busy_us
        self._turns.spend(lane.model, busy_us)
        for index, phase_us in enumerate(spent):
            if phase_us:
                for run, share in zip(runs, apportion(phase_us, weights), strict=True):
                    run.spent[index] += share

    def _end(self, run: _Run, outcome: Outcome) -> None:
        """The only way out: completes the outcome with what was measured and makes room."""
        request_id, lane = run.job.request_id, run.lane
        del self._runs[request_id]
        if lane.admitted.pop(request_id, None) is not None:
            try:
                lane.engine.release(request_id)
            except Exception:
                log.exception("release failed", extra={"request_id": request_id})
        if lane is self._starved:
            self._starved = None
        for other in self._lanes.values():
            other.full = False
        preprocess_us, transfer_us, forward_us, postprocess_us = run.spent
        said = run.said
        first_us = run.queue_us + said.first_us - run.leased_us if said.begun else 0
        timings = msgspec.structs.replace(
            outcome.timings,  # with what only the engine knows
            queue_us=run.queue_us,
            load_us=run.load_us,
            preprocess_us=preprocess_us,
            transfer_us=transfer_us,
            forward_us=forward_us,
            postprocess_us=postprocess_us,
            first_token_us=first_us,
            per_token_us=said.per_token_us,
            gap_us=said.gap_us,
            tokens=said.tokens,
        )
        usage: Usage = msgspec.structs.replace(outcome.usage, gpu_us=sum(run.spent))
        outcome = msgspec.structs.replace(
            outcome, usage=usage, timings=timings, worker=self._worker
        )
        if isinstance(outcome, Cancelled) and run.job.stream and said.begun:
            outcome = msgspec.structs.replace(outcome, delivered=True)
        self._report.outcomes.append((request_id, outcome))

    def _fail(self, run: _Run, code: FailureCode, message: str) -> None:
        self._end(run, Failed(code=code, message=message))

    def _survive(self, lane: _Lane, error: Exception) -> None:
        """After a failed step: out of memory costs the youngest its place, anything else them all.

        An engine that can do better on too little memory (split its batch, say) does so itself.
        """
        failure = _describe(error)
        if failure.code == "out_of_memory":
            _, youngest = next(reversed(lane.admitted.items()))
            log.warning("out of memory", extra={"request_id": youngest.job.request_id})
            self._end(youngest, failure)
        else:
            self._break_off(lane, error)

    def _break_off(self, lane: _Lane, error: Exception) -> None:
        _raise_if_device_is_lost(error)
        log.error("engine failed", extra={"model": lane.model}, exc_info=error)
        for run in list(lane.admitted.values()):
            self._end(run, _describe(error))


def _describe(error: Exception) -> Failed:
    """What a client may know of an engine's exception. Torch's are known by name, not imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failed(code="out_of_memory", message="The device ran out of memory.")
    return Failed(code="engine_error", message="The engine failed on this request.")


def _raise_if_device_is_lost(error: Exception) -> None:
    """Torch's AcceleratorError is sticky: every later call on the device fails as well."""
    if type(error).__name__ == "AcceleratorError":
        raise DeviceLostError(str(error)) from error
