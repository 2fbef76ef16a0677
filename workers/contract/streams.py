"""Messages from workers: mailboxes, event logs, outcomes and notifications.

Mailboxes, event logs and outcomes are Redis streams, because each has its own readers, which read
in order; dispatch is in ``queue.py``. Frames and outcomes are opaque bytes. All of it can be lost
with the queue server: events can be requested again, notifications are repeated, and a job whose
outcome was lost runs again. Every key has a time to live.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from workers.contract.connection import Command
from workers.contract.queue import LIVE_S, NAMESPACE, Queue, Terminal, prefix
from workers.contract.redis import BLOCK_MAX_S, QueueClient

log = logging.getLogger(__name__)

MAILBOX_S: Final = 60
"""Time without reads after which a gateway counts as dead, and its mailbox expires."""
MAILBOX_REFRESH_S: Final = 1.0
"""Interval at which a reader keeps its mailbox alive and trims frames that it has read."""
MAILBOX_FRAMES: Final = 2000
"""Maximum frames in a mailbox. A slow reader detects lost ones by gaps in ``SentEvent.seq``."""
EVENTS_S: Final = 900
"""Default retention of a job's events after its last one."""
EVENTS_MAX: Final = 4096
"""Maximum log entries per job."""
CLAIM_MS: Final = 10_000
"""Time without acknowledgement after which an outcome is delivered to another settler."""

_CURSOR: Final = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")
_GROUP: Final = "ledger"
_IDLE_MS: Final = 3_600_000


class LogEntry(msgspec.Struct, frozen=True):
    """Consecutive events of one job; ``seq`` is the number of the last one.

    Events must not be merged further than in the mailbox, because a reader that has received some
    of them skips them by their numbers.
    """

    id: str
    attempt: int
    seq: int
    data: bytes

    @property
    def cursor(self) -> str:
        """``<attempt>-<seq>``: the SSE event id, after which ``replay`` continues."""
        return f"{self.attempt}-{self.seq}"


async def publish(
    redis: Redis,
    frames: Mapping[str, bytes],
    log: Sequence[LogEntry] = (),
    *,
    namespace: str = NAMESPACE,
    events_s: int = EVENTS_S,
) -> frozenset[str]:
    """Send one frame to each mailbox and append to event logs, in one round trip.

    Return the mailboxes that no longer exist. Logs expire after ``events_s``. A log entry that is
    not newer than the log's last one is dropped: it comes from a worker that lost its lease, or
    from a repeated call.
    """
    if not frames and not log:
        return frozenset()
    async with redis.pipeline(transaction=False) as pipeline:
        for mailbox, frame in frames.items():
            pipeline.xadd(
                _mailbox_key(namespace, mailbox),
                {b"f": frame},
                maxlen=MAILBOX_FRAMES,
                approximate=True,
                nomkstream=True,
            )
        for entry in log:
            key = _events_key(namespace, entry.id)
            # The cursor is the stream id, so the server enforces the order and refuses stale
            # entries.
            pipeline.xadd(key, {b"f": entry.data}, id=entry.cursor, maxlen=EVENTS_MAX)
            pipeline.expire(key, events_s)
        answers = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and "equal or smaller" not in str(answer):
            raise answer
    return frozenset(
        mailbox for mailbox, answer in zip(frames, answers, strict=False) if answer is None
    )


