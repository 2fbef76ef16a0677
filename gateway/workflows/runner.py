"""Runs workflows, whichever gateway accepted them: places steps, records their ends, closes runs.

A run has no lease and no owner. Its state is the hold with its plan, and the rows of its steps. The
gateway that receives the end of a step records it and places the next steps; if that gateway
crashes, the sweep of any other does. A step is placed before it is queued, and recorded before its
outcome is removed from the queue, so no step is lost and none that has ended runs again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from redis.asyncio import Redis

from gateway.aside import Aside
from gateway.catalog.store import LiveCatalog
from gateway.dispatch.enqueue import Dispatch
from gateway.dispatch.outputs import load
from gateway.dispatch.waiters import Waiters
from gateway.errors import NotFound, TollgateError
from gateway.failpoints import reach
from gateway.ledger.settle import Settlement
from gateway.ledger.steps import Running
from gateway.ledger.workflow_plan import PlannedStep, StepId, read_step_id
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE, QUEUE_OUTAGE
from gateway.supervision import Beat, Supervisor, next_of
from gateway.workflows import store
from gateway.workflows.advance import WorkflowEnded, advance, job_of, refused_step, steps_done
from gateway.workflows.store import NewStep, StepAttempt, StepEnd, WorkflowRun
from workers.contract.blobs import BlobError, Blobs
from workers.contract.jobs import (
    Event,
    Preview,
    Progress,
    RequestId,
    SentEvent,
    Stage,
    Usage,
    decode_job,
    encode,
)
from workers.contract.streams import EVENTS_S, LogEntry, publish

log = logging.getLogger(__name__)

CONCURRENCY: Final = 16
"""Maximum number of runs that are advanced concurrently."""
PROGRESS_MAX: Final = 4096
"""Maximum number of runs whose progress this process keeps."""
EVENTS_MAX: Final = 10_000
"""Maximum number of events waiting to be published; further ones are dropped."""
ORPHANS_MAX: Final = 500
CHOSEN: Final = "chosen"
"""Attribute of a usage: the candidates that were chosen."""
IDLE: Final = timedelta(seconds=10)
"""Time without a placed or ended step after which a run is swept."""
SWEEP_MAX: Final = 200
"""Maximum number of runs in one sweep."""


@dataclass(slots=True)
class _ProgressState:
    """What this process knows of a run, to report its progress."""

    done: int
    steps: int
    models: Mapping[str, str]
    output: str
    seq: int = 0


class WorkflowRunner:
    def __init__(
        self,
        *,
        database: Database,
        redis: Redis,
        live: LiveCatalog,
        dispatch: Dispatch,
        waiters: Waiters,
        aside: Aside,
        namespace: str,
        blobs: Blobs,
        events_s: int = EVENTS_S,
        close: Callable[[Settlement, str], Awaitable[None]],
    ) -> None:
        """``close`` settles a request that has ended and notifies the mailbox that waits for it."""
        self._database = database
        self._redis = redis
        self._live = live
        self._dispatch = dispatch
        self._waiters = waiters
        self._namespace = namespace
        self._blobs = blobs
        self._events_s = events_s
        self._close = close
        self._aside = aside
        self._swept: RequestId = RequestId("")
        self._woken: asyncio.Queue[tuple[RequestId, str]] = asyncio.Queue()
        self._events: asyncio.Queue[SentEvent] = asyncio.Queue(EVENTS_MAX)
        self._progress: dict[RequestId, _ProgressState] = {}

    def start(self, supervisor: Supervisor) -> None:
        """Start the tasks that advance woken runs and publish their progress."""
        supervisor.start("workflow events", self._publish)
        supervisor.start("workflows", self._advance_woken, copies=CONCURRENCY)

    def wake(self, request_id: RequestId, reply: str) -> None:
        """Advance a run soon; its events go to the mailbox ``reply``."""
        self._woken.put_nowait((request_id, reply))

    async def record(self, ends: Sequence[StepEnd]) -> None:
        """Record the ends of steps; afterwards their outcomes may be removed from the queue."""
        now = datetime.now(UTC)
        await self._database.write(lambda connection: store.record(connection, ends, now=now))
        reach("step_recorded")

    async def advance(self, request_id: RequestId, reply: str) -> None:
        """Take the next action of a run, if any. Any gateway may repeat this at any time."""
        run = await self._database.read(lambda connection: store.read_run(connection, request_id))
        if run is None:
            return
        run = await self._load_outputs(run)
        self._update_progress(run)
        now = datetime.now(UTC)
        found = advance(run.plan, run.attempts, now=now)
        if isinstance(found, WorkflowEnded):
            await self._end(run, found, reply)
            return
        wanted: list[NewStep] = []
        for step, attempt in found.steps:
            try:
                wanted.append(job_of(run, step, attempt, self._entry(step)))
            except TollgateError as error:
                await self._end(run, refused_step(step, error), reply)
                return
        if wanted:
            await self._place(run, wanted, reply)
        if found.due is not None:
            # If this process has ended by then, another one's sweep does it a little later.
            wait_s = (found.due - now).total_seconds()
            asyncio.get_running_loop().call_later(wait_s, self.wake, request_id, reply)

    async def sweep_idle(self) -> int:
        """Sweep the next ``SWEEP_MAX`` runs without a placed or ended step for a while."""
        before = datetime.now(UTC) - IDLE
        found = await self._database.read(
            lambda connection: store.idle(
                connection, before=before, after=self._swept, limit=SWEEP_MAX
            )
        )
        self._swept = found[-1] if len(found) == SWEEP_MAX else RequestId("")
        return await self.sweep(found)

    async def sweep(self, request_ids: Sequence[RequestId]) -> int:
        """Advance open runs whose gateway may have crashed, and enqueue steps that the queue lost.

        Return the number of those steps. A run that cannot be read is set aside.
        """
        lost = 0
        for start in range(0, len(request_ids), CONCURRENCY):
            some = request_ids[start : start + CONCURRENCY]
            lost += sum(await asyncio.gather(*map(self._sweep_one, some)))
        return lost

    async def _sweep_one(self, request_id: RequestId) -> int:
        lost = 0
        try:
            await self.advance(request_id, "")
            for one in await self._database.read(
                lambda connection: store.attempts_of(connection, request_id)
            ):
                if one.status is None and await self._dispatch.missing(
                    one.model, [RequestId(str(one.id))]
                ):
                    lost += await self._enqueue(one, "")
        except OUTAGE:
            raise
        except Exception as error:  # a boundary: one run must not block the others
            await self._aside.note("request", request_id, error)
        else:
            await self._aside.forget("request", request_id)
        return lost

    async def stop(self, running: Iterable[Running]) -> None:
        """Cancel running steps of closed requests."""
        stopped = []
        for one in running:
            await self._dispatch.cancel(one.model, RequestId(str(one.id)))
            stopped.append(one.id)
        if stopped:
            await self._database.write(lambda connection: store.forget(connection, stopped))

    async def stop_orphans(self) -> None:
        """Cancel steps of closed requests that were not cancelled when the requests were closed."""
        found = await self._database.read(
            lambda connection: store.orphaned(connection, limit=ORPHANS_MAX)
        )
        await self.stop(Running(id, model) for id, model in found)

    async def move(self, request_id: RequestId) -> None:
        """Redirect the events of a request's running steps to this process."""
        attempts = await self._database.read(
            lambda connection: store.attempts_of(connection, request_id)
        )
        for one in attempts:
            if one.status is None:
                await self._dispatch.move(one.model, RequestId(str(one.id)))

    def on_step_event(self, sent: SentEvent) -> None:
        """Report a worker's event of a step as an event of its run."""
        id = read_step_id(sent.request_id)
        known = self._progress.get(id.request_id) if id else None
        if id is None:
            return
        if known is None:
            self.wake(id.request_id, "")
            return
        event = sent.event
        if isinstance(event, Progress):
            stage = Stage(
                id.name,
                known.models.get(id.name, ""),
                step=event.step,
                steps=event.steps,
                eta_ms=event.eta_ms,
            )
            self._queue_event(id.request_id, Progress(known.done, known.steps, stage=stage))
        elif isinstance(event, Preview) and id.name == known.output and not event.full:
            # A full-size image would be a delivery, and a run delivers only at its end.
            self._queue_event(id.request_id, event)

    # --- Advancing --------------------------------------------------------------------------------

    async def _advance_woken(self, beat: Beat) -> None:
        while True:
            request_id, reply = await next_of(self._woken, beat)
            try:
                await self.advance(request_id, reply)
            except OUTAGE as error:
                log.warning("left %s to the sweeper: %s", request_id, type(error).__name__)
            except Exception as error:  # a boundary: the others continue
                await self._set_aside(request_id, error)
            beat()

    async def _set_aside(self, request_id: RequestId, error: Exception) -> None:
        try:
            await self._aside.note("request", request_id, error)
        except OUTAGE:
            log.exception("left %s to the sweeper", request_id)

    async def _load_outputs(self, run: WorkflowRun) -> WorkflowRun:
        """Load step outputs that are too large for SQL. Raise ``OSError`` if that fails now."""
        attempts = []
        for one in run.attempts:
            if one.output is not None and not one.output.is_loaded:
                try:
                    one = replace(one, output=await load(self._blobs, one.output))
                except BlobError as error:
                    raise OSError(f"an output of {one.id} cannot be read") from error
            attempts.append(one)
        return replace(run, attempts=tuple(attempts))

    def _entry(self, step: PlannedStep) -> Any:
        entry = self._live.entry(step.model)
        if entry is None:
            raise NotFound("model_not_found", f"{step.model} is no longer in the catalog.")
        return entry

    async def _place(self, run: WorkflowRun, wanted: Sequence[NewStep], reply: str) -> None:
        now = datetime.now(UTC)
        placed = await self._database.write(
            lambda connection: store.place(connection, run.request_id, wanted, now=now)
        )
        reach("step_placed")
        for one in placed:
            if one.status is None:
                await self._enqueue(one, reply)
                self._report_step(one.id, "retrying" if one.id.attempt > 1 else "running")

    async def _enqueue(self, one: StepAttempt, reply: str) -> int:
        entry = self._dispatch.entry(decode_job(one.job), one.job, reply=reply)
        return await self._dispatch.requeue(one.model, [entry])

    async def _end(self, run: WorkflowRun, ended: WorkflowEnded, reply: str) -> None:
        self._progress.pop(run.request_id, None)
        reach("workflow_ended")
        await self._close(
            Settlement(
                run.request_id,
                ended.status,
                ended.reason,
                billable=ended.status == "succeeded",
                usage=Usage(attributes={CHOSEN: ", ".join(ended.chosen)} if ended.chosen else {}),
                output=ended.output,
                error=ended.error,
            ),
            reply,
        )

    # --- Progress ---------------------------------------------------------------------------------

    def _update_progress(self, run: WorkflowRun) -> None:
        known = self._progress.get(run.request_id)
        done = steps_done(run)
        if known is None:
            while len(self._progress) >= PROGRESS_MAX:
                del self._progress[next(iter(self._progress))]
            models = {step.name: step.model for step in run.plan.steps}
            self._progress[run.request_id] = _ProgressState(
                done, len(run.plan.steps), models, run.plan.output
            )
        elif done > known.done:
            known.done = done
            self._queue_event(run.request_id, Progress(done, known.steps))

    def _report_step(self, id: StepId, status: Any) -> None:
        known = self._progress.get(id.request_id)
        if known is not None:
            stage = Stage(id.name, known.models.get(id.name, ""), status)
            self._queue_event(id.request_id, Progress(known.done, known.steps, stage=stage))

    def _queue_event(self, request_id: RequestId, event: Event) -> None:
        """Number an event after all earlier ones of any gateway, and queue it for publishing.

        The number is the time since the request was created, in microseconds; the request's id has
        that moment.
        """
        known = self._progress.get(request_id)
        if known is None:
            return
        created_us = int(request_id.removeprefix("req_")[:12], 16) * 1000
        age_us = int(datetime.now(UTC).timestamp() * 1_000_000) - created_us
        known.seq = max(known.seq + 1, age_us)
        try:
            self._events.put_nowait(SentEvent(request_id, 1, known.seq, event))
        except asyncio.QueueFull:
            log.warning("dropped an event of %s: too many are waiting", request_id)

    async def _publish(self, beat: Beat) -> None:
        while True:
            sent = await next_of(self._events, beat)
            entry = LogEntry(sent.request_id, sent.attempt, sent.seq, encode((sent,)))
            try:
                await publish(
                    self._redis, {}, [entry], namespace=self._namespace, events_s=self._events_s
                )
            except QUEUE_OUTAGE as error:
                log.warning("could not log an event: %s", type(error).__name__)
            self._waiters.deliver((sent,))
            beat()
