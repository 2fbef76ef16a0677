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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

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
    Elastic,
    Engine,
    Placed,
    Prepared,
    Preparing,
    StepReport,
    Wait,
    Weighed,
)
from workers.runtime.background import Background, Done
from workers.runtime.fairness import DeficitRoundRobin
from workers.runtime.lanes import Lane, Run, as_deferred
from workers.runtime.outcomes import complete
from workers.runtime.residency import Residency
from workers.runtime.step_times import Stopwatch, apportion_phases

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
"""Interval of checks while the engines wait for deferred work, or a model for memory."""
NOT_LOADED: Final = "The model could not be loaded."


@dataclass(slots=True)
class TurnReport:
    """Events and outcomes since the previous turn; events of streamed requests only."""

    events: list[tuple[RequestId, Event]] = field(default_factory=list)
    outcomes: list[tuple[RequestId, Outcome]] = field(default_factory=list)


class StepLoop:
    """``now_us`` is a monotonic clock; ``unix_ms`` is the wall clock that deadlines refer to.

    ``background`` runs work that needs no device; by default immediately, in this thread.
    ``budget_bytes`` and ``expected`` are those of ``Residency``.
    """

    def __init__(
        self,
        *,
        worker: str,
        now_us: Callable[[], int],
        unix_ms: Callable[[], int],
        quantum_us: int = QUANTUM_US,
        background: Background | None = None,
        budget_bytes: int | None = None,
        expected: Collection[str] = (),
    ) -> None:
        self.busy_us = 0
        self.steps = 0
        self.lanes: dict[str, Lane] = {}
        self.residency = Residency(self.lanes, now_us, budget_bytes, expected)
        self.worker = worker
        self._now_us = now_us
        self._unix_ms = unix_ms
        self._quantum_us = quantum_us
        self._background = background or Background(now_us)
        self._turns = DeficitRoundRobin(quantum_us)
        self._watch = Stopwatch(now_us)
        self._runs: dict[RequestId, Run] = {}
        self._deadlines: list[tuple[int, RequestId]] = []
        self._starved: Lane | None = None
        self._report = TurnReport()

    # --- Calls between turns ----------------------------------------------------------------------

    def add(self, model: str, engine: Engine, *, weight: float = 1.0) -> None:
        """Register an engine for a model. Weights are loaded by ``load``."""
        self._turns.add(model, weight)
        self.lanes[model] = Lane(model, engine, isinstance(engine, Preparing))

    def load(self, model: str) -> str | None:
        """Load an engine's weights. On failure, fail its waiting jobs and return the reason.

        If memory is lacking and other models could leave, it stays to be loaded when they have.
        """
        lane = self.lanes[model]
        used_before = (
            lane.engine.memory.device_used_bytes if isinstance(lane.engine, Weighed) else 0
        )
        if isinstance(lane.engine, Elastic):
            lane.engine.allow(self.residency.room(lane))
        lane.load_started_us = self._now_us()
        try:
            lane.engine.load()
        except Exception as error:
            raise_if_device_is_lost(error)
            log.exception("could not load a model", extra={"model": model})
            failure = describe(error)
            if failure.code != "out_of_memory" or not self.residency.note_shortage(lane):
                self.refuse(model, f"{type(error).__name__}: {error}")
            return lane.broken
        lane.load_ended_us = lane.used_us = self._now_us()
        lane.loaded, lane.wished = True, False
        lane.loads += 1
        self.residency.measure(lane, used_before)
        if isinstance(lane.engine, Placed):
            lane.hardware = lane.engine.hardware
        return None

    def refuse(self, model: str, problem: str) -> None:
        """Fail the waiting jobs of a model that cannot be loaded, and those that come."""
        lane = self.lanes[model]
        lane.broken, lane.wished = problem, False
        while lane.waiting:
            self._fail(lane.waiting.popleft(), "model_load_failed", NOT_LOADED)

    def unload(self, model: str) -> None:
        """Free the memory of a model without running jobs. It is loaded again for its next one."""
        lane = self.lanes[model]
        assert lane.loaded
        assert not lane.admitted
        lane.loaded = lane.leaving = False
        self.residency.note_unload(lane)
        lane.engine.unload()

    def remove(self, model: str) -> None:
        """Free a model that has no jobs. No effect without an engine for it."""
        if (lane := self.lanes.pop(model, None)) is not None:
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
        lane = self.lanes[job.model]
        run = Run(job, lane, queue_us, leased_us, files)
        self._runs[job.request_id] = run
        if lane.broken is not None:
            self._fail(run, "model_load_failed", NOT_LOADED)
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
        waiting = [run for lane in self.lanes.values() for run in lane.waiting]
        for run in waiting:
            run.lane.waiting.clear()
            self._background.drop(run)
            del self._runs[run.job.request_id]
        self._starved = None
        return [run.job.request_id for run in waiting]

    @property
    def idle(self) -> bool:
        """Whether the loop has no jobs and no outcomes left to report."""
        return not self._runs and not self._report.outcomes

    @property
    def patience_s(self) -> float | None:
        """Time that the caller can wait before the next turn; None: until the next command."""
        if self.idle:
            return PATIENCE_S if self.residency.is_pending else None
        if self._report.outcomes or self._background.has_done:
            return 0.0
        for lane in self.lanes.values():
            if lane.is_ready or self._next_admissible(lane) is not None:
                return 0.0
        return PATIENCE_S

    # --- One turn ---------------------------------------------------------------------------------

    def turn(self) -> TurnReport:
        """Enforce deadlines, admit jobs while there is room, run one step of one engine."""
        self._apply_deadlines()
        for done in self._background.take():
            self._apply_done(done)
        for lane in self.lanes.values():
            if lane.waiting and lane.loaded and not lane.leaving:
                self._prepare_waiting(lane)
                if not lane.at_capacity:
                    self._admit_waiting(lane)
        ready = [model for model, lane in self.lanes.items() if lane.is_ready]
        if ready:
            self._watch.alone = len(ready) == 1
            self._step(self.lanes[self._turns.choose(ready)])
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
        if lane.at_capacity or lane.leaving or not lane.loaded:
            return None
        if len(lane.finishing) >= FINISHING_MAX:
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
            spent_us += sum(spent)
            self._charge(lane, [run], spent, [1.0])
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
        elif any(other.admitted for other in self.lanes.values()):
            lane.at_capacity = True
            self._starved = lane
        else:
            lane.waiting.remove(run)
            self._starved = None
            self._fail(run, "out_of_memory", "The request needs more memory than is available.")

    def _step(self, lane: Lane) -> None:
        self.steps += 1
        runs = list(lane.admitted.values())
        cancelled = [run for run in runs if run.cancelled is not None]
        self._watch.start()
        try:
            report = lane.engine.step(self._watch)
        except Exception as error:
            spent = self._watch.stop(rest="forward")
            self._charge(lane, runs, spent, [1.0] * len(runs))
            self._handle_step_failure(lane, error)
        else:
            spent = self._watch.stop(rest="forward")
            weights = [report.weights.get(run.job.request_id, 0.0) for run in runs]
            prepared = [report.preprocess.get(run.job.request_id, 0.0) for run in runs]
            self._charge(lane, runs, spent, weights, *prepared)
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
                self._finish_in_background(run, as_deferred(outcome))
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
        for other in self.lanes.values():
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
            for event in done.result if isinstance(done.result, list) else [done.result]:
                self._record_event(run, event)

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
        self, lane: Lane, runs: list[Run], spent: list[int], weights: list[float], *own: float
    ) -> None:
        """Divide the time of an engine's call; ``own``: weights of the phase ``preprocess``."""
        busy_us = sum(spent)
        self.busy_us += busy_us
        lane.busy_us += busy_us
        lane.longest_us = max(lane.longest_us, busy_us)
        self._turns.spend(lane.model, busy_us)
        rows = len(weights) - weights.count(0.0)
        for run, weight in zip(runs, weights, strict=True):
            run.rows = max(run.rows, rows) if weight else run.rows
        for index, shares in apportion_phases(spent, weights, own):
            for run, share in zip(runs, shares, strict=True):
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
        for other in self.lanes.values():
            other.at_capacity = False
        self.residency.note_use(lane)
        self._report.outcomes.append((request_id, complete(run, outcome, worker=self.worker)))

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