class Mailbox:
    """The stream on which one gateway process receives events and wake-ups.

    A single task reads it. ``open`` or the first ``read`` creates the mailbox; it is created again
    if the server has lost it. Frames to a mailbox that does not exist are dropped.
    """

    def __init__(
        self,
        redis: Redis,
        name: str,
        *,
        namespace: str = NAMESPACE,
        refresh_s: float = MAILBOX_REFRESH_S,
    ) -> None:
        self.name = name
        self._refresh_s = refresh_s
        self._redis = redis
        self._key = _mailbox_key(namespace, name)
        self._last = ""
        self._refresh_at = 0.0

    async def open(self) -> None:
        """Create the mailbox; frames sent from now on arrive."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.xadd(self._key, {b"f": b""}, maxlen=MAILBOX_FRAMES, approximate=True)
            pipeline.expire(self._key, MAILBOX_S)
            first, _ = await pipeline.execute()
        self._last = first.decode()
        self._refresh_at = time.monotonic() + self._refresh_s

    async def read(self, *, block_ms: int = 1000, count: int = 500) -> list[bytes]:
        """Wait for frames, at most ``block_ms``."""
        if not self._last:
            await self.open()
        elif time.monotonic() >= self._refresh_at:
            await self._refresh()
        answer = await self._redis.xread({self._key: self._last}, count, _block(block_ms))
        frames = []
        for _, entries in cast(list[Any], answer):
            for entry_id, fields in entries:
                self._last = entry_id.decode()
                frames.append(fields.get(b"f", b""))
        return frames

    async def close(self) -> None:
        """Delete the mailbox; later frames are dropped."""
        await self._redis.delete(self._key)
        self._last = ""

    @staticmethod
    async def post(redis: Redis, mailbox: str, frame: bytes, *, namespace: str = NAMESPACE) -> bool:
        """Send one frame; for several, use ``publish``. Return False if the mailbox does not
        exist."""
        return not await publish(redis, {mailbox: frame}, namespace=namespace)

    async def _refresh(self) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.expire(self._key, MAILBOX_S)
            pipeline.xtrim(self._key, minid=self._last, approximate=True)
            kept, _ = await pipeline.execute()
        if kept:
            self._refresh_at = time.monotonic() + self._refresh_s
        else:
            await self.open()


class EventLog:
    """The event logs of all jobs, for clients that reconnect."""

    def __init__(self, redis: Redis, *, namespace: str = NAMESPACE) -> None:
        self._redis = redis
        self._namespace = namespace

    async def append(self, *entries: LogEntry) -> None:
        await publish(self._redis, {}, entries, namespace=self._namespace)

    async def replay(
        self, id: str, *, after: str | None = None, count: int = EVENTS_MAX
    ) -> list[LogEntry]:
        """Return the entries after a cursor, or all.

        The first entry can start with events that the reader has already received. Raise
        ``ValueError`` if the cursor is malformed.
        """
        start = f"({check_cursor(after)}" if after else "-"
        answer = await self._redis.xrange(_events_key(self._namespace, id), start, "+", count)
        return _log_entries(id, cast(list[Any], answer))

    async def delete(self, ids: Sequence[str]) -> None:
        """Delete the logs of some jobs."""
        if ids:
            await self._redis.unlink(*(_events_key(self._namespace, id) for id in ids))

    async def latest(self, id: str, *, count: int) -> list[LogEntry]:
        """Return the last entries of a job, newest first."""
        answer = await self._redis.xrevrange(_events_key(self._namespace, id), "+", "-", count)
        return _log_entries(id, cast(list[Any], answer))


def check_cursor(cursor: str) -> str:
    """Return a cursor unchanged. Raise ``ValueError`` if it is not ``<attempt>-<seq>``."""
    if not _CURSOR.fullmatch(cursor):
        raise ValueError(f"{cursor!r} is not a valid event id; an example is 1-42")
    return cursor


DeliveryStatus: TypeAlias = Terminal | Literal["note"]


class Delivery(msgspec.Struct, frozen=True):
    """How one job ended; delivered at least once.

    With the status ``note`` the job has not ended; ``outcome`` is a note for the job's next holder.
    """

    model: str
    entry_id: str
    request_id: str
    status: DeliveryStatus
    attempt: int
    outcome: bytes
    """Empty if the queue itself ended the job: cancelled, expired or dead-lettered."""
    reason: str
    """Reason in that case: ``client``, ``deadline``, ``operator``, or that of the last crash."""
    reply: str
    """Mailbox of the waiting gateway."""


class Outcomes:
    """The ``done`` streams of several models, shared by the settlers of all gateways.

    An outcome is delivered to one settler, and to another one if it is not acknowledged in time.
    ``models`` can be replaced at any time.
    """

    def __init__(
        self,
        redis: QueueClient,
        models: Iterable[str],
        *,
        namespace: str = NAMESPACE,
        claim_ms: int = CLAIM_MS,
    ) -> None:
        self.models = tuple(models)
        self._redis = redis
        self._namespace = namespace
        self._claim_ms = claim_ms
        self._claim_at = 0.0
        self._remove_at = 0.0
        self._cursors: dict[str, str] = {}
        self._ready: set[str] = set()

    async def read(
        self, consumer: str, *, count: int = 128, block_ms: int = 1000
    ) -> list[Delivery]:
        """Take outcomes, waiting at most ``block_ms``; unacknowledged ones of others come first.

        ``consumer`` is the unique name of a process.
        """
        if not self.models:
            return []
        try:
            await self._make_groups(model for model in self.models if model not in self._ready)
            if time.monotonic() >= self._claim_at:
                claimed = await self._claim(consumer, count)
                if claimed:
                    return claimed
                self._claim_at = time.monotonic() + self._claim_ms / 2000
                await self._remove_settlers()
            answer = await self._redis.xreadgroup(
                _GROUP,
                consumer,
                {_done_key(self._namespace, model): ">" for model in self.models},
                count=count,
                block=_block(block_ms),
            )
        except ResponseError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            # The server was wiped: streams and groups must be created again.
            self._ready.clear()
            return []
        models = {_done_key(self._namespace, model).encode(): model for model in self.models}
        found = []
        for key, entries in cast(list[Any], answer):
            found += await self._read_entries(models[key], entries)
        return found

    async def _read_entries(self, model: str, entries: Iterable[Any]) -> list[Delivery]:
        """Decode stream entries; malformed ones are removed."""
        found = []
        for entry_id, fields in entries:
            if fields is None:
                continue
            try:
                found.append(_delivery(model, entry_id, fields))
            except (LookupError, ValueError) as error:
                log.error("removed a malformed outcome of %s: %s", model, error)
                key = _done_key(self._namespace, model)
                await self._redis.xack(key, _GROUP, entry_id)
                await self._redis.xdel(key, entry_id)
        return found

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Remove settled and committed outcomes, in one round trip."""
        if deliveries:
            for answer in await self._redis.exchange(*self._removals(deliveries)):
                if isinstance(answer, Exception):
                    raise answer

    def acknowledge_soon(self, deliveries: Sequence[Delivery]) -> None:
        """Remove outcomes with the next commands of this process, within milliseconds.

        If that is lost, they are delivered again, and settling them again changes nothing.
        """
        if deliveries:
            self._redis.post(*self._removals(deliveries))

    def _removals(self, deliveries: Sequence[Delivery]) -> Iterator[Command]:
        ids: dict[str, list[str]] = {}
        for delivery in deliveries:
            ids.setdefault(delivery.model, []).append(delivery.entry_id)
        for model, entry_ids in ids.items():
            key = _done_key(self._namespace, model)
            yield ("XACK", key, _GROUP, *entry_ids)
            yield ("XDEL", key, *entry_ids)

    async def _make_groups(self, models: Iterable[str]) -> None:
        for model in models:
            key = _done_key(self._namespace, model)
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.xgroup_create(key, _GROUP, id="0", mkstream=True)
                pipeline.expire(key, LIVE_S)
                created, _ = await pipeline.execute(raise_on_error=False)
            if isinstance(created, Exception) and not str(created).startswith("BUSYGROUP"):
                raise created
            self._ready.add(model)

    async def _remove_settlers(self) -> None:
        """Remove the names of killed processes from the consumer groups."""
        if time.monotonic() >= self._remove_at:
            self._remove_at = time.monotonic() + _IDLE_MS / 1000
            for model in self.models:
                queue = Queue(self._redis, model, namespace=self._namespace)
                await queue.remove_settlers(_IDLE_MS)

    async def _claim(self, consumer: str, count: int) -> list[Delivery]:
        models = self.models
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model in models:
                pipeline.xautoclaim(
                    _done_key(self._namespace, model),
                    _GROUP,
                    consumer,
                    self._claim_ms,
                    self._cursors.get(model, "0-0"),
                    count,
                )
            answers = await pipeline.execute()
        claimed = []
        for model, answer in zip(models, answers, strict=True):
            self._cursors[model] = answer[0].decode()
            claimed += await self._read_entries(model, answer[1])
        return claimed


