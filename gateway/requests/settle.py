"""The one way in which a request ends: outcome in, receipt out, then whoever waits is told.

Any gateway process takes outcomes from the queue; the ledger closes the request in one transaction
and only then is the outcome removed from the queue. Settling twice changes nothing, so delivery at
least once is enough.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError

from gateway import metrics
from gateway.catalog.store import LiveCatalog
from gateway.database import Database
from gateway.ledger.group import GroupCommit
from gateway.ledger.settle import Receipt, Settlement, settle
from gateway.requests.wait import Waiters
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

_WITHOUT_OUTCOME: Final = {
    # Ends that the queue itself wrote: nothing ran to an end, so nothing is charged.
    "cancelled": ("cancelled", "client", None),
    "expired": ("expired", "deadline", "The deadline passed before the request had run."),
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
        waiters: Waiters,
        gateway: str,
        namespace: str,
        retention_hours: float,
    ) -> None:
        self._live = live
        self._waiters = waiters
        self._outcomes = Outcomes(redis, live.names(), namespace=namespace)
        self._redis = redis
        self._gateway = gateway
        self._namespace = namespace
        self._retention = timedelta(hours=retention_hours)
        self._commit: GroupCommit[Settlement, Receipt | None] = GroupCommit(
            lambda batch: database.write(lambda connection: settle(connection, batch, _now())),
            batch_max=BATCH_MAX,
        )

    async def run(self) -> None:
        """Settle what workers report, for ever; an outcome that cannot be booked stays queued."""
        while True:
            try:
                self._outcomes.models = self._live.names()
                deliveries = await self._outcomes.read(
                    self._gateway, count=BATCH_MAX, block_ms=BLOCK_MS
                )
                if deliveries:
                    await self._settle(deliveries)
            except (RedisError, OSError, DBAPIError) as error:
                log.warning("outcomes wait, trying again: %s", type(error).__name__)
                await asyncio.sleep(0.5)

    async def release(self, request_id: RequestId, *, status: str, reason: str) -> None:
        """Close a request that will not run (any more), for nothing."""
        settlement = Settlement(request_id=request_id, status=status, reason=reason, billable=False)
        receipt = await self._commit.submit(settlement)
        if receipt is not None:
            await self._tell([(settlement, receipt, "")])

    async def _settle(self, deliveries: Sequence[Delivery]) -> None:
        settlements = [self._settlement(delivery) for delivery in deliveries]
        receipts = await asyncio.gather(*(self._commit.submit(s) for s in settlements))
        closed = []
        for delivery, settlement, receipt in zip(deliveries, settlements, receipts, strict=True):
            if receipt is None:
                metrics.LATE_OUTCOMES.inc()
            else:
                closed.append((settlement, receipt, delivery.reply))
        await self._tell(closed)
        await self._outcomes.acknowledge(deliveries)

    def _settlement(self, delivery: Delivery) -> Settlement:
        """Read an outcome; one that cannot be read fails its request, which is released."""
        request_id = RequestId(delivery.request_id)
        if not delivery.outcome:
            status, reason, message = _WITHOUT_OUTCOME.get(
                delivery.status, ("failed", "engine_error", "The job ended without an outcome.")
            )
            return Settlement(
                request_id=request_id,
                status=status,
                reason=delivery.reason or reason,
                billable=False,
                error_code=reason if message else None,
                error_message=message,
            )
        try:
            outcome = decode_outcome(delivery.outcome)
        except msgspec.DecodeError:
            log.error("the outcome of %s cannot be decoded", request_id)
            return Settlement(
                request_id=request_id,
                status="failed",
                reason="engine_error",
                billable=False,
                error_code="engine_error",
                error_message="The worker's answer could not be read.",
            )
        return self._judge(request_id, outcome)

    def _judge(self, request_id: RequestId, outcome: Completed | Failed | Cancelled) -> Settlement:
        """Decide what an outcome means for money: only what was delivered is charged."""
        common = {
            "request_id": request_id,
            "usage": outcome.usage,
            "timings": outcome.timings,
            "expires_at": _now() + self._retention,
        }
        match outcome:
            case Completed():
                return Settlement(
                    **common,
                    status="succeeded",
                    reason="completed",
                    billable=True,
                    output=outcome.output,
                    blobs=outcome.blobs,
                )
            case Failed():
                return Settlement(
                    **common,
                    status="failed",
                    reason=outcome.code,
                    billable=False,
                    error_code=outcome.code,
                    error_message=outcome.message,
                    error_param=outcome.param,
                )
            case Cancelled():
                return Settlement(
                    **common,
                    status="expired" if outcome.reason == "deadline" else "cancelled",
                    reason=outcome.reason,
                    billable=outcome.delivered and outcome.reason != "deadline",
                    output=outcome.output if outcome.delivered else None,
                )

    async def _tell(self, closed: Sequence[tuple[Settlement, Receipt, str]]) -> None:
        """Wake whoever waits: here directly, in another process by a note in its mailbox."""
        notes: dict[str, list[SentEvent]] = {}
        for settlement, receipt, reply in closed:
            _count(receipt)
            if self._waiters.settle(receipt.request_id, _closed(settlement, receipt)):
                continue
            if reply and reply != self._mailbox:
                note = SentEvent(receipt.request_id, 0, 0, Settled())
                notes.setdefault(reply, []).append(note)
        if notes:
            frames = {mailbox: encode(tuple(events)) for mailbox, events in notes.items()}
            try:
                await publish(self._redis, frames, namespace=self._namespace)
            except (RedisError, OSError) as error:
                # Only a wake-up: whoever waits looks the request up by itself before long.
                log.warning("settled requests not announced: %s", type(error).__name__)
