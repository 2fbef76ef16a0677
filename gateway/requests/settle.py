"""The one way in which a request ends: outcome in, receipt out, then whoever waits is told.

Any gateway process takes outcomes from the queue; the ledger closes the request in one transaction
and only then is the outcome removed from the queue. Settling twice changes nothing, so delivery at
least once is enough.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError

from gateway import metrics
from gateway.accounts.rates import Rates, Unused
from gateway.catalog.store import LiveCatalog
from gateway.database import Database
from gateway.failpoints import reach
from gateway.ledger.closed import Closed, Output, Problem, Status
from gateway.ledger.group import GroupCommit
from gateway.ledger.periods import booking_time
from gateway.ledger.settle import Settled as Closing
from gateway.ledger.settle import Settlement, settle
from gateway.media.intake import KEPT_TASKS
from gateway.media.store import MediaStore
from gateway.requests.wait import Waiters
from gateway.workflows.flows import Flows
from gateway.workflows.planned import StepId, read_step_id
from gateway.workflows.store import StepEnd
from workers.contract.jobs import (
    Cancelled,
    Completed,
    Failed,
    RequestId,
    SentEvent,
    Settled,
    decode_outcome,
    encode,
)
from workers.contract.streams import Delivery, Outcomes, publish

log = logging.getLogger(__name__)

BATCH_MAX: Final = 128
BLOCK_MS: Final = 1000

_WITHOUT_OUTCOME: Final[Mapping[str, tuple[Status, str, str | None]]] = {
    # Ends that the queue itself wrote: nothing ran to an end, so nothing is charged.
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
        redis: Redis,
        live: LiveCatalog,
        rates: Rates,
        waiters: Waiters,
        gateway: str,
        namespace: str,
        retention_hours: float,
        flows: Flows,
        media: MediaStore,
    ) -> None:
        self._flows = flows
        self._media = media
        self._live = live
        self._rates = rates
        self._waiters = waiters
        self._outcomes = Outcomes(redis, live.names_ever(), namespace=namespace)
        self._redis = redis
        self._gateway = gateway
        self._namespace = namespace
        retention = timedelta(hours=retention_hours)

        async def write(batch: Sequence[Settlement]) -> list[Closing | None]:
            return await database.write(
                lambda connection: settle(
                    connection,
                    batch,
                    now=booking_time(connection),
                    prices=live.prices,
                    retention=retention,
                )
            )

        self._commit = GroupCommit(write, batch_max=BATCH_MAX)

    async def run(self) -> None:
        """Settle what workers report, for ever; an outcome that cannot be booked stays queued."""
        async with asyncio.TaskGroup() as self._clearing:
            await self._run()

    async def _run(self) -> None:
        while True:
            try:
                self._outcomes.models = self._live.names_ever()
                deliveries = await self._outcomes.read(
                    self._gateway, count=BATCH_MAX, block_ms=BLOCK_MS
                )
                if deliveries:
                    await self._settle(deliveries)
            except (RedisError, OSError, DBAPIError) as error:
                log.warning("outcomes wait, trying again: %s", type(error).__name__)
                await asyncio.sleep(0.5)

    async def release(self, request_id: RequestId, *, status: Status, reason: str) -> None:
        """Close a request that will not run (any more), for nothing."""
        await self.close(Settlement(request_id, status, reason, billable=False), "")

    async def close(self, settlement: Settlement, reply: str) -> None:
        """Close a request that has ended without an outcome of its own; ``reply`` is the mailbox of
        whoever waits for it."""
        closing = await self._commit.submit(settlement)
        reach("closed")
        if closing is not None:
            await self._tell([(closing, reply)])
            await self._flows.stop(closing.running)

    async def _settle(self, deliveries: Sequence[Delivery]) -> None:
        steps = [(id, each) for each in deliveries if (id := read_step_id(each.request_id))]
        if steps:
            await self._flows.record([_step_end(id, read_delivery(each)) for id, each in steps])
            await self._outcomes.acknowledge([each for _, each in steps])
            for id, each in steps:
                self._flows.wake(id.request_id, each.reply)
            deliveries = [each for each in deliveries if read_step_id(each.request_id) is None]
        if deliveries:
            await self._close(deliveries)

    async def _close(self, deliveries: Sequence[Delivery]) -> None:
        settlements = [read_delivery(delivery) for delivery in deliveries]
        reach("before_settle")
        answers = await asyncio.gather(*(self._commit.submit(item) for item in settlements))
        closed = []
        for delivery, closing in zip(deliveries, answers, strict=True):
            if closing is None:
                metrics.LATE_OUTCOMES.inc()
            else:
                closed.append((closing, delivery.reply))
                if delivery.attempt > 1:
                    self._clear_attempts(closing.closed)
        reach("after_settle")
        await self._tell(closed)
        await self._outcomes.acknowledge(deliveries)

    def _clear_attempts(self, closed: Closed) -> None:
        """Delete what workers that died had stored of a request; nobody waits for that."""
        if closed.task in KEPT_TASKS:
            counts = closed.output.blobs if closed.output is not None else ()
            self._clearing.create_task(
                self._media.clear_attempts(closed.account_id, closed.request_id, counts)
            )

    async def _tell(self, closed: Sequence[tuple[Closing, str]]) -> None:
        """Wake whoever waits: here directly, in another process by a note in its mailbox."""
        notes: dict[str, list[SentEvent]] = {}
        for closing, reply in closed:
            self._count(closing)
            request_id = closing.closed.request_id
            woken = self._waiters.settle(request_id, closing.closed)
            if reply and reply != self._gateway and not woken:
                notes.setdefault(reply, []).append(SentEvent(request_id, 0, 0, Settled()))
        if notes:
            frames = {mailbox: encode(tuple(events)) for mailbox, events in notes.items()}
            try:
                await publish(self._redis, frames, namespace=self._namespace)
            except (RedisError, OSError) as error:
                # Only a wake-up: whoever waits looks the request up by itself before long.
                log.warning("settled requests not announced: %s", type(error).__name__)
        await self._rates.give_back_unused([_unused(closing) for closing, _ in closed])

    def _count(self, closing: Closing) -> None:
        closed = closing.closed
        metrics.SETTLED.labels(closed.model, closed.status, closed.outcome).inc()
        if closing.clipped:
            metrics.CLIPPED.labels(closed.model).inc()
            log.warning("%s used more than its limits; charged at the limit", closed.request_id)
        if closed.outcome == "charged":
            metrics.CHARGED_NANOS.labels(closed.model).inc(closed.cost_nanos)
            for phase in ("queue", "load", "preprocess", "transfer", "forward", "postprocess"):
                seconds = getattr(closed.timings, f"{phase}_us") / 1e6
                metrics.PHASE_SECONDS.labels(closed.model, phase).observe(seconds)
        if closed.status == "succeeded":
            metrics.count_delivered(closed)
        if closed.status == "succeeded" and closed.service_class == "standard":
            entry = self._live.entry(closed.model)
            metrics.count_speed(closed, entry.slo if entry else None)


def read_delivery(delivery: Delivery) -> Settlement:
    """Say how a request ended; an outcome that cannot be read fails it, at no charge."""
    request_id = RequestId(delivery.request_id)
    if not delivery.outcome:
        status, reason, message = _WITHOUT_OUTCOME.get(
            delivery.status, ("failed", "engine_error", "The job ended without an outcome.")
        )
        problem = Problem(reason, message) if message else None
        return Settlement(
            request_id, status, delivery.reason or reason, billable=False, error=problem
        )
    try:
        return judge(request_id, decode_outcome(delivery.outcome))
    except msgspec.DecodeError:
        log.error("the outcome of %s cannot be decoded", request_id)
        problem = Problem("engine_error", "The worker's answer could not be read.")
        return Settlement(request_id, "failed", "engine_error", billable=False, error=problem)


def _step_end(id: StepId, settlement: Settlement) -> StepEnd:
    return StepEnd(
        id,
        settlement.status,
        settlement.usage,
        settlement.timings,
        error=settlement.error,
        output=settlement.output if settlement.status == "succeeded" else None,
    )


def judge(request_id: RequestId, outcome: Completed | Failed | Cancelled) -> Settlement:
    """Decide what an outcome means for money: what was delivered is charged, all else is free."""
    usage, timings = outcome.usage, outcome.timings
    match outcome:
        case Completed():
            return Settlement(
                request_id,
                "succeeded",
                "completed",
                billable=True,
                usage=usage,
                timings=timings,
                output=Output(outcome.output, outcome.blobs),
            )
        case Failed():
            return Settlement(
                request_id,
                "failed",
                outcome.code,
                billable=False,
                usage=usage,
                timings=timings,
                error=Problem(outcome.code, outcome.message, outcome.param),
            )
        case Cancelled():
            in_time = outcome.reason != "deadline"
            return Settlement(
                request_id,
                "cancelled" if in_time else "expired",
                outcome.reason,
                billable=outcome.delivered and in_time,
                usage=usage,
                timings=timings,
                output=Output(outcome.output) if outcome.delivered else None,
            )


def _unused(closing: Closing) -> Unused:
    """What a request took of its rate limits and did not use."""
    closed = closing.closed
    refused = closed.status == "cancelled" and closed.reason in ("queue_full", "account_full")
    return Unused(
        closing.job.gateway_note,
        requests=1 if refused else 0,
        tokens=closing.job.limits.tokens - closed.usage.tokens,
    )
