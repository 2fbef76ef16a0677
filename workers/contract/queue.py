"""The queue of one model: enqueue, lease, heartbeat, complete, cancel, reclaim; each is atomic.

The operations and their keys are in ``queue.lua``, next to this file. Redis only dispatches: it can
be wiped at any moment, and the gateway that accepted a job enqueues it again. Payloads and outcomes
are opaque bytes. No command is retried here. Callers can repeat every operation after a lost
answer, and nothing changes twice: a job is enqueued once per id, a lease call returns the same
answer for the same nonce, a completion is accepted once per token.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from workers.contract.load import Load, read_load
from workers.contract.redis import BLOCK_MAX_S

NAMESPACE: Final = "gq"
"""Default prefix of all keys."""
LIVE_S: Final = 7 * 24 * 3600
"""Time to live of a key after its last use, and therefore the longest time in the queue."""
LEASE_MS: Final = 15_000
"""Duration of a lease; renewed after a third of it, so that two heartbeats can be lost."""
LEASE_COUNT_MAX: Final = 256
CRASHES_MAX: Final = 3
"""Number of crashes after which a job is dead-lettered."""
RETRIES_MAX: Final = 8
"""Maximum number of retries that workers can request; the next failure is final."""

_COST_MIN_S: Final = 0.001
"""Minimum cost: free jobs would not advance their account's tag, and could starve others."""
_SCRIPT_ENTRIES: Final = 64
"""Maximum entries of one script call, which blocks the server for about 2 ms."""
_EXISTS: Final = 250
"""Jobs checked by one command."""
_RELEASE_LIMIT: Final = 1000

Terminal: TypeAlias = Literal["ok", "failed", "cancelled", "expired", "dead"]
"""How a job ended. ``expired`` and ``dead`` are set by the queue itself, without an outcome;
``cancelled`` can be."""


class QueueEntry(msgspec.Struct, frozen=True):
    """A job to enqueue. ``cost`` is its estimated device time in seconds, the basis of fairness."""

    id: str
    account: str
    payload: bytes
    cost: float
    weight: float = 1.0
    """Share of the account: weight 3 receives three times the device time of weight 1."""
    deadline_ms: int = 0
    """Unix time in milliseconds; 0 means none. A job past its deadline is not started."""
    batch_key: str = ""
    """Only jobs with equal keys are leased together."""
    reply: str = ""
    """Mailbox of the gateway that waits."""


class Enqueued(msgspec.Struct, frozen=True):
    """``depth`` and ``cost`` (seconds) are totals of the model's queue after this entry."""

    status: Literal["ok", "duplicate", "queue_full", "account_full"]
    depth: int
    cost: float


class Lease(msgspec.Struct, frozen=True):
    """A leased job. ``token`` is the fencing token of the lease."""

    id: str
    token: str
    attempt: int
    account: str
    reply: str
    payload: bytes
    queued_us: int
    """Time from enqueueing to this lease, by the server's clock."""
    note: str = ""
    """Note stored by an earlier holder."""


class Heartbeat(msgspec.Struct, frozen=True):
    """Changes to the jobs that a worker has leased."""

    lost: tuple[str, ...]
    """Jobs whose leases were lost: stop them without further reports."""
    cancelled: Mapping[str, str]
    """id → reason (``client``, ``deadline`` or ``operator``): stop and complete these jobs."""
    replies: Mapping[str, str]
    """id → mailbox, for jobs whose mailbox changed after the lease."""


class Completion(msgspec.Struct, frozen=True):
    """The end of an attempt.

    ``retry`` requests another attempt after ``retry_ms``. If none is left, or the deadline comes
    first, the job fails with this outcome.
    """

    id: str
    token: str
    status: Literal["ok", "failed", "cancelled", "retry"]
    outcome: bytes = b""
    retry_ms: int = 0


CompletionResult: TypeAlias = Literal["done", "retrying", "already", "fenced", "unknown"]
"""``fenced``: the lease was lost and nothing was changed. ``unknown``: the server had lost the job;
the outcome of a completed or cancelled job was saved nevertheless."""