async def notifications(
    redis: QueueClient, worker: str, *, namespace: str = NAMESPACE
) -> AsyncIterator[None]:
    """Yield when a worker should send a heartbeat now: one of its jobs was cancelled or redirected,
    or there is a wish for it.

    A lost notification costs only the time until the next regular heartbeat.
    """
    async for _ in redis.subscription(f"{namespace}:control:{worker}"):
        yield


def _mailbox_key(namespace: str, name: str) -> str:
    return f"{namespace}:mailbox:{{{name}}}"


def _events_key(namespace: str, id: str) -> str:
    return f"{namespace}:events:{{{id}}}"


def _done_key(namespace: str, model: str) -> str:
    return f"{prefix(namespace, model)}:done"


def _block(block_ms: int) -> int:
    """Limit a wait. Zero would block indefinitely, so the minimum is 1 ms."""
    return max(1, min(block_ms, int(BLOCK_MAX_S * 1000)))


def _log_entries(id: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[LogEntry]:
    found = []
    for entry_id, fields in entries:
        attempt, _, seq = entry_id.decode().partition("-")
        found.append(LogEntry(id=id, attempt=int(attempt), seq=int(seq), data=fields[b"f"]))
    return found


def _delivery(model: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Delivery:
    return Delivery(
        model=model,
        entry_id=entry_id.decode(),
        request_id=fields[b"id"].decode(),
        status=cast(DeliveryStatus, fields[b"status"].decode()),
        attempt=int(fields[b"attempt"]),
        outcome=fields[b"outcome"],
        reason=fields[b"reason"].decode(),
        reply=fields.get(b"reply", b"").decode(),
    )
