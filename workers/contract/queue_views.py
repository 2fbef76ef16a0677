"""What operators see of the queues: accounts, jobs in order, leases. Read-only and bounded.

Each function reads several models in one round trip. Other commands wait while the server reads, so
limits are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from workers.contract.queue import NAMESPACE, evaluate, prefix

JOBS_MAX: Final = 200
"""Maximum number of jobs, and of accounts, that are read of one model."""


class AccountLoad(msgspec.Struct, frozen=True):
    """Jobs of one account in the queue of a model. ``account`` is the name of its flow."""

    account: str
    queued: int
    cost: float
    """Estimated device time of its queued jobs in seconds."""
    running: int


class QueuedJob(msgspec.Struct, frozen=True):
    """A queued job. Times are Unix milliseconds; without a deadline it is 0."""

    id: str
    account: str
    attempt: int
    """Number of attempts so far."""
    enqueued_ms: int
    deadline_ms: int
    cost: float
    """Estimated device time in seconds."""


class LeasedState(msgspec.Struct, frozen=True):
    """A job that runs, or waits for a retry. Times are Unix milliseconds."""

    id: str
    account: str
    attempt: int
    enqueued_ms: int
    started_ms: int
    deadline_ms: int
    worker: str
    cancel: str
    """Reason of a requested cancellation."""
    left_ms: int
    """Time until the lease ends or, of a delayed job, until it is queued again."""


class QueueView(msgspec.Struct, frozen=True):
    """The queue of a model; each list has at most as many entries as were asked for."""

    accounts: Sequence[AccountLoad]
    jobs: Sequence[QueuedJob]
    """Queued jobs in the order in which they would be leased one by one."""
    leases: Sequence[LeasedState]
    delayed: Sequence[LeasedState]


async def queue_views(
    redis: Redis, models: Sequence[str], *, limit: int = JOBS_MAX, namespace: str = NAMESPACE
) -> dict[str, QueueView]:
    """Return what is in the queues of some models, in one round trip."""
    count = min(limit, JOBS_MAX)
    calls = [
        call
        for key in (prefix(namespace, model) for model in models)
        for call in (
            (key, "accounts", count),
            (key, "jobs", count),
            (key, "leases", "", count),
            (key, "delayed", count),
        )
    ]
    answers = iter(await evaluate(redis, calls))
    return {
        model: QueueView(
            [_account(each) for each in next(answers)],
            [_queued(each) for each in next(answers)],
            [_leased(each) for each in next(answers)],
            [_leased(each) for each in next(answers)],
        )
        for model in models
    }


async def leases_of(
    redis: Redis,
    worker: str,
    models: Sequence[str],
    *,
    limit: int = JOBS_MAX,
    namespace: str = NAMESPACE,
) -> dict[str, list[LeasedState]]:
    """Return the jobs that a worker has leased of some models, in one round trip."""
    count = min(limit, JOBS_MAX)
    calls = [(prefix(namespace, model), "leases", worker, count) for model in models]
    answers = await evaluate(redis, calls)
    return {
        model: sorted(map(_leased, answer), key=lambda each: each.started_ms)
        for model, answer in zip(models, answers, strict=True)
    }


def _account(answer: Any) -> AccountLoad:
    account, queued, cost_us, running = answer
    return AccountLoad(account.decode(), queued, cost_us / 1e6, running)


def _queued(answer: Any) -> QueuedJob:
    id, account, attempt, enqueued_ms, deadline_ms, cost_us = answer
    return QueuedJob(
        id.decode(), account.decode(), attempt, enqueued_ms, deadline_ms, cost_us / 1e6
    )


def _leased(answer: Any) -> LeasedState:
    id, account, attempt, enqueued_ms, started_ms, deadline_ms, worker, cancel, left_ms = answer
    return LeasedState(
        id.decode(),
        account.decode(),
        attempt,
        enqueued_ms,
        started_ms,
        deadline_ms,
        worker.decode(),
        cancel.decode(),
        left_ms,
    )
