"""Enqueues accepted requests in the queues of their models, many in one round trip.

Every call may be repeated: enqueueing is idempotent by request id, so the sweeper enqueues a
request again if its enqueue was lost or in doubt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, TypeAlias

from redis.asyncio import Redis

from gateway.group_commit import GroupCommit
from gateway.settings import Settings
from gateway.tasks.registry import estimate_cost_s
from gateway.time_limit import TimeLimit
from workers.contract.jobs import Job, RequestId
from workers.contract.queue import Enqueued, Queue, QueueEntry

PATIENCE_S: Final = 5.0
BATCH_PRIORITY: Final = -1
"""Priority of a batch's jobs in an engine, below that of interactive requests."""

Status: TypeAlias = Literal["ok", "duplicate", "queue_full", "account_full"]
CancelledBy: TypeAlias = Literal["client", "operator"]

_BATCHES: Final = ":batch"


def flow_of(account_id: str, *, batch: bool) -> str:
    """Return the name of an account's flow in a model's queue; its batches are a separate flow."""
    return f"{account_id}{_BATCHES}" if batch else account_id


def is_batch_flow(flow: str) -> bool:
    """Whether a flow is that of an account's batches."""
    return flow.endswith(_BATCHES)


def weights(settings: Settings) -> Callable[[str], float]:
    """Return a function from a flow's name to its weight in the queue of a model."""
    return lambda flow: settings.batch_weight if is_batch_flow(flow) else 1.0


class Dispatch:
    def __init__(self, redis: Redis, mailbox: str, *, settings: Settings) -> None:
        self._redis = redis
        self._mailbox = mailbox
        self._settings = settings
        self._weight = weights(settings)
        self._queues: dict[str, Queue] = {}
        self._limit = TimeLimit(PATIENCE_S)
        self._groups: dict[str, GroupCommit[QueueEntry, Enqueued]] = {}

    def queue(self, model: str) -> Queue:
        if model not in self._queues:
            self._queues[model] = Queue(self._redis, model, namespace=self._settings.namespace)
        return self._queues[model]

    async def enqueue(self, model: str, entry: QueueEntry) -> Status:
        """Enqueue a job, in one round trip with others that arrive at the same time.

        Raise ``RedisError``, ``OSError`` or ``TimeoutError`` if the job may not be queued.
        """
        if model not in self._groups:
            self._groups[model] = GroupCommit(self._batch(model))
        return (await self._limit.apply(self._groups[model].submit(entry))).status

    def _batch(self, model: str) -> Callable[[Sequence[QueueEntry]], Awaitable[list[Enqueued]]]:
        queue = self.queue(model)

        async def enqueue(entries: Sequence[QueueEntry]) -> list[Enqueued]:
            return await queue.enqueue(
                entries,
                queue_max=self._settings.queue_max,
                account_max=self._settings.account_queue_max,
            )

        return enqueue

    def entry(
        self, job: Job, payload: bytes, *, batch_key: str = "", reply: str = ""
    ) -> QueueEntry:
        """Build the queue's entry of a job. Its events go to the mailbox ``reply`` or, by default,
        to this process.

        Jobs of batches belong to a separate flow of their account, with a small weight.
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
        """Return the ids that the queue does not know."""
        return set(await self.queue(model).missing(ids))

    async def requeue(self, model: str, entries: Sequence[QueueEntry]) -> int:
        """Enqueue accepted jobs again, without limits; return how many were missing."""
        answers = await self.queue(model).enqueue(entries, queue_max=2**31, account_max=2**31)
        return sum(answer.status == "ok" for answer in answers)

    async def cancel(
        self, model: str, request_id: RequestId, reason: CancelledBy = "client"
    ) -> Literal["cancelled", "cancelling", "ended", "unknown"]:
        return await self.queue(model).cancel(request_id, reason)

    async def move(self, model: str, request_id: RequestId) -> bool:
        """Redirect the events of a job to this process."""
        return await self.queue(model).set_reply(request_id, self._mailbox)
