"""Settles requests: takes outcomes from the queue, closes the requests, wakes waiting clients.

Any gateway process can settle any request. The ledger closes it in one transaction, and only then
is the outcome acknowledged. Settling is idempotent, so at-least-once delivery is sufficient.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway import metrics
from gateway.accounts.cancelled import CancelledTime
from gateway.accounts.rates import Rates, UnusedRates
from gateway.aside import Aside
from gateway.catalog.store import LiveCatalog
from gateway.dispatch.follow import logged
from gateway.dispatch.waiters import Waiters
from gateway.errors import Unavailable
from gateway.failpoints import reach
from gateway.files.retention import MediaStore
from gateway.ledger.closed import ClosedRequest, Output, RequestError, Status
from gateway.ledger.expenses import run_record
from gateway.ledger.settle import Closing, Settlement
from gateway.ledger.workflow_plan import StepId, read_step_id
from gateway.ledger.writer import LedgerWriter
from gateway.requests.large_outputs import LargeOutputs
from gateway.requests.measured import cancelled_us, count_closed
from gateway.requests.notes import keep_notes
from gateway.requests.streamed import NOT_STREAMED, Streamed, either, read_streamed
from gateway.requests.unread import keep_unread
from gateway.sql.database import Database
from gateway.sql.outages import OUTAGE, QUEUE_OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.workflows.runner import WorkflowRunner
from gateway.workflows.store import StepEnd
from workers.contract.jobs import (
    BlobRef,
    Cancelled,
    Completed,
    Failed,
    RequestId,
    SentEvent,
    Settled,
    decode_outcome,
    encode,
)
from workers.contract.redis import QueueClient
from workers.contract.streams import Delivery, EventLog, Outcomes, publish

log = logging.getLogger(__name__)

RELEASED: Final = "The request could not be run and was released by the operator."

BATCH_MAX: Final = 128
BLOCK_MS: Final = 1000
DELIVERIES_MAX: Final = 3
"""Deliveries after which an outcome that cannot be booked ends its request as failed."""
_LATER: Final = (Unavailable, asyncio.CancelledError, *OUTAGE)
"""Errors after which settling is retried."""

_WITHOUT_OUTCOME: Final[Mapping[str, tuple[Status, str, str | None]]] = {
    # Jobs ended by the queue itself. The event log shows what was delivered.
    "cancelled": ("cancelled", "client", None),
    "expired": ("expired", "deadline", None),
    "dead": (
        "failed",
        "worker_lost",
        "The worker was lost three times while it ran this request; it will not be tried again.",
    ),
}


class Settler:
    def __init__(
        self,
        *,
        database: Database,
        redis: QueueClient,
        live: LiveCatalog,
        rates: Rates,
        cancelled: CancelledTime,
        waiters: Waiters,
        gateway: str,
        namespace: str,
        ledger: LedgerWriter,
        flows: WorkflowRunner,
        media: MediaStore,
        aside: Aside,
        output_row_bytes_max: int,
    ) -> None:
        self._aside = aside
        self._flows = flows
        self._media = media
        self._live = live
        self._rates = rates
        self._cancelled = cancelled
        self._waiters = waiters
        self._outcomes = Outcomes(redis, live.names_ever, namespace=namespace)
        self._log = EventLog(redis, namespace=namespace)
        self._redis = redis
        self._gateway = gateway
        self._namespace = namespace
        self._ledger = ledger
        self._write = database.write
        self._large = LargeOutputs(media, ledger, row_bytes_max=output_row_bytes_max)
        self._clearing: set[asyncio.Task[None]] = set()

    async def run(self, beat: Beat = no_beat) -> None:
        """Settle outcomes until cancelled. An outcome that cannot be booked stays queued."""
        async with self._large:
            while True:
                try:
                    self._outcomes.models = self._live.names_ever
                    deliveries = await self._outcomes.read(
                        self._gateway, count=BATCH_MAX, block_ms=BLOCK_MS
                    )
                    if deliveries:
                        await self._settle(deliveries)
                except OUTAGE as error:
                    log.warning("outcomes wait, trying again: %s", type(error).__name__)
                    await asyncio.sleep(0.5)
                beat()

    async def release(
        self, request_id: RequestId, *, status: Status, reason: str, freed: str | None = None
    ) -> None:
        """Close a request that never ran, without a charge. ``freed`` is its idempotency key if the
        same request may be sent again."""
        await self.close(Settlement(request_id, status, reason, billable=False, freed=freed), "")

    async def give_up(self, request_id: RequestId, *, status: Status, reason: str) -> None:
        """Close a request whose outcome will not arrive. What its event log shows as delivered is
        charged. Raise ``RedisError`` if the log cannot be read."""
        streamed = await self._streamed(request_id)
        await self.close(judge_end(request_id, status, reason, None, streamed), "")

    async def close(self, settlement: Settlement, reply: str) -> None:
        """Close a request that ended without an outcome from a worker.

        ``reply`` is the mailbox of the gateway that waits for it, or empty.
        """
        closing = await self._large.settle(settlement)
        reach("closed")
        if closing is not None:
            await self._tell([(closing, reply)])
            await self._flows.stop(closing.running)

    async def _settle(self, deliveries: Sequence[Delivery]) -> None:
        notes: list[Delivery] = []
        steps: list[tuple[StepId, Delivery]] = []
        ends: list[Delivery] = []
        large: list[Delivery] = []
        for each in deliveries:
            if each.status == "note":
                notes.append(each)
            elif "." in each.request_id and (id := read_step_id(each.request_id)):
                steps.append((id, each))
            elif len(each.outcome) > self._large.row_bytes_max:
                large.append(each)
            else:
                ends.append(each)
        if large:
            await self._large.begin(self._close(large))
        if notes:
            await self._keep_notes(notes)
        if steps:
            await self._record(steps)
            await self._outcomes.acknowledge([each for _, each in steps])
            for id, each in steps:
                self._flows.wake(id.request_id, each.reply)
        if ends:
            await self._close(ends)

    async def _keep_notes(self, notes: Sequence[Delivery]) -> None:
        kept = {each.request_id: each.outcome.decode(errors="replace") for each in notes}
        try:
            await self._write(lambda connection: keep_notes(connection, kept))
        except OUTAGE:
            raise
        except Exception:  # a boundary: the outcomes behind them are settled
            log.exception("could not store the notes of %d requests", len(kept))
        await self._outcomes.acknowledge(notes)

    async def _record(self, steps: Sequence[tuple[StepId, Delivery]]) -> None:
        """Record the outcomes of steps. If one cannot be stored, set it aside and fail the step."""
        settlements = [decode_delivery(each) for _, each in steps]
        for settlement, (id, each) in zip(settlements, steps, strict=True):
            await keep_unread(self._aside, settlement, str(id), each.model)
        ends = [_step_end(id, end) for end, (id, _) in zip(settlements, steps, strict=True)]
        try:
            await self._write_down(ends)
            return
        except OUTAGE:
            raise
        except Exception:
            log.exception("could not record steps together; recording them one by one")
        for end in ends:
            try:
                await self._write_down([end])
            except OUTAGE:
                raise
            except Exception as error:
                await self._aside.count("outcome", str(end.id), error)
                await self._flows.record([_step_end(end.id, unbooked(end.id.request_id))])

    async def _write_down(self, ends: Sequence[StepEnd]) -> None:
        await self._media.record_stored(_stored_outputs(ends))
        await self._flows.record(ends)

    async def _close(self, deliveries: Sequence[Delivery]) -> None:
        """Settle outcomes. Those that cannot be settled now are delivered again."""
        reach("before_settle")
        answers = await asyncio.gather(*map(self._begin, deliveries), return_exceptions=True)
        closed: list[tuple[Closing, str]] = []
        done: list[Delivery] = []
        outage: BaseException | None = None
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, _LATER):
                outage = answer
                continue
            if isinstance(answer, BaseException):
                gave_up, answer = await self._set_aside(delivery, answer)
                if not gave_up:
                    continue
            done.append(delivery)
            if answer is None:
                metrics.LATE_OUTCOMES.inc()
                # A client that still waits here looks it up, in case its hold was lost.
                self._waiters.settle(RequestId(delivery.request_id))
            else:
                closed.append((answer, delivery.reply))
                if delivery.attempt > 1:
                    self._clear_attempts(answer.closed)
        reach("after_settle")
        await self._tell(closed)
        self._outcomes.acknowledge_soon(done)
        if outage is not None:
            log.warning("outcomes wait, trying again: %s", type(outage).__name__)
            await asyncio.sleep(0.5)

    async def _set_aside(
        self, delivery: Delivery, error: BaseException
    ) -> tuple[bool, Closing | None]:
        """Record an outcome that cannot be booked. Return whether it was given up.

        It is delivered a few more times, because a gateway of another version may be able to book
        it. Then its request ends as failed, without a charge. If that cannot be booked either, the
        sweeper releases the hold after the deadline.
        """
        id = RequestId(delivery.request_id)
        log.error("could not book the outcome of %s", id, exc_info=error)
        times = await self._aside.count("outcome", id, error)
        if times < DELIVERIES_MAX:
            return False, None
        try:
            return True, await self._ledger.settle(unbooked(id))
        except _LATER:
            return False, None
        except Exception as problem:
            await self._aside.note("request", id, problem)
            return True, None

    def _begin(self, delivery: Delivery) -> Awaitable[Closing | None]:
        """Begin to settle an outcome. Most are only booked, which needs no task."""
        with contextlib.suppress(Exception):  # raised again by ``_book``
            settlement = decode_delivery(delivery)
            output = settlement.output
            large = len(delivery.outcome) > self._large.row_bytes_max
            stored = large or (output is not None and output.stored is not None)
            if settlement.status == "succeeded" and not stored and settlement.unread is None:
                return self._ledger.settle(settlement)
        return self._book(delivery)

    async def _book(self, delivery: Delivery) -> Closing | None:
        settlement = await self._read(delivery)
        output = settlement.output
        if output is not None and output.stored is not None:
            await self._media.record_stored([output.stored])
        if settlement.unread is not None:
            await keep_unread(self._aside, settlement, settlement.request_id, delivery.model)
        # The event log can contain more than the outcome of a request that failed.
        logged = output is not None and settlement.status != "succeeded"
        if logged or len(delivery.outcome) > self._large.row_bytes_max:
            return await self._large.settle(settlement)
        return await self._ledger.settle(settlement)

    async def _read(self, delivery: Delivery) -> Settlement:
        """Decode a delivery. The event log is read only if the outcome may not know everything that
        was delivered."""
        settlement = decode_delivery(delivery)
        lost = delivery.attempt > (1 if delivery.outcome else 0)
        partial = settlement.status == "failed" and settlement.billable
        if settlement.status == "succeeded" or not (lost or partial):
            return settlement
        return decode_delivery(delivery, await self._streamed(settlement.request_id))

    async def _streamed(self, request_id: RequestId) -> Streamed:
        return read_streamed(await logged(self._log, request_id, (0, 0)))

    def _clear_attempts(self, closed: ClosedRequest) -> None:
        """Delete the blobs of failed attempts, in the background."""
        output = closed.output or Output()
        counts = output.blobs if output.stored is None else (*output.blobs, output.stored)
        self._clear(self._media.clear_attempts(closed.account_id, closed.request_id, counts))

    def _clear_input(self, closed: ClosedRequest) -> None:
        """Delete a stored input, which no worker needs any more."""
        keeps = closed.output is not None and closed.output.stored is not None
        release = self._media.release_input(closed.account_id, closed.request_id, keeps=keeps)
        self._clear(release)

    def _clear(self, clearing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(clearing)
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _tell(self, closed: Sequence[tuple[Closing, str]]) -> None:
        """Wake the waiting clients: in this process directly, in others by mailbox. Then count."""
        notes: dict[str, list[SentEvent]] = {}
        for closing, reply in closed:
            request_id = closing.closed.request_id
            woken = self._waiters.settle(request_id, closing.closed)
            if reply and reply != self._gateway and not woken:
                notes.setdefault(reply, []).append(SentEvent(request_id, 0, 0, Settled()))
            if closing.job.stored_input is not None:
                self._clear_input(closing.closed)
            if closing.clipped:
                metrics.CLIPPED.labels(closing.closed.model).inc()
                log.warning("%s exceeded its limits; charge capped", request_id)
        try:
            count_closed([closing.closed for closing, _ in closed], self._live.find)
        except Exception:  # a boundary: metrics must not end the settler
            log.exception("could not count %d settled requests", len(closed))
        if notes:
            frames = {mailbox: encode(tuple(events)) for mailbox, events in notes.items()}
            try:
                await publish(self._redis, frames, namespace=self._namespace)
            except QUEUE_OUTAGE as error:
                # Only a wake-up: waiting clients also poll.
                log.warning(
                    "could not notify gateways of settled requests: %s", type(error).__name__
                )
        limited = [_unused(closing) for closing, _ in closed if closing.job.gateway_note]
        if limited:
            await self._rates.return_unused(limited)
        if cancelled := cancelled_us([closing.closed for closing, _ in closed]):
            await self._cancelled.count(cancelled)


def decode_delivery(delivery: Delivery, streamed: Streamed = NOT_STREAMED) -> Settlement:
    """Convert a delivery to a settlement. A request whose outcome cannot be decoded fails.

    ``streamed`` is the content of its event log, if that was read.
    """
    request_id = RequestId(delivery.request_id)
    if not delivery.outcome:
        status, reason, message = _WITHOUT_OUTCOME.get(
            delivery.status, ("failed", "engine_error", "The job ended without an outcome.")
        )
        problem = RequestError(reason, message) if message else None
        if status != "failed":
            reason = delivery.reason or reason
        return judge_end(request_id, status, reason, problem, streamed)
    try:
        end = decode_outcome(delivery.outcome)
        return to_settlement(request_id, end, streamed, delivery.attempt)
    except msgspec.DecodeError:
        log.error("could not decode the outcome of %s", request_id)
        problem = RequestError("engine_error", "The worker's answer could not be read.")
        return judge_end(request_id, "failed", "engine_error", problem, streamed)


def unbooked(request_id: RequestId) -> Settlement:
    """Return the settlement of a request whose outcome cannot be booked: failed, not charged."""
    problem = RequestError("engine_error", "The outcome of the request could not be booked.")
    return Settlement(request_id, "failed", "unbooked", billable=False, error=problem)


def released(request_id: RequestId) -> Settlement:
    """Return the settlement of a request that the operator gave up: failed, not charged."""
    problem = RequestError("engine_error", RELEASED)
    return Settlement(request_id, "failed", "operator", billable=False, error=problem)


def _stored_outputs(ends: Iterable[Settlement | StepEnd]) -> list[BlobRef]:
    """Return the outputs that workers moved to the blob store."""
    outputs = (end.output for end in ends)
    return [output.stored for output in outputs if output and output.stored]


def _step_end(id: StepId, settlement: Settlement) -> StepEnd:
    return StepEnd(
        id,
        settlement.status,
        settlement.usage,
        settlement.timings,
        error=settlement.error,
        output=settlement.output if settlement.status == "succeeded" else None,
    )


def to_settlement(
    request_id: RequestId,
    outcome: Completed | Failed | Cancelled,
    streamed: Streamed = NOT_STREAMED,
    attempt: int = 0,
) -> Settlement:
    """Convert an outcome to a settlement that charges what was delivered, and nothing else.

    How the request ended does not matter. ``streamed`` is what the event log shows of earlier
    attempts, which the outcome does not know.
    """
    timings, run = outcome.timings, run_record(outcome.worker, attempt, outcome.details)
    match outcome:
        case Completed():
            return Settlement(
                request_id,
                "succeeded",
                "completed",
                billable=True,
                usage=outcome.usage,
                timings=timings,
                output=Output(outcome.output, outcome.blobs, outcome.stored),
                run=run,
                unread=outcome.unread,
            )
        case Failed():
            status: Status = "failed"
            reason: str = outcome.code
            problem: RequestError | None = RequestError(
                outcome.code, outcome.message, outcome.param
            )
        case Cancelled():
            status = "expired" if outcome.reason == "deadline" else "cancelled"
            reason, problem = outcome.reason, None
    own = NOT_STREAMED
    if outcome.delivered:
        given = Output(outcome.output, outcome.blobs, outcome.stored)
        own = Streamed(outcome.usage, given if given != Output() else None)
    settlement = judge_end(request_id, status, reason, problem, either(own, streamed))
    usage = settlement.usage if settlement.billable else outcome.usage
    measured = {"steps": outcome.usage.steps, "gpu_us": outcome.usage.gpu_us}
    attributes = {**outcome.usage.attributes, **usage.attributes}
    usage = msgspec.structs.replace(usage, **measured, attributes=attributes)
    unread = outcome.unread if isinstance(outcome, Failed) else None
    return msgspec.structs.replace(settlement, usage=usage, timings=timings, run=run, unread=unread)


def judge_end(
    request_id: RequestId,
    status: Status,
    reason: str,
    problem: RequestError | None,
    streamed: Streamed,
) -> Settlement:
    """Return the settlement of a request that did not complete: charged for what was delivered."""
    return Settlement(
        request_id,
        status,
        reason,
        billable=bool(streamed.usage.requests),
        usage=streamed.usage,
        output=streamed.output,
        error=problem,
    )


def _unused(closing: Closing) -> UnusedRates:
    """Compute what to return to the rate limits: unused tokens, and the request if refused."""
    closed = closing.closed
    return UnusedRates(
        closing.job.gateway_note,
        requests=0 if closed.was_queued else 1,
        tokens=closing.job.limits.tokens - closed.usage.tokens,
    )
