"""The models that a worker serves, and how they change with its catalog and by operators' wishes.

Each model changes by itself, while all others are served. A local model leases nothing more, its
running jobs end, its weights are freed, and only then is its new entry loaded: memory may not have
room for both. Meanwhile its jobs wait in the queue. An upstream's new entry serves the next job,
while running calls end under the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from workers.agent.capacity import ServedModel, serve_local
from workers.agent.catalog_file import Assignment
from workers.agent.engine_supervisor import EngineSupervisor
from workers.agent.outbox import LeasedJob
from workers.contract.jobs import RequestId
from workers.contract.models import ModelSpec
from workers.contract.queue import Queue
from workers.upstreams.host import UpstreamHost

log = logging.getLogger(__name__)

UNLOADED: Final = "an operator has unloaded it"
_BUSY_S: Final = 0.1
"""Interval at which the jobs of a model that goes are counted."""


class Lineup:
    """Runs ``lease`` for each model that is served, between ``start`` and ``stop``.

    ``queues`` are kept when a model goes: outcomes may still be on their way.
    """

    def __init__(
        self,
        assignment: Assignment,
        engines: EngineSupervisor,
        upstreams: UpstreamHost,
        *,
        queues: dict[str, Queue],
        new_queue: Callable[[str], Queue],
        leased: Mapping[RequestId, LeasedJob],
        lease: Callable[[ServedModel], Coroutine[Any, Any, None]],
        changed: Callable[[], None],
    ) -> None:
        self.served: dict[str, ServedModel] = {}
        self._engines = engines
        self._upstreams = upstreams
        self._queues = queues
        self._new_queue = new_queue
        self._leased = leased
        self._lease = lease
        self._changed = changed
        self._loops: dict[str, asyncio.Task[None]] = {}
        """The running ``lease`` of each model that leases."""
        self._group: asyncio.TaskGroup | None = None
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._stale: set[str] = set()
        """Models to be loaded again although their entry is the same."""
        self._assignment = assignment
        self._withheld: frozenset[str] = frozenset()
        """Models that an operator has unloaded."""
        self._eager: set[str] = set()
        """Models to be loaded when they are served again, without waiting for a job."""
        self._wanted = {spec.name: spec for spec in assignment.specs}
        self._specs = dict(self._wanted)
        for spec in assignment.specs:
            self._add(spec)

    @property
    def local(self) -> list[ServedModel]:
        return [served for served in self.served.values() if served.host is self._engines]

    @property
    def unavailable(self) -> dict[str, str]:
        """Reason by model, for models that are not served or only until their jobs have ended."""
        leaving = self.served.keys() - self._wanted.keys()
        gone = dict.fromkeys(leaving, "the worker's catalog no longer has it")
        known = {spec.name for spec in self._assignment.specs}
        unloaded = dict.fromkeys(sorted(self._withheld & known), UNLOADED)
        return gone | unloaded | dict(self._assignment.unavailable)

    def start(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        for served in self.served.values():
            self._loops[served.model] = group.create_task(self._lease(served))

    async def stop(self, patience_s: float) -> None:
        """Change nothing more and stop leasing, if possible not during a call, whose leases would
        be unknown."""
        self._group = None
        for change in self._changes.values():
            change.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for model, loop in self._loops.items():
                    async with self.served[model].leasing:
                        loop.cancel()
        for loop in self._loops.values():
            loop.cancel()

    def follow(self, assignment: Assignment) -> None:
        """Serve what is assigned now. Models that could not be loaded are tried again."""
        if self._group is None:
            return
        self._assignment = assignment
        self._stale.update(self._engines.problems)
        self._reconcile()

    def withhold(self, models: frozenset[str]) -> None:
        """Serve all but these models, which an operator has unloaded."""
        if models != self._withheld:
            self._withheld = models
            self._reconcile()

    def load(self, model: str) -> None:
        """Load a model now, also if it would be loaded for its first job, or could not be loaded
        before."""
        if model in self._engines.problems:
            self._stale.add(model)
        self._eager.add(model)
        self._reconcile()
        if model in self._specs and model not in self._changes:
            self._preload(model)

    def _preload(self, model: str) -> None:
        if model in self._eager and self._specs[model].upstream is None:
            self._engines.preload(model)
        self._eager.discard(model)

    def _reconcile(self) -> None:
        """Begin to change every model that is not as it should be."""
        if self._group is None:
            return
        self._wanted = {
            spec.name: spec for spec in self._assignment.specs if spec.name not in self._withheld
        }
        for model in dict.fromkeys([*self.served, *self._wanted]):
            if model not in self._changes and not self._is_right(model):
                self._changes[model] = self._group.create_task(self._change(model))
        self._changed()

    def _is_right(self, model: str) -> bool:
        return model not in self._stale and self._specs.get(model) == self._wanted.get(model)

    async def _change(self, model: str) -> None:
        """Bring a model to its wanted state, even if that changes again meanwhile."""
        while not self._is_right(model):
            self._stale.discard(model)
            wanted, served = self._wanted.get(model), self.served.get(model)
            replaces = wanted is not None and wanted.upstream is not None
            if served is not None and not (replaces and served.host is self._upstreams):
                await self._retire(served)
                wanted = self._wanted.get(model)
            if wanted is not None:
                self._serve(wanted)
            self._changed()
        del self._changes[model]

    async def _retire(self, served: ServedModel) -> None:
        """Serve a model no longer: let its jobs end, then free it."""
        model = served.model
        log.info("draining a model", extra={"model": model, "running": served.running})
        served.retired = True
        served.open.clear()
        self._changed()
        async with served.leasing:  # not during a call, whose leases would be unknown
            self._loops.pop(model).cancel()
        while self._is_busy(model):  # noqa: ASYNC110 - agent and engines each hold jobs
            await asyncio.sleep(_BUSY_S)
        if served.host is self._engines:
            self._engines.unload(model, replaced=model in self._wanted)
        else:
            self._upstreams.remove(model)
        del self.served[model], self._specs[model]

    def _is_busy(self, model: str) -> bool:
        leased: Iterable[LeasedJob] = self._leased.values()
        return any(job.model == model for job in leased) or self._engines.holds(model)

    def _serve(self, spec: ModelSpec) -> None:
        assert self._group is not None
        log.info("serving a new entry", extra={"model": spec.name})
        self._specs[spec.name] = spec
        if spec.upstream is None:
            self._engines.load(spec)
            self._preload(spec.name)
        else:
            self._upstreams.add(spec)
            if (served := self.served.get(spec.name)) is not None:
                served.slots = spec.upstream.concurrency
                return
        served = self._add(spec)
        self._loops[spec.name] = self._group.create_task(self._lease(served))

    def _add(self, spec: ModelSpec) -> ServedModel:
        queue = self._queues.setdefault(spec.name, self._new_queue(spec.name))
        if spec.upstream is None:
            served = serve_local(spec, queue, self._engines)
        else:
            served = ServedModel(spec.name, queue, self._upstreams, spec.upstream.concurrency)
        self.served[spec.name] = served
        return served
