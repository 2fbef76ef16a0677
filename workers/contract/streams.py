"""What flows back from the workers: mailbox frames, event logs, outcomes, notifications and
announcements.

Streams, because each of these is read in order by readers of its own; dispatch is in ``queue.py``.
Frames and outcomes are opaque bytes. What is here may be lost with the queue server: events can be
asked for again, announcements and notifications repeat themselves, and a job whose outcome is lost
runs again. Every key has a time to live.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from workers.contract.queue import LIVE_S, NAMESPACE, Queue, Terminal, prefix
from workers.contract.redis import BLOCK_MAX_S

log = logging.getLogger(__name__)

MAILBOX_S: Final = 60
"""A gateway that has not read for this long is gone, and so is its mailbox."""
MAILBOX_REFRESH_S: Final = 1.0
"""How often a reader makes sure that its mailbox exists, and drops what it has read."""
MAILBOX_FRAMES: Final = 2000
"""Frames kept for a gateway that reads too slowly; it sees the gap in ``SentEvent.seq``."""
EVENTS_S: Final = 900
"""How long a job's events can be replayed after its last one."""
EVENTS_MAX: Final = 4096
"""Log entries kept per job."""
ANNOUNCEMENT_S: Final = 15
CLAIM_MS: Final = 10_000
"""Outcomes taken and not acknowledged for this long are given to somebody else."""

_CURSOR: Final = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")
_GROUP: Final = "ledger"
_IDLE_MS: Final = 3_600_000


class LogEntry(msgspec.Struct, frozen=True):
    """Events of one job for its log, whole and in order, the last of them being number ``seq``.

    Events must not be merged further than they were in the mailbox: a reader that has seen some of
    them skips by their own numbers.
    """

    id: str
    attempt: int
    seq: int
    data: bytes

    @property
    def cursor(self) -> str:
        """``<attempt>-<seq>``: the SSE event id, and what ``replay`` goes on after."""
        return f"{self.attempt}-{self.seq}"


async def publish(
    redis: Redis,
    frames: Mapping[str, bytes],
    log: Sequence[LogEntry] = (),
    *,
    namespace: str = NAMESPACE,
) -> frozenset[str]:
    """Send one frame to each mailbox and append to event logs, in one round trip.

    Return the mailboxes that are gone: nobody hears there any more. A log entry that is not newer
    than the log's last one (a holder whose lease was lost, a repeated call) is dropped.
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
            # The cursor is the stream id, so the server keeps the order, and refuses what is stale.
            pipeline.xadd(key, {b"f": entry.data}, id=entry.cursor, maxlen=EVENTS_MAX)
            pipeline.expire(key, EVENTS_S)
        answers = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and "equal or smaller" not in str(answer):
            raise answer
    return frozenset(
        mailbox for mailbox, answer in zip(frames, answers, strict=False) if answer is None
    )


class Mailbox:
    """Where one gateway process hears of its requests; a dead gateway's costs workers nothing.

    One task reads it. It is made by ``open`` or the first ``read``, and made again if the server
    lost it.
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
        """Make the mailbox, so that frames sent from now on arrive."""
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
        """Remove the mailbox; workers stop sending at once."""
        await self._redis.delete(self._key)
        self._last = ""

    @staticmethod
    async def post(redis: Redis, mailbox: str, frame: bytes, *, namespace: str = NAMESPACE) -> bool:
        """Send one frame; False if the mailbox is gone. For several, ``publish``."""
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
    """The recent events of every job, kept for whoever missed them."""

    def __init__(self, redis: Redis, *, namespace: str = NAMESPACE) -> None:
        self._redis = redis
        self._namespace = namespace

    async def append(self, *entries: LogEntry) -> None:
        await publish(self._redis, {}, entries, namespace=self._namespace)

    async def replay(
        self, id: str, *, after: str | None = None, count: int = EVENTS_MAX
    ) -> list[LogEntry]:
        """What was logged after a cursor, or all that is kept.

        Raise ``ValueError`` if the cursor is none. The first entry may begin with events that the
        reader has seen.
        """
        start = f"({check_cursor(after)}" if after else "-"
        answer = await self._redis.xrange(_events_key(self._namespace, id), start, "+", count)
        return _log_entries(id, cast(list[Any], answer))

    async def latest(self, id: str, *, count: int) -> list[LogEntry]:
        """The last entries of a job, newest first."""
        answer = await self._redis.xrevrange(_events_key(self._namespace, id), "+", "-", count)
        return _log_entries(id, cast(list[Any], answer))

    async def follow(self, id: str, *, after: str | None = None, block_ms: int) -> list[LogEntry]:
        """Like ``replay``, but wait up to ``block_ms`` if there is nothing yet.

        Each caller holds a connection while it waits: for the exception, not for every request.
        """
        key = _events_key(self._namespace, id)
        start = check_cursor(after) if after else "0-0"
        answer = await self._redis.xread({key: start}, block=_block(block_ms))
        return [
            entry
            for _, entries in cast(list[Any], answer)
            for entry in _log_entries(id, cast(list[Any], entries))
        ]


def check_cursor(cursor: str) -> str:
    """Return a cursor as it is; raise ``ValueError`` if it is not ``<attempt>-<seq>``."""
    if not _CURSOR.fullmatch(cursor):
        raise ValueError(f"{cursor!r} is no event id; one looks like 1-42")
    return cursor


DeliveryStatus: TypeAlias = Terminal | Literal["note"]


