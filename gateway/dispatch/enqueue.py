"""Puts accepted requests into the queues of their models, many in one round trip.

Everything here may be repeated: enqueueing is idempotent by request id, so a request whose enqueue
was lost or doubtful is simply enqueued again by the sweeper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, TypeAlias

from redis.asyncio import Redis

from gateway.group_commit import GroupCommit
from gateway.settings import Settings
from gateway.tasks.registry import estimate_cost_s
from workers.contract.jobs import Job, RequestId
from workers.contract.queue import Enqueued, Queue, QueueEntry

PATIENCE_S: Final = 5.0
BATCH_PRIORITY: Final = -1
"""Of a batch's jobs in an engine: whatever somebody waits for goes first."""

Status: TypeAlias = Literal["ok", "duplicate", "queue_full", "account_full"]


_BATCHES: Final = ":batch"


def flow_of(account_id: str, *, batch: bool) -> str:
    """The name of an account in the queue of a model; its batches are a flow of their own."""
    return f"{account_id}{_BATCHES}" if batch else account_id


def weights(settings: Settings) -> Callable[[str], float]:
    """The share of each flow in the queue of a model, by its name."""
    return lambda flow: settings.batch_weight if flow.endswith(_BATCHES) else 1.0


class Dispatch:
    def __init__(self, redis: Redis, mailbox: str, *, settings: Settings) -> None:
        self._redis = redis
        self._mailbox = mailbox
        self._settings = settings
        self._weight = weights(settings)
        self._queues: dict[str, Queue] = {}
        self._groups: dict[str, GroupCommit[QueueEntry, Enqueued]] = {}

    def queue(self, model: str) -> Queue:
        if model not in self._queues:
            self._queues[model] = Queue(self._redis, model, namespace=self._settings.namespace)
        return self._queues[model]

    async def enqueue(self, model: str, entry: QueueEntry) -> Status:
        """Queue one job together with whatever else arrives in the same instant.

        Raise ``RedisError``, ``OSError`` or ``TimeoutError`` if it is not known to be queued.
        """
        if model not in self._groups:
            self._groups[model] = GroupCommit(self._batch(model))
        async with asyncio.timeout(PATIENCE_S):
            return (await self._groups[model].submit(entry)).status

    def _batch(self, model: str) -> Callable[[Sequence[QueueEntry]], Awaitable[list[Enqueued]]]:
        async def enqueue(entries: Sequence[QueueEntry]) -> list[Enqueued]:
            return await self.queue(model).enqueue(
                entries,
                queue_max=self._settings.queue_max,
                account_max=self._settings.account_queue_max,
            )

        return enqueue

    def entry(
        self, job: Job, payload: bytes, *, batch_key: str = "", reply: str = ""
    ) -> QueueEntry:
        """Make the queue's view of a job; its events come to this process, or to ``reply``.

        Jobs of batches are a flow of their own beside their account's, of a small share.
        """
        account = flow_of(job.account_id, batch=job.priority <= BATCH_PRIORITY)
        return QueueEntry(
            id=job.request_id,
            account=account,
            weight=self._weight(account),
            payload=payload,
            cost=estimate_cost_s(job.limits),
            deadline_ms=job.deadline_ms,
            batch_key=batch_key,
            reply=reply or self._mailbox,
        )

    async def missing(self, model: str, ids: Sequence[RequestId]) -> set[str]:
        """Say which of these jobs the queue does not know."""
        return set(await self.queue(model).missing(ids))

    async def requeue(self, model: str, entries: Sequence[QueueEntry]) -> int:
        """Queue accepted jobs again, bounds or not; return how many were not known."""
        answers = await self.queue(model).enqueue(entries, queue_max=2**31, account_max=2**31)
        return sum(answer.status == "ok" for answer in answers)

    async def cancel(
        self, model: str, request_id: RequestId
    ) -> Literal["cancelled", "cancelling", "ended", "unknown"]:
        return await self.queue(model).cancel(request_id)

    async def move(self, model: str, request_id: RequestId) -> bool:
        """Have the events of a job sent to this process from now on."""
        return await self.queue(model).set_reply(request_id, self._mailbox)
