"""Announcements of workers, and what operators wish of a worker.

A worker announces itself every few seconds, with all that is shown of it. A wish is stored for one
worker, which reads it with each announcement: to drain or to resume, to load a model or to unload
one. A wish stands until it is replaced, or until its worker has been silent for a week.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
from redis.asyncio import Redis

from workers.contract.queue import LIVE_S, NAMESPACE

log = logging.getLogger(__name__)

ANNOUNCEMENT_S: Final = 15
"""Time after its last announcement for which a worker counts as live."""
SILENT_S: Final = 3600
"""Time for which a worker that fell silent is still listed."""
SILENT_MAX: Final = 100
ENDPOINTS_MAX: Final = 256
"""Maximum number of announced endpoints, so that announcements stay small."""

EndpointStatus: TypeAlias = Literal["up", "paused", "down"]


class Work(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker's engine process has done since the worker started."""

    at_ms: int = 0
    """When this was measured, in Unix milliseconds."""
    busy_us: int = 0
    steps: int = 0
    models: Mapping[str, int] = {}
    """Model → busy time in microseconds. It starts again if the model is loaded again."""


class ModelState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model as a worker serves it."""

    running: int = 0
    """Number of leased jobs that have not ended."""
    capacity: int = 0
    """Maximum number of leased jobs."""
    weights_bytes: int = 0
    cache_bytes: int = 0
    device: str = ""
    """Name of the device that it runs on; empty unless it is loaded."""
    dtype: str = ""
    """Precision of its weights."""
    used_ms: int = 0
    """End of its last load or job in Unix milliseconds; 0 if it was never loaded."""
    loads: int = 0
    """Number of times that the engine process has loaded it."""
    load_us: int = 0
    """Duration of its last load."""
    resident_bytes: int = 0
    """Memory that it takes, of the worker's ``budget_bytes``; 0 if it is not loaded."""


