"""Announces what a worker serves and does, and passes on what operators wish of it.

One announcement every few seconds, and one soon after each change. All that it tells is known to
the agent already, or was measured by the engine process since the announcement before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from workers.agent.capacity import ServedModel
from workers.agent.catalog_file import CatalogFile
from workers.agent.engine_supervisor import EngineSupervisor
from workers.agent.lineup import Lineup
from workers.agent.outbox import retry_forever
from workers.contract.announcements import (
    ENDPOINTS_MAX,
    Announcement,
    EndpointState,
    ModelState,
    Wishes,
    Work,
    Workers,
    installed_version,
)
from workers.protocol.engine import Hardware
from workers.protocol.ipc import ModelMeasures
from workers.upstreams.host import UpstreamHost

ANNOUNCE_S: Final = 2.0
PAUSE_S: Final = 0.1
"""Pause before an announcement, in which the engine process is measured; all changes that happen
meanwhile are in it."""
SILENT_S: Final = 10.0
"""Time without a successful lease call after which a model with room is unavailable; a worker
without work makes one every two seconds."""
MINUTE_MS: Final = 60_000
"""Time over which readers compute how busy a worker is."""


class State(NamedTuple):
    """What the agent itself does."""

    running: int
    draining: bool
    ending: bool


class Announcer:
    """``obey`` is called with the wishes after each announcement, ``ready`` once, when the first
    models are served."""

    def __init__(
        self,
        workers: Workers,
        worker: str,
        *,
        device: str,
        engines: EngineSupervisor,
        upstreams: UpstreamHost,
        lineup: Lineup,
        catalog: CatalogFile,
        state: Callable[[], State],
        obey: Callable[[Wishes], None],
        ready: Callable[[str], None],
    ) -> None:
        self._workers = workers
        self._worker = worker
        self._device = device
        self._engines = engines
        self._upstreams = upstreams
        self._lineup = lineup
        self._catalog = catalog
        self._state = state
        self._obey = obey
        self._on_ready = ready
        self._changed = asyncio.Event()
        self._started_ms = _now_ms()
        self._past: deque[Work] = deque()
        """Work as it was measured within the last minute, and once before."""

    def hurry(self) -> None:
        """Announce soon, because something has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Announce periodically, and after each change, until cancelled."""
        announced = False
        while True:
            self._changed.clear()
            started = self._engines.ready and not self._engines.loading
            ready = started or not self._lineup.local
            wishes = await retry_forever(
                "announcing", lambda: self._workers.announce(self._announcement())
            )
            if wishes is not None:
                self._obey(wishes)
            if ready and not announced:
                announced = True
                self._on_ready(self._worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._changed.wait()
            self._engines.measure()
            await asyncio.sleep(PAUSE_S)

    def _announcement(self) -> Announcement:
        served, state, unavailable = self._lineup.served, self._state(), self._unavailable()
        measured = self._engines.measured
        work, earlier = self._work()
        return Announcement(
            worker=self._worker,
            models=tuple(model for model in served if model not in unavailable),
            loaded=tuple(self._engines.loaded),
            loading=(*self._engines.loading, *self._upstreams.starting),
            problems=self._engines.problems | self._upstreams.problems,
            unavailable=unavailable,
            device=self._device,
            bytes_total=measured.bytes_total,
            bytes_used=measured.bytes_used,
            budget_bytes=measured.budget_bytes,
            running=state.running,
            draining=state.draining,
            ending=state.ending,
            catalog_problem=self._catalog.problem,
            version=installed_version(),
            started_ms=self._started_ms,
            states={model: self._model_state(each) for model, each in served.items()},
            work=work,
            earlier=earlier,
            endpoints=_bounded(self._upstreams.endpoints),
        )

    def _model_state(self, served: ServedModel) -> ModelState:
        model, engines = served.model, self._engines
        measured = engines.measured.models.get(model, ModelMeasures(0))
        loaded, nowhere = model in engines.loaded, Hardware("")
        runs_on = engines.hardware.get(model, nowhere) if loaded else nowhere
        return ModelState(
            running=served.running,
            capacity=served.capacity,
            weights_bytes=measured.weights_bytes,
            cache_bytes=measured.cache_bytes,
            device=runs_on.device,
            dtype=runs_on.dtype,
            used_ms=measured.used_ms,
            loads=measured.loads,
            load_us=measured.load_us,
            resident_bytes=measured.resident_bytes,
        )

    def _unavailable(self) -> dict[str, str]:
        """Return the reason by model, for models that this worker should serve and does not."""
        found = self._lineup.unavailable
        for local in self._lineup.local:
            if (obstacle := self._engines.obstacle(local.model)) is not None:
                found.setdefault(local.model, obstacle)
        for model in self._upstreams.starting:
            found.setdefault(model, "its server is starting")
        for model in self._upstreams.problems:
            found.setdefault(model, "its server is not ready; see the worker's log")
        for model in self._upstreams.down:
            found[model] = "its upstream does not respond; the worker keeps probing it"
        silent_s = time.monotonic() - SILENT_S
        for model, served in self._lineup.served.items():
            if served.open.is_set() and served.answered_s < silent_s:
                found[model] = "lease calls to its queue fail; see the worker's log"
        return found

    def _work(self) -> tuple[Work, Work]:
        """Return the work so far, and as it was a minute ago."""
        now = self._engines.work
        self._past.append(now)
        while len(self._past) > 2 and self._past[1].at_ms <= now.at_ms - MINUTE_MS:
            self._past.popleft()
        return now, self._past[0]


def _bounded(endpoints: list[EndpointState]) -> tuple[EndpointState, ...]:
    """Return the endpoints that are announced: first those that are not up, or are in use."""
    if len(endpoints) > ENDPOINTS_MAX:
        endpoints = sorted(endpoints, key=lambda each: (each.state == "up", -each.in_flight))
    return tuple(endpoints[:ENDPOINTS_MAX])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
