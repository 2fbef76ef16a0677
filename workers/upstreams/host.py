"""Runs jobs of upstream models as tasks of the agent: cancellations, deadlines, timings.

Knows neither queue nor wire formats. Every job ends in one outcome, unless it is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from workers.contract.announcements import EndpointState
from workers.contract.attempts import RunDetails
from workers.contract.delivered import Tally, chargeable
from workers.contract.jobs import (
    Cancelled,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
    Timings,
    Tokens,
)
from workers.contract.models import ModelSpec
from workers.protocol.engine import CancelReason
from workers.protocol.host import Report
from workers.protocol.ipc import JobHandoff
from workers.runtime.step_times import Stopwatch, TokenTimes
from workers.upstreams.dialects import Call, Dialect, connect
from workers.upstreams.notes import Notes
from workers.upstreams.servers import DevicePool, Server

log = logging.getLogger(__name__)


async def _keep_nothing(request_id: RequestId, note: str) -> bool:
    """For a host whose jobs are not taken over by other workers."""
    return True


@dataclass(slots=True, eq=False)
class _Run:
    handoff: JobHandoff
    dialect: Dialect
    watch: Stopwatch
    call: Call | None = None
    task: asyncio.Task[None] | None = None
    cancelled: CancelReason | None = None
    token_times: TokenTimes = field(default_factory=TokenTimes)
    tally: Tally = field(default_factory=Tally)
    """What has been streamed."""

    @property
    def job(self) -> Job:
        return self.handoff.job


class UpstreamHost:
    """The host of all upstream models of a worker."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        worker: str,
        environ: Mapping[str, str],
        report: Report,
        keep_note: Callable[[RequestId, str], Awaitable[bool]] = _keep_nothing,
        server_environ: Mapping[str, str] | None = None,
        server_devices: Sequence[str] = (),
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``server_environ`` and ``server_devices`` are those of servers that it starts;
        ``changed`` is called when one of them is ready or is no longer."""
        self._worker = worker
        self._report = report
        self._keep_note = keep_note
        self._environ = environ
        self._started = False
        self._server_environ = server_environ or {}
        self._pool = DevicePool(server_devices)
        self._changed = changed
        self._servers: dict[Dialect, Server] = {}
        self._dialects: dict[str, Dialect] = {spec.name: self._connect(spec) for spec in specs}
        self._retired: set[Dialect] = set()
        """Clients whose entry changed, until their last job has ended."""
        self._tasks = asyncio.TaskGroup()
        self._runs: dict[RequestId, _Run] = {}

    async def run(self) -> None:
        """Own the tasks of all jobs until cancelled."""
        try:
            async with self._tasks:
                for server in self._servers.values():
                    server.start()
                self._started = True
                await asyncio.Event().wait()
        finally:
            open = (*self._dialects.values(), *self._retired)
            await asyncio.gather(*(dialect.close() for dialect in open))
            await asyncio.gather(*(server.stop() for server in self._servers.values()))

    def add(self, spec: ModelSpec) -> None:
        """Serve another model, or from the next job on the new entry of one."""
        self.remove(spec.name)
        self._dialects[spec.name] = self._connect(spec)

    def _connect(self, spec: ModelSpec) -> Dialect:
        """Create the client of an entry and, if it has a command, the server for it."""
        assert spec.upstream is not None
        if spec.upstream.command is None:
            return connect(spec, self._environ)
        server = Server(spec, environ=self._server_environ, pool=self._pool, changed=self._changed)
        dialect = connect(msgspec.structs.replace(spec, upstream=server.spec), self._environ)
        self._servers[dialect] = server
        if self._started:
            server.start()
        return dialect

    def remove(self, model: str) -> None:
        """Serve a model no longer. Its running jobs end as they would."""
        dialect = self._dialects.pop(model, None)
        if dialect is not None:
            self._retired.add(dialect)
            self._tasks.create_task(self._close(dialect))

    async def _close(self, dialect: Dialect) -> None:
        while tasks := [run.task for run in self._runs.values() if run.dialect is dialect]:
            await asyncio.wait([task for task in tasks if task is not None])
        await dialect.close()
        if (server := self._servers.pop(dialect, None)) is not None:
            await server.stop()
        self._retired.remove(dialect)

    def takes(self, model: str) -> bool:
        """Whether calls of a model can be made: its server is ready, if the worker runs one."""
        server = self._server_of(model)
        return server is None or server.ready

    @property
    def starting(self) -> tuple[str, ...]:
        """Models whose servers start for the first time."""
        return tuple(
            model
            for model in self._dialects
            if not self.takes(model) and model not in self.problems
        )

    @property
    def problems(self) -> dict[str, str]:
        """Reason by model, for the operator, if its server could not be started or has ended."""
        servers = {model: self._server_of(model) for model in self._dialects}
        return {
            model: server.problem
            for model, server in servers.items()
            if server is not None and server.problem is not None
        }

    def _server_of(self, model: str) -> Server | None:
        dialect = self._dialects.get(model)
        return None if dialect is None else self._servers.get(dialect)

    @property
    def down(self) -> set[str]:
        """Models whose endpoints are all down."""
        return {model for model, dialect in self._dialects.items() if dialect.is_down}

    @property
    def endpoints(self) -> list[EndpointState]:
        """State of the endpoints of all models."""
        return [
            endpoint.state(model)
            for model, dialect in self._dialects.items()
            for endpoint in dialect.endpoints.all
        ]

    def submit(self, jobs: Sequence[JobHandoff]) -> None:
        for handoff in jobs:
            run = _Run(handoff, self._dialects[handoff.job.model], Stopwatch(_now_us))
            run.watch.start()
            self._runs[run.job.request_id] = run
            run.task = self._tasks.create_task(self._run_job(run))

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        run = self._runs.get(request_id)
        if run is None or run.cancelled is not None or run.task is None:
            return
        run.cancelled = reason
        run.task.cancel()
        if run.call is None:  # a task that has not started does not see its cancellation
            self._end(run, Cancelled(reason=reason))

    def abandon(self, request_id: RequestId) -> None:
        run = self._runs.pop(request_id, None)
        if run is not None and run.task is not None:
            run.task.cancel()

    async def handover_ready(self, timeout_s: float) -> None:
        """Wait until other workers can take over every job, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for call in [run.call for run in self._runs.values()]:
                    if call is not None:
                        await call.handover_ready()

    async def _run_job(self, run: _Run) -> None:
        """Run a job to its outcome. Any exception becomes its failure."""
        try:
            outcome = await self._answer(run)
        except asyncio.CancelledError:
            if run.cancelled is None:  # abandoned, or the host ends
                raise
            outcome = _cancelled(run, run.cancelled)
        except Exception as error:
            log.exception("upstream call failed", extra={"request_id": run.job.request_id})
            outcome = Failed(
                code="upstream_error",
                message=f"The call to the upstream failed ({type(error).__name__}).",
            )
        self._end(run, outcome)

    async def _answer(self, run: _Run) -> Outcome:
        deadline: asyncio.TimerHandle | None = None
        if run.job.deadline_ms:
            left_s = run.job.deadline_ms / 1000 - time.time()
            deadline = asyncio.get_running_loop().call_later(
                left_s, self.cancel, run.job.request_id, "deadline"
            )
        try:
            run.call = run.dialect.call(
                run.job,
                lambda event: self._send_event(run, event),
                run.handoff.files,
                Notes(run.handoff.note, functools.partial(self._keep_note, run.job.request_id)),
            )
            # The call keeps the attachments as long as it needs them.
            run.handoff = msgspec.structs.replace(run.handoff, files=())
            return await run.call.run(run.watch)
        finally:
            if deadline is not None:
                deadline.cancel()

    def _send_event(self, run: _Run, event: Event) -> None:
        if isinstance(event, Tokens):
            run.token_times.record_tokens(event.index, event.count, _now_us())
        if run.job.stream and self._runs.get(run.job.request_id) is run:
            run.tally.record(event)
            self._report(((run.job.request_id, event),), ())

    def _end(self, run: _Run, outcome: Outcome) -> None:
        if self._runs.get(run.job.request_id) is not run:
            return
        del self._runs[run.job.request_id]
        preprocess_us, transfer_us, forward_us, postprocess_us = run.watch.stop(rest="postprocess")
        times, handoff = run.token_times, run.handoff
        first_us = handoff.queue_us + times.first_us - handoff.leased_us if times.tokens else 0
        timings = Timings(
            queue_us=handoff.queue_us,
            preprocess_us=preprocess_us,
            transfer_us=transfer_us,
            forward_us=forward_us,
            postprocess_us=postprocess_us,
            first_token_us=first_us,
            per_token_us=times.per_token_us,
            gap_us=times.gap_us,
            # Events count chunks if an upstream does not report tokens; its usage is exact.
            tokens=outcome.usage.output_tokens or times.tokens,
        )
        details = RunDetails()
        if run.call is not None:
            details = RunDetails(endpoint=run.call.endpoint, served_by=run.call.served_by)
            called = run.dialect.endpoints.find(details.endpoint, details.served_by)
            if called is not None:
                code = outcome.code if isinstance(outcome, Failed) else None
                called.record(transfer_us + forward_us, code)
        outcome = msgspec.structs.replace(
            _with_delivery(run, outcome),
            timings=timings,
            worker=self._worker,
            details=details,
        )
        run.call = None  # it refers to the run: without this, only a collection would free both
        self._report((), ((run.job.request_id, outcome),))


def _cancelled(run: _Run, reason: CancelReason) -> Cancelled:
    if run.call is None:
        return Cancelled(reason=reason)
    run.call.stop()
    usage, output = run.call.partial_result()
    return Cancelled(reason=reason, usage=usage, output=output)


def _with_delivery(run: _Run, outcome: Outcome) -> Outcome:
    """Add what was streamed to an outcome that is not a success."""
    if not isinstance(outcome, Cancelled | Failed) or not run.tally.has_delivered:
        return outcome
    usage, output = outcome.usage, outcome.output
    if isinstance(outcome, Failed) and run.call is not None:
        usage, output = run.call.partial_result()
    usage = chargeable(usage, run.tally.usage())
    return msgspec.structs.replace(outcome, delivered=True, usage=usage, output=output)


def _now_us() -> int:
    return time.monotonic_ns() // 1000
