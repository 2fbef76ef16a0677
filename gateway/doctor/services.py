"""Examines what runs beside the database: queue server, gateway and workers."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx
from redis.asyncio import Redis

from gateway.doctor.diagnosis import Diagnosis, note, ok, problem, warning
from gateway.settings import Settings
from gateway.up.queue_server import VERSION_MIN, NoQueueServer, find_server
from workers.contract.announcements import Announcement, Workers
from workers.contract.redis import connect

PATIENCE_S: Final = 3.0
PINGS: Final = 5
PING_MAX_MS: Final = 5.0
"""Round trip above which the queue is a noticeable part of a chat: each request needs several."""
SKEW_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class QueueState:
    """What the queue server reports."""

    version: str
    ping_ms: float
    policy: str
    used_bytes: int
    max_bytes: int
    skew_s: float
    workers: Sequence[Announcement]


def queue_url(settings: Settings) -> str | None:
    """Return the URL of the queue server that runs, or is configured; None if there is none."""
    if settings.redis_url is not None:
        return settings.redis_url
    path = settings.home.resolve() / "queue.sock"
    return f"unix://{path}" if path.exists() else None


async def read_queue(url: str, *, namespace: str) -> QueueState:
    """Raise ``RedisError``, ``OSError`` or ``TimeoutError``."""
    redis = connect(url)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _read_queue(redis, namespace)
    finally:
        await redis.aclose()


async def _read_queue(redis: Redis, namespace: str) -> QueueState:
    times_ms = []
    for _ in range(PINGS):
        started = time.monotonic()
        await redis.ping()
        times_ms.append((time.monotonic() - started) * 1000)
    seconds, microseconds = await redis.time()
    skew_s = seconds + microseconds / 1e6 - time.time()
    info = await redis.info()
    return QueueState(
        version=str(info.get("redis_version", "0")),
        ping_ms=statistics.median(times_ms),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        used_bytes=int(info.get("used_memory", 0)),
        max_bytes=int(info.get("maxmemory", 0)),
        skew_s=skew_s,
        workers=await Workers(redis, namespace=namespace).list(),
    )


def examine_queue(
    settings: Settings, url: str | None, state: QueueState | Exception | None
) -> Iterator[Diagnosis]:
    """Examine what the queue server reported, or why it could not be asked."""
    if url is None:
        try:
            yield note("queue", f"no queue server runs; `tollgate up` starts {find_server()}")
        except NoQueueServer as error:
            yield problem("queue", str(error), "Do one of these.")
        return
    where = urlsplit(url)
    name = where.path if where.scheme == "unix" else f"{where.hostname}:{where.port or 6379}"
    if not isinstance(state, QueueState):
        reason = str(state) or "no answer in time"
        if settings.redis_url is None:
            yield note("queue", f"no queue server runs at {name}; `tollgate up` starts one")
            return
        yield problem(
            "queue", f"{name} does not answer: {reason}", "Start it, or correct REDIS_URL."
        )
        return
    yield from _answering(name, state)


def _answering(name: str, state: QueueState) -> Iterator[Diagnosis]:
    found = f"{name} answers in {state.ping_ms:.1f} ms (version {state.version})"
    if tuple(map(int, state.version.split(".")[:2])) < VERSION_MIN:
        needed = ".".join(map(str, VERSION_MIN))
        yield problem("queue", found, f"Install Redis {needed} or newer, or Valkey.")
    elif state.policy != "noeviction":
        yield warning(
            "queue",
            f"{name} may drop jobs when it is full (maxmemory-policy {state.policy})",
            "Set `maxmemory-policy noeviction`; dropped jobs are computed again, later.",
        )
    elif state.max_bytes and state.used_bytes > 0.9 * state.max_bytes:
        yield warning("queue", f"{name} is almost full", "Raise its `maxmemory`.")
    elif state.ping_ms > PING_MAX_MS:
        yield warning(
            "queue",
            found,
            "Each request takes several round trips: bring it nearer to the gateway.",
        )
    else:
        yield ok("queue", found)
    if abs(state.skew_s) > SKEW_MAX_S:
        yield problem(
            "clock",
            f"the clock of the queue server differs by {state.skew_s:+.1f} s",
            "Synchronise both clocks (NTP): deadlines go by them.",
        )
    else:
        yield ok("clock", f"within {abs(state.skew_s) * 1000:.0f} ms of the queue server's")


def examine_gateway(settings: Settings) -> Iterator[Diagnosis]:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
    url = f"http://{host}:{settings.port}"
    try:
        answer = httpx.get(f"{url}/health/ready", timeout=PATIENCE_S, trust_env=False)
        ready = answer.json()
        checks, served = ready["checks"], ready["models_served"]
    except httpx.ConnectError:
        yield note("gateway", f"not running; port {settings.port} is free")
        return
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        yield problem(
            "gateway",
            f"another program uses port {settings.port} on {host}, or a gateway that hangs",
            "Stop it, or set TOLLGATE_PORT to another port.",
        )
        return
    if answer.is_success:
        yield ok("gateway", f"{url} serves {served} models")
    else:
        failed = ", ".join(name for name, good in checks.items() if not good)
        yield problem("gateway", f"{url} is not ready: {failed}", "See the lines about these.")


def examine_workers(state: QueueState, local: Sequence[str]) -> Iterator[Diagnosis]:
    """Examine the workers, and why a local model is not served."""
    if not state.workers:
        yield problem(
            "workers",
            "no worker is connected to the queue server",
            "Run `tollgate up`, or `tollgate-worker` with the same REDIS_URL and namespace.",
        )
        return
    for worker in state.workers:
        draining = ", draining" if worker.draining else ""
        yield ok(
            "worker",
            f"{worker.worker} on {worker.device} serves {len(worker.models)} models, "
            f"{worker.running} jobs run{draining}",
        )
        if worker.loading:
            yield note("worker", f"{worker.worker} still loads {', '.join(worker.loading)}")
        if worker.catalog_problem:
            yield problem(
                "worker",
                f"{worker.worker} cannot follow its catalog: {worker.catalog_problem}",
                "Correct the file. Until then the worker serves what it read before.",
            )
        for model, reason in worker.problems.items():
            yield problem(
                "model",
                f"{model} could not be loaded: {reason}",
                "Correct its entry, or correct its checkpoint and send the worker SIGHUP.",
            )
    served = {model for worker in state.workers for model in worker.models}
    known = {
        model: reason for worker in state.workers for model, reason in worker.unavailable.items()
    }
    failed = {model for worker in state.workers for model in (*worker.problems, *worker.loading)}
    for model in local:
        if model not in served | failed:
            reason = known.get(model, "no worker has this entry in its catalog")
            yield problem("model", f"{model} is not served: {reason}", _advice(reason))


def _advice(reason: str) -> str:
    if "not installed" in reason:
        return "Install it in the worker's environment: pip install 'tollgate[worker]'."
    if "options" in reason or "unknown engine" in reason:
        return "Correct its entry. The worker loads it again within seconds."
    return "Compare the worker's catalog file with the gateway's, and see the worker's log."
