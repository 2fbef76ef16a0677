"""The queue of one model: enqueue, lease, heartbeat, complete, cancel, reap; each is atomic.

The moves themselves are in ``queue.lua``, next to this file, with the keys they use. Redis only
dispatches: it may be wiped at any moment, and whoever accepted a job enqueues it again. Payloads
and outcomes are opaque bytes. Nothing here repeats a command by itself; every operation may be
repeated by its caller after a lost answer and then changes nothing twice: a job is enqueued once
per id, a lease is answered again for the same nonce, a completion is accepted once per token.
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
"""Time to live of a key after it was last of use; no job may be queued for longer."""
LEASE_MS: Final = 15_000
"""A lease lapses after this; renew it at a third, so that two beats may be lost."""
LEASE_COUNT_MAX: Final = 256
CRASHES_MAX: Final = 3
"""The crash that makes a job poison."""
RETRIES_MAX: Final = 8
"""Retries that workers may ask for; the next failure is final."""

_COST_MIN_S: Final = 0.001
"""A free job would not move its account's turn on, and a flood of them would starve the others."""
_SCRIPT_ENTRIES: Final = 64
"""Entries handled by one script call: the server does nothing else meanwhile (about 2 ms)."""
_EXISTS: Final = 250
"""Jobs asked for by one command."""
_RELEASE_LIMIT: Final = 1000

Terminal: TypeAlias = Literal["ok", "failed", "cancelled", "expired", "dead"]
"""How a job ended. ``expired`` and ``dead`` come from the queue itself and carry no outcome, as may
``cancelled``."""


class QueueEntry(msgspec.Struct, frozen=True):
    """A job to be queued. ``cost`` is its estimated device time in seconds: fairness goes by it."""

    id: str
    account: str
    payload: bytes
    cost: float
    weight: float = 1.0
    """Share of this account; one of weight 3 is served three times the cost of one of weight 1."""
    deadline_ms: int = 0
    """Unix time; 0 is none. A job past it is never started and no longer wanted."""
    batch_key: str = ""
    """Only jobs with the same key are leased together."""
    reply: str = ""
    """Mailbox of the gateway that waits."""


class Enqueued(msgspec.Struct, frozen=True):
    """``depth`` and ``cost`` (seconds) are the model's queue after this entry."""

    status: Literal["ok", "duplicate", "queue_full", "account_full"]
    depth: int
    cost: float


class Lease(msgspec.Struct, frozen=True):
    """A job to run. ``token`` proves the lease; once another holder has it, it proves nothing."""

    id: str
    token: str
    attempt: int
    account: str
    reply: str
    payload: bytes
    queued_us: int
    """From enqueue to this lease, by the server's clock."""
    note: str = ""
    """What an earlier holder kept for this one."""


class Heartbeat(msgspec.Struct, frozen=True):
    """What a worker must know about the jobs that it holds."""

    lost: tuple[str, ...]
    """Somebody else's by now: stop, and say nothing more about them."""
    cancelled: Mapping[str, str]
    """id → reason (``client``, ``deadline`` or ``operator``): stop, and complete them."""
    replies: Mapping[str, str]
    """id → mailbox, where that changed after the lease."""


class Completion(msgspec.Struct, frozen=True):
    """The end of an attempt.

    ``retry`` asks for another one after ``retry_ms``; if none is left before the deadline the job
    has failed, with this outcome.
    """

    id: str
    token: str
    status: Literal["ok", "failed", "cancelled", "retry"]
    outcome: bytes = b""
    retry_ms: int = 0


CompletionResult: TypeAlias = Literal["done", "retrying", "already", "fenced", "unknown"]
"""``fenced``: the lease was lost and nothing was changed. ``unknown``: the server had lost the job;
if it was finished or cancelled its outcome was saved all the same."""


KeepResult: TypeAlias = Literal["kept", "fenced", "unknown"]
"""``fenced``: the lease was lost. ``unknown``: the server lost the job; gateways have the note."""


class JobState(msgspec.Struct, frozen=True):
    """Where a job is, for an hour beyond its end. Times are Unix milliseconds, 0 if not yet."""

    state: Literal["queued", "running", "delayed"] | Terminal
    attempt: int
    position: int
    """Estimate of how many jobs are served up to and including this one; 0 if it is not queued."""
    enqueued_ms: int
    started_ms: int
    ended_ms: int
    worker: str
    cancel: str
    """The reason for which a running job was asked to stop."""


class Reclaimed(msgspec.Struct, frozen=True):
    expired: int
    """Leases whose holder fell silent."""
    due: int
    """Delayed retries put back into the queue."""
    overdue: int
    """Jobs whose deadline passed."""


