"""Reports the start of ``tollgate up`` line by line, and probes whether its processes are live.

Imported while the children start, because that takes longer than to start them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Final, TypeAlias

import httpx
from redis.exceptions import RedisError

from gateway.settings import Settings
from gateway.up.children import CannotStart, Child
from gateway.up.queue_server import ping
from workers.contract.announcements import Workers
from workers.contract.redis import connect

READY_S: Final = 120.0
"""Time for the gateway to be ready, and for a worker to announce itself."""
LIVE_EVERY_S: Final = 2.0
LIVE_PATIENCE_S: Final = 5.0
"""Time limit of one probe of ``/health/live``."""
LIVE_FAILURES_MAX: Final = 5
"""Consecutive failed probes after which the gateway is restarted."""
_POLL_S: Final = 0.05
_LATER_POLL_S: Final = 0.25

Probe: TypeAlias = Callable[[], Awaitable[str | None]]
"""Returns why a child is not live, or None."""
SILENT: Final = "does not answer"


class Start:
    """The start of gateway and models, reported with the seconds since ``started_s``."""

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        *,
        models: Collection[str],
        started_s: float,
        report: Callable[[str], None],
    ) -> None:
        """``models`` are those that the worker of this machine loads."""
        self._url = f"http://{settings.host}:{settings.port}/health/ready"
        self._redis = connect(redis_url)
        self._workers = Workers(self._redis, namespace=settings.namespace)
        self._models = models
        self._started_s = started_s
        self._report = report
        self._gateway_is_ready = False
        self._gateway_has_models = False
        self._served: set[str] = set()
        self._failed: set[str] = set()
        self._is_announced = False

    @property
    def loading(self) -> list[str]:
        """Models that are neither loaded nor failed, in the catalog's order."""
        return [name for name in self._models if name not in self._served | self._failed]

    async def wait_until_ready(self, gateway: Child, children: Iterable[Child]) -> None:
        """Wait until the gateway is ready and, if the catalog has local models, one is served or
        none can be. Raise ``CannotStart``."""
        deadline = time.monotonic() + READY_S
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            while not await self._is_ready(client):
                if gateway.process is not None and gateway.process.returncode is not None:
                    raise CannotStart(
                        gateway.last_words() or f"the gateway ended; see {gateway.log}"
                    )
                for child in children:
                    if child.keeps_failing:
                        raise CannotStart(f"{child.name} keeps failing; see {child.log}")
                waits = not self._gateway_is_ready or (self._models and not self._is_announced)
                if waits and time.monotonic() > deadline:
                    raise CannotStart(f"not ready after {READY_S:.0f} s; see the logs in the home")
                await asyncio.sleep(_POLL_S)

    async def report_rest(self) -> None:
        """Report the models that load after the first one."""
        try:
            while self.loading:
                await asyncio.sleep(_LATER_POLL_S)
                await self._read_announcements()
            if self._models:
                self._report(f"{len(self._served)} of {len(self._models)} models are loaded")
        finally:
            await self._redis.aclose()

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        await self._read_announcements()
        with contextlib.suppress(httpx.HTTPError):
            answer = await client.get(self._url)
            if answer.is_success and not self._gateway_is_ready:
                self._gateway_is_ready = True
                self._say("gateway")
            self._gateway_has_models = answer.is_success and answer.json()["models_served"] > 0
        finished = self._is_announced and not self.loading
        return self._gateway_is_ready and (self._gateway_has_models or finished or not self._models)

    async def _read_announcements(self) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            for worker in await self._workers.list():
                self._is_announced = True
                loaded = set(worker.models) & set(self._models) - self._served
                if loaded:
                    self._served |= loaded
                    self._say(", ".join(name for name in self._models if name in loaded))
                for name, problem in worker.problems.items():
                    if name not in self._failed:
                        self._failed.add(name)
                        self._say(f"{name} could not be loaded: {problem}")

    def _say(self, what: str) -> None:
        self._report(f"{time.monotonic() - self._started_s:6.1f} s  {what}")


async def visit_console(settings: Settings) -> None:
    """Visit the console, so that its process runs when a person comes."""
    async with httpx.AsyncClient(trust_env=False, timeout=READY_S) as client:
        with contextlib.suppress(httpx.HTTPError):
            await client.get(f"http://{settings.host}:{settings.port}/console/enter")


async def keep_live(child: Child, probe: Probe) -> None:
    """End a child that is not live, so that it is restarted.

    The first process has already been live; a restarted one has ``READY_S`` to become live.
    """
    seen, failures = child.process, 0
    while True:
        await asyncio.sleep(LIVE_EVERY_S)
        process = child.process
        reason = await probe()
        if reason is None:
            seen, failures = process, 0
            continue
        failures += 1
        patient = seen is not process and time.monotonic() - child.started < READY_S
        if failures < LIVE_FAILURES_MAX or patient or process is None:
            continue
        if process.returncode is None:
            child.report(f"{child.name} {reason}; restarting it (see {child.log})")
            await child.end()
        failures = 0


@contextlib.asynccontextmanager
async def gateway_probe(settings: Settings) -> AsyncIterator[Probe]:
    url = f"http://{settings.host}:{settings.port}/health/live"
    async with httpx.AsyncClient(trust_env=False, timeout=LIVE_PATIENCE_S) as client:

        async def probe() -> str | None:
            try:
                answer = await client.get(url)
            except httpx.HTTPError:
                return SILENT
            return None if answer.is_success else f"is not live: {answer.text}"

        yield probe


def queue_probe(path: Path) -> Probe:
    async def probe() -> str | None:
        try:
            async with asyncio.timeout(LIVE_PATIENCE_S):
                return None if await ping(path) else SILENT
        except OSError:
            return SILENT

    return probe