class Delivery(msgspec.Struct, frozen=True):
    """The end of one job, as it came from the queue; delivered at least once.

    With the status ``note`` it is no end, but what a job's holder keeps for the next one.
    """

    model: str
    entry_id: str
    request_id: str
    status: DeliveryStatus
    attempt: int
    outcome: bytes
    """Empty where the queue itself ended the job: never run, out of time, or poison."""
    reason: str
    """Why, in that case: ``client``, ``deadline`` or ``operator``, or what killed it."""
    reply: str
    """Mailbox of the gateway that waits."""


class Outcomes:
    """The ``done`` streams of several models, shared among the settlers of all gateways.

    One outcome goes to one settler, and to another one if it is not acknowledged in time.
    ``models`` may be replaced at any time.
    """

    def __init__(
        self,
        redis: Redis,
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
        """Take outcomes, waiting at most ``block_ms``; first those that others left behind.

        ``consumer`` names one process for the time of its life.
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
            # The server was wiped: the streams are new, and so are their groups.
            self._ready.clear()
            return []
        models = {_done_key(self._namespace, model).encode(): model for model in self.models}
        found = []
        for key, entries in cast(list[Any], answer):
            found += await self._read_entries(models[key], entries)
        return found

    async def _read_entries(self, model: str, entries: Iterable[Any]) -> list[Delivery]:
        """Read stream entries; one that is no outcome at all is removed."""
        found = []
        for entry_id, fields in entries:
            if fields is None:
                continue
            try:
                found.append(_delivery(model, entry_id, fields))
            except (LookupError, ValueError) as error:
                log.error("an entry of %s is no outcome and is removed: %s", model, error)
                key = _done_key(self._namespace, model)
                await self._redis.xack(key, _GROUP, entry_id)
                await self._redis.xdel(key, entry_id)
        return found

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Remove what has been settled and committed, in one round trip."""
        if not deliveries:
            return
        ids: dict[str, list[str]] = {}
        for delivery in deliveries:
            ids.setdefault(delivery.model, []).append(delivery.entry_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for model, entry_ids in ids.items():
                key = _done_key(self._namespace, model)
                pipeline.xack(key, _GROUP, *entry_ids)
                pipeline.xdel(key, *entry_ids)
            await pipeline.execute()

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
        """Every process settles under its own name; one that was killed leaves that behind."""
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


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker says of itself, every few seconds."""

    worker: str
    models: tuple[str, ...] = ()
    """Models that it serves, loaded or able to load."""
    loaded: tuple[str, ...] = ()
    """Those that are on the device now."""
    unavailable: dict[str, str] = {}
    """Model → why this worker, which should serve it, does not: a sentence for the operator."""
    device: str = "cpu"
    bytes_total: int = 0
    """Memory of the device that models may use, and how much of that is taken."""
    bytes_used: int = 0
    running: int = 0
    draining: bool = False
    version: str = ""


class Workers:
    """The workers that are alive, by what they say themselves."""

    def __init__(self, redis: Redis, *, namespace: str = NAMESPACE) -> None:
        self._redis = redis
        self._index = f"{namespace}:{{workers}}"
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Announcement)

    async def announce(self, announcement: Announcement, *, ttl_s: int = ANNOUNCEMENT_S) -> None:
        """Say that a worker lives; it is taken for dead ``ttl_s`` after it last said so."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(
                self._key(announcement.worker), self._encoder.encode(announcement), ex=ttl_s
            )
            pipeline.sadd(self._index, announcement.worker)
            pipeline.expire(self._index, LIVE_S)
            await pipeline.execute()

    async def list(self) -> tuple[Announcement, ...]:
        """All living workers, by name."""
        names = sorted(name.decode() for name in await _members(self._redis, self._index))
        if not names:
            return ()
        said = await self._redis.mget([self._key(name) for name in names])
        dead = [name for name, data in zip(names, said, strict=True) if data is None]
        if dead:
            await self._redis.srem(self._index, *dead)
        found = []
        for name, data in zip(names, said, strict=True):
            try:
                if data is not None:
                    found.append(self._decoder.decode(data))
            except msgspec.DecodeError:
                log.warning("the announcement of worker %s cannot be read", name)
        return tuple(found)

    async def withdraw(self, worker: str) -> None:
        """Say that a worker is gone."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(self._key(worker))
            pipeline.srem(self._index, worker)
            await pipeline.execute()

    def _key(self, worker: str) -> str:
        return f"{self._index}:{worker}"


async def notifications(
    redis: Redis, worker: str, *, namespace: str = NAMESPACE
) -> AsyncIterator[None]:
    """Yield when a worker should send its heartbeat now: a job of it was cancelled or moved.

    Only a hint: one that is lost costs the time until the next regular heartbeat.
    """
    async with redis.pubsub() as channel:
        await channel.subscribe(f"{namespace}:control:{worker}")
        while True:
            message = await channel.get_message(ignore_subscribe_messages=True, timeout=BLOCK_MAX_S)
            if message is not None:
                yield


def _mailbox_key(namespace: str, name: str) -> str:
    return f"{namespace}:mailbox:{{{name}}}"


def _events_key(namespace: str, id: str) -> str:
    return f"{namespace}:events:{{{id}}}"


def _done_key(namespace: str, model: str) -> str:
    return f"{prefix(namespace, model)}:done"


def _block(block_ms: int) -> int:
    """Bound a wait. Zero would mean for ever, so it becomes the shortest there is."""
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


async def _members(redis: Redis, key: str) -> set[bytes]:
    return cast(set[bytes], await redis.smembers(key))
