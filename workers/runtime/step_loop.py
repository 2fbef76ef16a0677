"""The step loop: schedules all engines of one device, one short step at a time.

Single-threaded and pure. Clocks are injected; the module knows no queue, process, tensor or price.
The caller submits jobs and cancellations between turns, and each turn runs at most one step of one
engine. Three invariants hold, whatever the engines do:

- every submitted job ends in exactly one outcome;
- a cancelled or overdue request leaves within one step of its engine;
- the ``gpu_us`` of all outcomes sum to the time spent inside the engines (``busy_us``). Deferred
  work is not included; it counts only towards ``preprocess_us`` and ``postprocess_us``.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from workers.contract.attempts import RunDetails
from workers.contract.delivered import chargeable
from workers.contract.jobs import (
    AudioChunk,
    Cancelled,
    Completed,
    Event,
    Failed,
    FailureCode,
    Job,
    Outcome,
    RequestId,
    Tokens,
    Usage,
)
from workers.failures import describe, raise_if_device_is_lost
from workers.protocol.engine import (
    Admitted,
    CancelReason,
    Deferred,
    Engine,
    Placed,
    Prepared,
    Preparing,
    StepReport,
    Wait,
)
from workers.runtime.background import Background, Done
from workers.runtime.fairness import DeficitRoundRobin
from workers.runtime.lanes import Lane, Run
from workers.runtime.step_times import Stopwatch, apportion

log = logging.getLogger(__name__)

QUANTUM_US: Final = 10_000
"""Device time per round and unit of weight. About one decode step, so that turns stay short."""
PREPARED_MAX: Final = 4
"""Maximum jobs of a model whose files are read ahead of admission; they are held in memory."""
FINISHING_MAX: Final = 8
"""Jobs of a model that finish in the background, from which on no further job is admitted."""
DEADLINES_KEPT: Final = 100
"""Deadlines of ended jobs that are kept before the heap is cleaned up."""
PATIENCE_S: Final = 0.1
"""Interval of deadline checks while the engines wait for deferred work."""


@dataclass(slots=True)
class TurnReport:
    """Events and outcomes since the previous turn; events of streamed requests only."""

    events: list[tuple[RequestId, Event]] = field(default_factory=list)
    outcomes: list[tuple[RequestId, Outcome]] = field(default_factory=list)


class StepLoop:
    """``now_us`` is a monotonic clock; ``unix_ms`` is the wall clock that deadlines refer to.

    ``background`` runs work that needs no device; by default immediately, in this thread.
    """

    def __init__(
        self,
        *,
        worker: str,
        now_us: Callable[[], int],
        unix_ms: Callable[[], int],
        quantum_us: int = QUANTUM_US,
        background: Background | None = None,
    ) -> None:
        self.busy_us = 0
        self._worker = worker
        self._now_us = now_us
        self._unix_ms = unix_ms
        self._quantum_us = quantum_us
        self._background = background or Background(now_us)
        self._turns = DeficitRoundRobin(quantum_us)
        self._watch = Stopwatch(now_us)
        self._lanes: dict[str, Lane] = {}
        self._runs: dict[RequestId, Run] = {}
        self._deadlines: list[tuple[int, RequestId]] = []
        self._starved: Lane | None = None
        self._report = TurnReport()

    # --- Calls between turns ----------------------------------------------------------------------

    def add(self, model: str, engine: Engine, *, weight: float = 1.0) -> None:
        """Register an engine for a model. Weights are loaded by ``load``."""
        self._turns.add(model, weight)
        self._lanes[model] = Lane(model, engine, isinstance(engine, Preparing))

    def load(self, model: str) -> str | None:
        """Load an engine's weights. On failure, fail its waiting jobs and return the reason."""
        lane = self._lanes[model]
        lane.load_started_us = self._now_us()
        try:
            lane.engine.load()
        except Exception as error:
            raise_if_device_is_lost(error)
            log.exception("could not load a model", extra={"model": model})
            lane.broken = f"{type(error).__name__}: {error}"
        lane.load_ended_us = self._now_us()
        lane.loaded = lane.broken is None
        if lane.loaded and isinstance(lane.engine, Placed):
            lane.hardware = lane.engine.hardware
        while lane.broken and lane.waiting:
            self._fail(
                lane.waiting.popleft(), "model_load_failed", "The model could not be loaded."
            )
        return lane.broken

    def remove(self, model: str) -> None:
        """Free a model that has no jobs. No effect without an engine for it."""
        if (lane := self._lanes.pop(model, None)) is not None:
            self._turns.remove(model)
            self._starved = None  # a lane that still lacks room blocks the others again
            if lane.loaded:
                lane.engine.unload()

    def admit(
        self, job: Job, *, queue_us: int, leased_us: int, files: Sequence[bytes] = ()
    ) -> None:
        """Submit a job that was queued for ``queue_us`` and leased at ``leased_us``.

        Raise ``ValueError`` if the loop already has a job of this id.
        """
        if job.request_id in self._runs:
            raise ValueError(f"{job.request_id} is already in the loop")
        lane = self._lanes[job.model]
        run = Run(job, lane, queue_us, leased_us, files)
        self._runs[job.request_id] = run
        if lane.broken is not None:
            self._fail(run, "model_load_failed", "The model could not be loaded.")
            return
        lane.waiting.append(run)
        if job.deadline_ms:
            if len(self._deadlines) > 2 * len(self._runs) + DEADLINES_KEPT:
                self._deadlines = [due for due in self._deadlines if due[1] in self._runs]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (job.deadline_ms, job.request_id))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        """End a request with its usage so far. No effect if it has already ended."""
        run = self._runs.get(request_id)
        if run is None or run.cancelled is not None:
            return
        run.cancelled = reason
        if request_id in run.lane.finishing:
            self._end(run, Cancelled(reason=reason, usage=run.cancelled_usage or Usage()))
            return
        if request_id not in run.lane.admitted:
            run.lane.waiting.remove(run)
            self._end(run, Cancelled(reason=reason))
            return
        run.lane.awaits_background = False
        try:
            run.lane.engine.cancel(request_id, reason)
        except Exception as error:
            self._fail_all(run.lane, error)

    def withdraw(self) -> list[RequestId]:
        """Remove the jobs that have not started, and return their ids."""
        waiting = [run for lane in self._lanes.values() for run in lane.waiting]
        for run in waiting:
            run.lane.waiting.clear()
            self._background.drop(run)
            del self._runs[run.job.request_id]
        self._starved = None
        return [run.job.request_id for run in waiting]

    @property
    def missing_model(self) -> str | None:
        """A model with waiting jobs whose weights are not loaded, or None."""
        for lane in self._lanes.values():
            if lane.waiting and not lane.loaded:
                return lane.model
        return None

    @property
    def idle(self) -> bool:
        """Whether the loop has no jobs and no outcomes left to report."""
        return not self._runs and not self._report.outcomes

    @property
    def patience_s(self) -> float | None:
        """Time that the caller can wait before the next turn; None: until the next command."""
        if self.idle:
            return None
        if self._report.outcomes or self._background.has_done:
            return 0.0
        for lane in self._lanes.values():
            if (lane.admitted and not lane.awaits_background) or self._next_admissible(
                lane
            ) is not None:
                return 0.0
        return PATIENCE_S

    # --- One turn ---------------------------------------------------------------------------------

    def turn(self) -> TurnReport:
        """Enforce deadlines, admit jobs while there is room, run one step of one engine."""
        self._apply_deadlines()
        for done in self._background.take():
            self._apply_done(done)
        for lane in self._lanes.values():
            if lane.waiting and lane.loaded:
                self._prepare_waiting(lane)
                if not lane.at_capacity:
                    self._admit_waiting(lane)
        ready = [
            model
            for model, lane in self._lanes.items()
            if lane.admitted and not lane.awaits_background
        ]
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

    def _prepare_waiting(self, lane: Lane) -> None:
        """Start reading the files of the next jobs."""
        engine = lane.engine
        if not isinstance(engine, Preparing):
            return
        for run in islice(lane.waiting, PREPARED_MAX):
            if run.files and not run.preparing and not isinstance(run.files, Prepared):
                run.preparing = True
                self._background.put(run, "prepare", partial(engine.prepare, run.job, run.files))

    def _next_admissible(self, lane: Lane) -> Run | None:
        """Return the next job to admit. Jobs whose files have been read overtake the others."""
        if lane.at_capacity or not lane.loaded or len(lane.finishing) >= FINISHING_MAX:
            return None
        for run in lane.waiting:
            if not (lane.prepares and run.files) or isinstance(run.files, Prepared):
                return run
        return None

    def _admit_waiting(self, lane: Lane) -> None:
        """Admit waiting jobs in order, for at most one quantum, so that running jobs can step."""
        spent_us = 0
        while spent_us < self._quantum_us and (run := self._next_admissible(lane)) is not None:
            if self._starved not in (None, lane):
                return
            self._watch.start()
            try:
                admission = lane.engine.admit(run.job, self._watch, run.files)
            except Exception as error:
                raise_if_device_is_lost(error)
                log.exception("admission failed", extra={"request_id": run.job.request_id})
                admission = describe(error)
            spent = self._watch.stop(rest="preprocess")
            busy_us = sum(spent)
            spent_us += busy_us
            self._charge(lane, busy_us, [run], [1.0], spent)
            if isinstance(admission, Wait):
                self._block_admission(lane, run)
                return
            lane.waiting.remove(run)
            self._starved = None
            if isinstance(admission, Admitted):
                self._mark_admitted(run)
            else:
                self._end(run, admission)

    def _mark_admitted(self, run: Run) -> None:
        lane = run.lane
        lane.admitted[run.job.request_id] = run
        lane.awaits_background = False
        run.files = ()
        if run.leased_us < lane.load_ended_us:
            run.load_us = lane.load_ended_us - max(lane.load_started_us, run.leased_us)

    def _block_admission(self, lane: Lane, run: Run) -> None:
        """Stop admission to a lane that is out of room until some job has ended.

        If the lane is empty, other lanes hold the memory it needs. They may not admit jobs until
        this lane has, or it would starve. If no job is running anywhere, the request can never fit,
        and fails.
        """
        if lane.admitted:
            lane.at_capacity = True
        elif any(other.admitted for other in self._lanes.values()):
            lane.at_capacity = True
            self._starved = lane
        else:
            lane.waiting.remove(run)
            self._starved = None
            self._fail(run, "out_of_memory", "The request needs more memory than is available.")

    def _step(self, lane: Lane) -> None:
        runs = list(lane.admitted.values())
        cancelled = [run for run in runs if run.cancelled is not None]
        self._watch.start()
        try:
            report = lane.engine.step(self._watch)
        except Exception as error:
            spent = self._watch.stop(rest="forward")
            self._charge(lane, sum(spent), runs, [1.0] * len(runs), spent)
            self._handle_step_failure(lane, error)
        else:
            spent = self._watch.stop(rest="forward")
            weights = [report.weights.get(run.job.request_id, 0.0) for run in runs]
            self._charge(lane, sum(spent), runs, weights, spent)
            self._apply(lane, report)
        for run in cancelled:
            if run.job.request_id in lane.admitted:
                log.error("engine did not end a cancelled request", extra={"model": lane.model})
                self._end(run, Cancelled(reason=run.cancelled or "operator"))

    def _apply(self, lane: Lane, report: StepReport) -> None:
        deferred = any(self._background.pending(run) for run in lane.admitted.values())
        lane.awaits_background = deferred and not (
            report.weights or report.events or report.outcomes
        )
        for request_id, event in report.events:
            run = lane.admitted.get(request_id)
            if run is None:
                log.error("event of an unknown request", extra={"request_id": request_id})
                continue
            if isinstance(event, Deferred):
                self._background.put(run, "event", event.make)
            else:
                self._record_event(run, event)
        for request_id, outcome in report.outcomes:
            run = lane.admitted.get(request_id)
            if run is None:
                log.error("outcome of an unknown request", extra={"request_id": request_id})
                continue
            if isinstance(outcome, Deferred):
                self._finish_in_background(run, outcome)
            elif isinstance(outcome, Completed) and self._background.pending(run):
                self._finish_in_background(
                    run, Deferred(partial(_identity, outcome), outcome.usage)
                )
            else:
                self._end(run, outcome)

    def _record_event(self, run: Run, event: Event) -> None:
        if isinstance(event, Tokens):
            run.token_times.record_tokens(event.index, event.count, self._now_us())
        elif isinstance(event, AudioChunk):
            run.token_times.record_output(event.index, self._now_us())
        if run.job.stream:
            run.tally.record(event)
            self._report.events.append((run.job.request_id, event))

    def _finish_in_background(self, run: Run, outcome: Deferred) -> None:
        """Release a request from its engine; it ends when its outcome has been made."""
        lane, request_id = run.lane, run.job.request_id
        run.cancelled_usage = outcome.usage
        self._release(run)
        lane.finishing[request_id] = run
        for other in self._lanes.values():
            other.at_capacity = False
        self._background.put(run, "outcome", outcome.make)

    def _apply_done(self, done: Done) -> None:
        """Apply the result of deferred work; ignore it if the request has ended meanwhile."""
        run = done.owner
        assert isinstance(run, Run)
        run.lane.awaits_background = False
        if done.name == "prepare":
            run.background_pre_us += done.spent_us
        else:
            run.background_post_us += done.spent_us
        if self._runs.get(run.job.request_id) is not run:
            return
        if done.error is not None:
            extra = {"request_id": run.job.request_id, "what": done.name}
            log.error("deferred work failed", extra=extra, exc_info=done.error)
            if done.name == "prepare":
                run.lane.waiting.remove(run)
            self._end(run, describe(done.error))
        elif done.name == "prepare":
            run.preparing, run.files = False, Prepared(done.result)
        elif done.name == "outcome":
            self._end(run, done.result)
        elif done.result is not None:
            self._record_event(run, done.result)

    def _release(self, run: Run) -> None:
        """Release a request from its engine if it is still admitted."""
        lane, request_id = run.lane, run.job.request_id
        if lane.admitted.pop(request_id, None) is not None:
            try:
                lane.engine.release(request_id)
            except Exception:
                log.exception("release failed", extra={"request_id": request_id})

    # --- Metering and outcomes --------------------------------------------------------------------

    def _charge(
        self, lane: Lane, busy_us: int, runs: list[Run], weights: list[float], spent: list[int]
    ) -> None:
        self.busy_us += busy_us
        self._turns.spend(lane.model, busy_us)
        rows = len(weights) - weights.count(0.0)
        for run, weight in zip(runs, weights, strict=True):
            run.rows = max(run.rows, rows) if weight else run.rows
        for index, phase_us in enumerate(spent):
            if phase_us:
                for run, share in zip(runs, apportion(phase_us, weights), strict=True):
                    run.spent[index] += share

    def _end(self, run: Run, outcome: Outcome) -> None:
        """Complete an outcome with the measurements and free the job's room. The only exit."""
        request_id, lane = run.job.request_id, run.lane
        del self._runs[request_id]
        self._release(run)
        lane.finishing.pop(request_id, None)
        self._background.drop(run)
        if lane is self._starved:
            self._starved = None
        for other in self._lanes.values():
            other.at_capacity = False
        preprocess_us, transfer_us, forward_us, postprocess_us = run.spent
        token_times = run.token_times
        first_us = run.queue_us + token_times.first_us - run.leased_us if token_times.started else 0
        timings = msgspec.structs.replace(
            outcome.timings,  # keeps what only the engine measures
            queue_us=run.queue_us,
            load_us=run.load_us,
            preprocess_us=preprocess_us + run.background_pre_us,
            transfer_us=transfer_us,
            forward_us=forward_us,
            postprocess_us=postprocess_us + run.background_post_us,
            first_token_us=first_us,
            per_token_us=token_times.per_token_us,
            gap_us=token_times.gap_us,
            tokens=token_times.tokens,
        )
        usage: Usage = msgspec.structs.replace(outcome.usage, gpu_us=sum(run.spent))
        if isinstance(outcome, Cancelled | Failed) and run.tally.has_delivered:
            usage = chargeable(usage, run.tally.usage())
            outcome = msgspec.structs.replace(outcome, delivered=True)
        details = RunDetails(lane.hardware.device, lane.hardware.dtype, run.rows)
        outcome = msgspec.structs.replace(
            outcome, usage=usage, timings=timings, worker=self._worker, details=details
        )
        self._report.outcomes.append((request_id, outcome))

    def _fail(self, run: Run, code: FailureCode, message: str) -> None:
        self._end(run, Failed(code=code, message=message))

    def _handle_step_failure(self, lane: Lane, error: Exception) -> None:
        """Handle a failed step: out of memory ends the youngest job, any other error ends all.

        An engine that can recover from lack of memory (by splitting its batch, say) does so itself.
        """
        failure = describe(error)
        if failure.code == "out_of_memory":
            _, youngest = next(reversed(lane.admitted.items()))
            log.warning("out of memory", extra={"request_id": youngest.job.request_id})
            self._end(youngest, failure)
        else:
            self._fail_all(lane, error)

    def _fail_all(self, lane: Lane, error: Exception) -> None:
        raise_if_device_is_lost(error)
        log.error("engine failed", extra={"model": lane.model}, exc_info=error)
        for run in list(lane.admitted.values()):
            self._end(run, describe(error))


def _identity(outcome: Outcome) -> Outcome:
    return outcome