class EndpointState(msgspec.Struct, frozen=True, omit_defaults=True):
    """An endpoint of an upstream's model, as one worker sees it since it started."""

    model: str
    host: str
    tier: int = 0
    in_flight: int = 0
    limit: int = 0
    """Maximum number of calls at a time."""
    failures: int = 0
    """Consecutive failures."""
    state: EndpointStatus = "up"
    since_ms: int = 0
    """When it went down, in Unix milliseconds; 0 if it is up."""
    until_ms: int = 0
    """When it is probed or called next, in Unix milliseconds; 0 if it is called now."""
    calls: int = 0
    p95_us: int = 0
    """95th percentile of the duration of its latest calls; 0 without a call."""
    errors: Mapping[str, int] = {}
    """Error code → number of calls that ended with it."""


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Periodic announcement of a worker."""

    worker: str
    models: tuple[str, ...] = ()
    """Models that it serves, loaded or not."""
    loaded: tuple[str, ...] = ()
    """Models that are in memory now. The others are loaded for their next job."""
    loading: tuple[str, ...] = ()
    """Models that are loaded next, one by one; they are not served before."""
    problems: dict[str, str] = {}
    """Model → what the engine reported when it could not be loaded, for the operator."""
    unavailable: dict[str, str] = {}
    """Model → reason why this worker does not serve it, for the operator."""
    device: str = "cpu"
    bytes_total: int = 0
    """Memory of the device or, of a CPU, of the machine; 0 if it is not known."""
    bytes_used: int = 0
    """Memory of the device that is in use or, of a CPU, by the engine process."""
    budget_bytes: int = 0
    """Maximum memory of its models; 0 if there is no limit, or if it is not known."""
    running: int = 0
    draining: bool = False
    catalog_problem: str = ""
    """Why it cannot follow its catalog file, and serves what it read before; for the operator."""
    version: str = ""
    started_ms: int = 0
    """Start of the worker in Unix milliseconds; 0 if an older version does not announce it."""
    ending: bool = False
    """Whether it drains in order to end, so that it cannot resume."""
    states: dict[str, ModelState] = {}
    work: Work = Work()
    earlier: Work = Work()
    """Its work about a minute before; the difference is its work of that minute."""
    endpoints: tuple[EndpointState, ...] = ()
    """Endpoints of upstream models; those that are down first, and at most ``ENDPOINTS_MAX``."""


class SilentWorker(msgspec.Struct, frozen=True):
    """A worker that has stopped announcing itself without a farewell."""

    last: Announcement
    heard_ms: int


class Wishes(msgspec.Struct, frozen=True):
    """What operators wish of a worker."""

    drain: bool = False
    unloaded: frozenset[str] = frozenset()
    loads: Mapping[str, str] = {}
    """Model → a value that is new with each wish to load it."""


class Workers:
    """The announcements of workers, and the wishes for them."""

    def __init__(self, redis: Redis, *, namespace: str = NAMESPACE) -> None:
        self._redis = redis
        self._namespace = namespace
        self._index = f"{namespace}:{{workers}}"
        self._heard = f"{self._index}:heard"
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Announcement)

    async def announce(
        self, announcement: Announcement, *, ttl_s: int = ANNOUNCEMENT_S
    ) -> Wishes | None:
        """Announce a live worker, and return the wishes for it; None if there never was one.

        It counts as dead ``ttl_s`` after its last announcement.
        """
        name, data = announcement.worker, self._encoder.encode(announcement)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(self._key(name), data, ex=ttl_s)
            pipeline.set(self._last_key(name), data, ex=SILENT_S)
            pipeline.sadd(self._index, name)
            pipeline.expire(self._index, LIVE_S)
            pipeline.zadd(self._heard, {name: time.time_ns() // 1_000_000})
            pipeline.expire(self._heard, SILENT_S)
            pipeline.expire(self._wish_key(name), LIVE_S)
            pipeline.hgetall(self._wish_key(name))
            *_, found = await pipeline.execute()
        return _wishes(found) if found else None

    async def list(self) -> tuple[Announcement, ...]:
        """Return the announcements of all live workers, by name."""
        names = sorted(name.decode() for name in await _members(self._redis, self._index))
        if not names:
            return ()
        keys = [self._key(name) for name in names]
        values = cast("list[bytes | None]", await self._redis.mget(keys))
        dead = [name for name, data in zip(names, values, strict=True) if data is None]
        if dead:
            await self._redis.srem(self._index, *dead)
        found = (
            self._decoded(name, data)
            for name, data in zip(names, values, strict=True)
            if data is not None
        )
        return tuple(each for each in found if each is not None)

    async def silent(self) -> tuple[SilentWorker, ...]:
        """Return the workers that fell silent within the last hour, the latest first."""
        now_ms = time.time_ns() // 1_000_000
        oldest = now_ms - SILENT_S * 1000
        # Live ones are excluded by their keys, as clocks of workers can differ.
        await self._redis.zremrangebyscore(self._heard, "-inf", oldest)
        heard = cast(
            "list[tuple[bytes, float]]",
            await self._redis.zrevrange(self._heard, 0, 4 * SILENT_MAX - 1, withscores=True),
        )
        names = [name.decode() for name, _ in heard]
        if not names:
            return ()
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.mget([self._key(name) for name in names])
            pipeline.mget([self._last_key(name) for name in names])
            live, last = await pipeline.execute()
        found = []
        for (name, heard_ms), is_live, data in zip(heard, live, last, strict=True):
            known = None if is_live or data is None else self._decoded(name.decode(), data)
            if known is not None:
                found.append(SilentWorker(known, int(heard_ms)))
        return tuple(found[:SILENT_MAX])

    async def withdraw(self, worker: str) -> None:
        """Remove what is stored of a worker, which ends."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(self._key(worker), self._last_key(worker), self._wish_key(worker))
            pipeline.srem(self._index, worker)
            pipeline.zrem(self._heard, worker)
            await pipeline.execute()

    # --- Wishes -----------------------------------------------------------------------------------

    async def wish_drain(self, worker: str, drain: bool) -> None:
        """Wish that a worker takes no jobs, and lets its running ones end; or that it resumes."""
        await self._wish(worker, "drain", "yes" if drain else "no")

    async def wish_loaded(self, worker: str, model: str, loaded: bool) -> None:
        """Wish that a worker loads a model, or serves it no longer and frees its memory."""
        value = f"load {time.time_ns()}" if loaded else "unload"
        await self._wish(worker, f"model:{model}", value)

    async def wishes(self, worker: str) -> Wishes:
        """Return what operators wish of a worker."""
        return _wishes(await cast(Any, self._redis.hgetall(self._wish_key(worker))))

    async def _wish(self, worker: str, field: str, value: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(self._wish_key(worker), field, value)
            pipeline.expire(self._wish_key(worker), LIVE_S)
            # A hint, without which the worker reads it a few seconds later.
            pipeline.publish(f"{self._namespace}:control:{worker}", "1")
            await pipeline.execute()

    # --- Keys -------------------------------------------------------------------------------------

    def _decoded(self, name: str, data: bytes) -> Announcement | None:
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError:
            log.warning("malformed announcement of worker %s", name)
            return None

    def _key(self, worker: str) -> str:
        return f"{self._index}:{worker}"

    def _last_key(self, worker: str) -> str:
        return f"{self._index}:last:{worker}"

    def _wish_key(self, worker: str) -> str:
        return f"{self._index}:wish:{worker}"


@functools.cache
def installed_version() -> str:
    """Return the version of this package; empty if it runs without being installed."""
    try:
        return importlib.metadata.version("tollgate")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _wishes(fields: Mapping[bytes, bytes]) -> Wishes:
    unloaded, loads = set(), {}
    for field, value in fields.items():
        kind, _, model = field.decode().partition(":")
        if kind == "model" and value == b"unload":
            unloaded.add(model)
        elif kind == "model":
            loads[model] = value.decode()
    return Wishes(fields.get(b"drain") == b"yes", frozenset(unloaded), loads)


async def _members(redis: Redis, key: str) -> set[bytes]:
    return cast(set[bytes], await cast(Any, redis.smembers(key)))