class Queue:
    """The queue of one model; holds no state but its name."""

    def __init__(self, redis: Redis, model: str, *, namespace: str = NAMESPACE) -> None:
        self.model = model
        self._redis = redis
        self._prefix = prefix(namespace, model)

    async def enqueue(
        self, entries: Sequence[QueueEntry], *, queue_max: int, account_max: int
    ) -> list[Enqueued]:
        """Queue what is not known yet, within the bounds; one round trip for all of them."""
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
        """Take up to ``count`` jobs in fair order that may run together (same batch key).

        ``worker`` names one process for the time of its life; it asks once at a time per model.
        Repeat a call whose answer was lost with the same ``nonce``. An account that runs
        ``account_share`` of the model's jobs (what runs and what is asked for) is passed over while
        another account waits, and only then; ``look_ahead`` bounds how far into an account's queue
        a fitting job is searched.
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
        """Renew leases on ``(id, token)`` and learn what changed; every 5 s, and when hinted."""
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
        """End attempts, in one round trip. Their outputs must be in the blob store before."""
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
        """Keep something small for whoever holds the job next: it comes with the next lease.

        It survives everything but a wipe; the gateways get it too, for the job that they queue
        again then. After ``unknown`` ask again until they have.
        """
        answer = await self._call("keep_note", id, token, note)
        return cast(KeepResult, answer.decode())

    async def release_worker(self, worker: str, *, crashed: bool) -> int:
        """Put all that a worker holds back in its old place; return how many jobs that were.

        ``crashed`` counts against the jobs: the third crash makes one poison (``dead``). Without it
        the worker merely gives back what it will not do, as on a drain.
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
        """Stop a job: at once if it waits, through its worker (``cancelling``) if it runs. One that
        is ``unknown`` is not queued any more, should somebody be about to."""
        answer = await self._call("cancel", id, reason)
        return cast(Literal["cancelled", "cancelling", "ended", "unknown"], answer.decode())

    async def reclaim(self, *, limit: int = 100) -> Reclaimed:
        """Take back expired leases, requeue due retries, end what is past its deadline.

        Every worker calls it once a second; it costs some ten microseconds when there is nothing to
        do. It also puts the wake marker back in case the worker that took it died.
        """
        expired, due, overdue = await self._call("reclaim", limit, CRASHES_MAX)
        return Reclaimed(expired=expired, due=due, overdue=overdue)

    async def remove_settlers(self, idle_ms: int) -> int:
        """Drop the names of settlers that are long gone and have nothing pending."""
        count: int = await self._call("remove_settlers", idle_ms)
        return count

    async def set_reply(self, id: str, mailbox: str) -> bool:
        """Send the events of a job to another mailbox from now on; False if it has ended."""
        return bool(await self._call("set_reply", id, mailbox))

    async def state(self, id: str) -> JobState | None:
        """Where a job is; None if the server does not know it (any more)."""
        return _state(await self._call("state", id))

    async def missing(self, ids: Sequence[str]) -> list[str]:
        """Which of these jobs the server does not know (any more); two round trips at most."""
        if not ids:
            return []
        # Mostly none is missing: counting many with one command costs a tenth of asking for each.
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
        """Count how many jobs of each group the server knows; one round trip."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for group in groups:
                pipeline.exists(*(f"{self._prefix}:job:{id}" for id in group))
            return await pipeline.execute()

    async def load(self) -> Load:
        """How busy the model is now."""
        return read_load(await self._call("load"))

    async def _call(self, *arguments: Any) -> Any:
        return await _evaluate_one(self._redis, self._prefix, *arguments)

    async def _call_many(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await _evaluate(self._redis, [(self._prefix, *arguments) for arguments in calls])


async def loads(
    redis: Redis, models: Sequence[str], *, namespace: str = NAMESPACE
) -> dict[str, Load]:
    """How busy models are now, in one round trip."""
    answers = await _evaluate(redis, [(prefix(namespace, model), "load") for model in models])
    return {model: read_load(answer) for model, answer in zip(models, answers, strict=True)}


async def states(
    redis: Redis, jobs: Sequence[tuple[str, str]], *, namespace: str = NAMESPACE
) -> list[JobState | None]:
    """Where jobs are, each given as its model and its id, in one round trip."""
    calls = [(prefix(namespace, model), "state", id) for model, id in jobs]
    return [_state(answer) for answer in await _evaluate(redis, calls)]


async def wait_for_work(
    redis: Redis, models: Sequence[str], timeout_s: float, *, namespace: str = NAMESPACE
) -> str | None:
    """Wait until one of the models has work, and say which; None when the time is up.

    Only a marker is popped: should the caller die now, ``reap`` puts it back. Lease anyway after a
    timeout. On a cluster the models of one call must share a slot: there, wait for each by itself.
    """
    keys = {f"{prefix(namespace, model)}:wake": model for model in models}
    # The server takes the first key that it can: without a shuffle a busy model hides the rest.
    order = random.SystemRandom().sample(list(keys), len(keys))
    found = await redis.bzpopmin(order, min(timeout_s, BLOCK_MAX_S))
    return keys[cast(bytes, found[0]).decode()] if found else None


def new_nonce() -> str:
    return secrets.token_hex(12)


def prefix(namespace: str, model: str) -> str:
    """The first part of every key of a model; the braces put them into one slot of a cluster."""
    return f"{namespace}:{{{model}}}"


async def _evaluate_one(redis: Redis, key: str, *arguments: Any) -> Any:
    script, sha = _script()
    try:
        return await redis.evalsha(sha, 1, key, *arguments)
    except NoScriptError:
        # A server that was restarted, wiped or failed over. EVAL runs the script and keeps it.
        return await redis.eval(script, 1, key, *arguments)


async def _evaluate(redis: Redis, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run operations, each given as its queue's prefix, its name and its arguments."""
    if not calls:
        return []
    if len(calls) == 1:
        return [await _evaluate_one(redis, *calls[0])]
    # redis-py's own script objects would ask the server for each script before every pipeline.
    _, sha = _script()
    async with redis.pipeline(transaction=False) as pipeline:
        for key, *arguments in calls:
            pipeline.evalsha(sha, 1, key, *arguments)
        answers = await pipeline.execute(raise_on_error=False)
    unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
    if unknown:
        # The first one brings the script, all others go together again.
        answers[unknown[0]] = await _evaluate_one(redis, *calls[unknown[0]])
        again = await _evaluate(redis, [calls[at] for at in unknown[1:]])
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