KeepResult: TypeAlias = Literal["kept", "fenced", "unknown"]
"""``fenced``: the lease was lost. ``unknown``: the server lost the job; the gateways get the
note."""


class JobState(msgspec.Struct, frozen=True):
    """State of a job, until an hour after its end. Times are Unix milliseconds, 0 if not
    reached."""

    state: Literal["queued", "running", "delayed"] | Terminal
    attempt: int
    position: int
    """Estimated position in the queue, from 1; 0 if the job is not queued."""
    enqueued_ms: int
    started_ms: int
    ended_ms: int
    worker: str
    cancel: str
    """Reason of a requested cancellation."""


class Reclaimed(msgspec.Struct, frozen=True):
    expired: int
    """Number of expired leases."""
    due: int
    """Number of delayed retries put back into the queue."""
    overdue: int
    """Number of jobs past their deadline."""


class Queue:
    """The queue of one model; stateless."""

    def __init__(self, redis: Redis, model: str, *, namespace: str = NAMESPACE) -> None:
        self.model = model
        self._redis = redis
        self._prefix = prefix(namespace, model)

    async def enqueue(
        self, entries: Sequence[QueueEntry], *, queue_max: int, account_max: int
    ) -> list[Enqueued]:
        """Enqueue new jobs within the limits, in one round trip."""
        calls = [
            (
                "enqueue",
                queue_max,
                account_max,
                *(argument for entry in chunk for argument in _arguments(entry)),
            )
            for chunk in _chunks(entries)
        ]
        return [
            Enqueued(status=answer[0].decode(), depth=answer[1], cost=answer[2] / 1e6)
            for answers in await self._call_many(calls)
            for answer in answers
        ]

    async def lease(
        self,
        worker: str,
        count: int,
        *,
        lease_ms: int = LEASE_MS,
        account_share: float = 1.0,
        look_ahead: int = 16,
        nonce: str | None = None,
    ) -> list[Lease]:
        """Lease up to ``count`` jobs with the same batch key, in fair order.

        ``worker`` is the unique name of a process, which makes one call at a time per model. If an
        answer is lost, repeat the call with the same ``nonce``. An account that runs
        ``account_share`` of the model's jobs (running plus requested) is skipped while another
        account waits. ``look_ahead`` is the number of jobs of an account that are searched for a
        matching batch key.
        """
        jobs = await self._call(
            "lease",
            worker,
            min(count, LEASE_COUNT_MAX),
            lease_ms,
            account_share,
            look_ahead,
            nonce or new_nonce(),
        )
        return [
            Lease(
                id=job[0].decode(),
                token=job[1].decode(),
                attempt=job[2],
                account=job[3].decode(),
                reply=job[4].decode(),
                payload=job[5],
                queued_us=job[6],
                note=job[7].decode(),
            )
            for job in jobs
        ]

    async def heartbeat(
        self, held: Sequence[tuple[str, str]], *, lease_ms: int = LEASE_MS
    ) -> Heartbeat:
        """Renew the leases ``(id, token)`` and return changes. Call every 5 s and when notified."""
        lost: list[str] = []
        cancelled: dict[str, str] = {}
        replies: dict[str, str] = {}
        calls = [
            ("heartbeat", lease_ms, *(argument for pair in chunk for argument in pair))
            for chunk in _chunks(held)
        ]
        for answer in await self._call_many(calls):
            lost += [id.decode() for id in answer[0]]
            cancelled |= _pairs(answer[1])
            replies |= _pairs(answer[2])
        return Heartbeat(lost=tuple(lost), cancelled=cancelled, replies=replies)

    async def complete(self, done: Sequence[Completion]) -> list[CompletionResult]:
        """End attempts, in one round trip. Store their outputs in the blob store first."""
        calls = [
            (
                "complete",
                RETRIES_MAX,
                *(
                    argument
                    for end in chunk
                    for argument in (end.id, end.token, end.status, end.outcome, end.retry_ms)
                ),
            )
            for chunk in _chunks(done)
        ]
        return [
            cast(CompletionResult, result.decode())
            for results in await self._call_many(calls)
            for result in results
        ]

    async def keep_note(self, id: str, token: str, note: str) -> KeepResult:
        """Store a small note for the next holder of the job, which receives it with its lease.

        Only a wipe of the server loses the note. Therefore the gateways receive it too, and add it
        to the job when they enqueue it again. After ``unknown``, retry until they have.
        """
        answer = await self._call("keep_note", id, token, note)
        return cast(KeepResult, answer.decode())

    async def release_worker(self, worker: str, *, crashed: bool) -> int:
        """Return all jobs of a worker to their place in the queue. Return their number.

        ``crashed`` counts as a crash of each job; the third crash dead-letters it. Without it, the
        worker only returns jobs that it will not run, as during a drain.
        """
        total = 0
        while True:
            count: int = await self._call(
                "release_worker", worker, int(crashed), CRASHES_MAX, _RELEASE_LIMIT
            )
            total += count
            if count < _RELEASE_LIMIT:
                return total

    async def cancel(
        self, id: str, reason: Literal["client", "deadline", "operator"] = "client"
    ) -> Literal["cancelled", "cancelling", "ended", "unknown"]:
        """Cancel a job: immediately if it is queued, through its worker (``cancelling``) if it
        runs.

        An ``unknown`` job is barred, so that it cannot be enqueued later.
        """
        answer = await self._call("cancel", id, reason)
        return cast(Literal["cancelled", "cancelling", "ended", "unknown"], answer.decode())

    async def reclaim(self, *, limit: int = 100) -> Reclaimed:
        """Reclaim expired leases, requeue due retries and end jobs past their deadline.

        Every worker calls this once per second; without work it takes about ten microseconds. It
        also restores the wake marker, in case the worker that popped it crashed.
        """
        expired, due, overdue = await self._call("reclaim", limit, CRASHES_MAX)
        return Reclaimed(expired=expired, due=due, overdue=overdue)

    async def remove_settlers(self, idle_ms: int) -> int:
        """Remove settlers without pending outcomes that have been idle for ``idle_ms``."""
        count: int = await self._call("remove_settlers", idle_ms)
        return count

    async def set_reply(self, id: str, mailbox: str) -> bool:
        """Redirect the events of a job to another mailbox. Return False if the job has ended."""
        return bool(await self._call("set_reply", id, mailbox))

    async def state(self, id: str) -> JobState | None:
        """Return the state of a job; None if the server does not know it."""
        return _state(await self._call("state", id))

    async def missing(self, ids: Sequence[str]) -> list[str]:
        """Return the jobs that the server does not know, in at most two round trips."""
        if not ids:
            return []
        # Usually none is missing. Counting many with one command takes a tenth of separate
        # commands.
        chunks = [ids[start : start + _EXISTS] for start in range(0, len(ids), _EXISTS)]
        counts = await self._exist([[*chunk] for chunk in chunks])
        doubtful = [
            id
            for chunk, count in zip(chunks, counts, strict=True)
            if count < len(chunk)
            for id in chunk
        ]
        if not doubtful:
            return []
        known = await self._exist([[id] for id in doubtful])
        return [id for id, found in zip(doubtful, known, strict=True) if not found]

    async def _exist(self, groups: Sequence[Sequence[str]]) -> list[int]:
        """Return the number of known jobs of each group, in one round trip."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for group in groups:
                pipeline.exists(*(f"{self._prefix}:job:{id}" for id in group))
            return await pipeline.execute()

    async def load(self) -> Load:
        """Return the model's load."""
        return read_load(await self._call("load"))

    async def _call(self, *arguments: Any) -> Any:
        return await _evaluate_one(self._redis, self._prefix, *arguments)

    async def _call_many(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await evaluate(self._redis, [(self._prefix, *arguments) for arguments in calls])


async def loads(
    redis: Redis, models: Sequence[str], *, namespace: str = NAMESPACE
) -> dict[str, Load]:
    """Return the load of several models, in one round trip."""
    answers = await evaluate(redis, [(prefix(namespace, model), "load") for model in models])
    return {model: read_load(answer) for model, answer in zip(models, answers, strict=True)}


async def states(
    redis: Redis, jobs: Sequence[tuple[str, str]], *, namespace: str = NAMESPACE
) -> list[JobState | None]:
    """Return the states of jobs, given as (model, id), in one round trip."""
    calls = [(prefix(namespace, model), "state", id) for model, id in jobs]
    return [_state(answer) for answer in await evaluate(redis, calls)]


async def wait_for_work(
    redis: Redis, models: Sequence[str], timeout_s: float, *, namespace: str = NAMESPACE
) -> str | None:
    """Wait until one of the models has work. Return its name, or None on timeout.

    Only a marker is popped; if the caller crashes now, ``reclaim`` restores it. After a timeout,
    lease anyway. On a cluster the models of one call must share a slot, so wait for each
    separately.
    """
    keys = {f"{prefix(namespace, model)}:wake": model for model in models}
    # The server pops the first key that exists: without shuffling, a busy model hides the others.
    order = random.SystemRandom().sample(list(keys), len(keys))
    found = await redis.bzpopmin(order, min(timeout_s, BLOCK_MAX_S))
    return keys[cast(bytes, found[0]).decode()] if found else None


def new_nonce() -> str:
    return secrets.token_hex(12)


def prefix(namespace: str, model: str) -> str:
    """Return the prefix of all keys of a model; the braces put them into one cluster slot."""
    return f"{namespace}:{{{model}}}"


async def _evaluate_one(redis: Redis, key: str, *arguments: Any) -> Any:
    script, sha = _script()
    try:
        return await redis.evalsha(sha, 1, key, *arguments)
    except NoScriptError:
        # The server was restarted, wiped or failed over. EVAL runs and caches the script.
        return await redis.eval(script, 1, key, *arguments)


async def evaluate(redis: Redis, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run operations, given as queue prefix, name and arguments."""
    if not calls:
        return []
    if len(calls) == 1:
        return [await _evaluate_one(redis, *calls[0])]
    # redis-py's script objects would check for each script before every pipeline.
    _, sha = _script()
    async with redis.pipeline(transaction=False) as pipeline:
        for key, *arguments in calls:
            pipeline.evalsha(sha, 1, key, *arguments)
        answers = await pipeline.execute(raise_on_error=False)
    unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
    if unknown:
        # The first call loads the script; the others are sent together again.
        answers[unknown[0]] = await _evaluate_one(redis, *calls[unknown[0]])
        again = await evaluate(redis, [calls[at] for at in unknown[1:]])
        for at, answer in zip(unknown[1:], again, strict=True):
            answers[at] = answer
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _state(answer: Any) -> JobState | None:
    if answer is None:
        return None
    return JobState(
        state=answer[0].decode(),
        attempt=answer[1],
        position=answer[2],
        enqueued_ms=answer[3],
        started_ms=answer[4],
        ended_ms=answer[5],
        worker=answer[6].decode(),
        cancel=answer[7].decode(),
    )


def _arguments(entry: QueueEntry) -> tuple[Any, ...]:
    if not entry.weight > 0:
        raise ValueError(f"job {entry.id}: weight must be positive, not {entry.weight}")
    return (
        entry.id,
        entry.account,
        entry.weight,
        round(max(entry.cost, _COST_MIN_S) * 1e6),
        entry.deadline_ms,
        entry.batch_key,
        entry.reply,
        entry.payload,
    )


_Item = TypeVar("_Item")


def _chunks(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), _SCRIPT_ENTRIES):
        yield items[start : start + _SCRIPT_ENTRIES]


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    return {flat[index].decode(): flat[index + 1].decode() for index in range(0, len(flat), 2)}


@functools.cache
def _script() -> tuple[str, str]:
    text = importlib.resources.files("workers.contract").joinpath("queue.lua").read_text()
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
