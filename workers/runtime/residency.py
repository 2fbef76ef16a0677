"""Decides which models are in the memory of each device: the one allocator of an engine process.

Pure: it reads a clock and the lanes of the step loop, and carries nothing out. Its caller carries
out one change for each turn of the loop, so that a model serves the jobs that it was loaded for. A
model that has jobs and is not in memory is loaded as soon as there is room. Room is made by the
models without running jobs, the least recently used first. Three invariants hold:

- the models in memory take no more than the budget of their device, as estimated before a load and
  as measured after it: ``excess`` leaves when a model turns out larger than its estimate;
- a model with running jobs is never unloaded;
- a model stays at least ``RESIDENCE_LOADS`` times as long as its load took. So loading takes at
  most a fifth of the time, however the jobs of models that do not fit together alternate.

A model on a GPU can occupy memory of the host as well, for parts that wait there. It counts like
that of a model on the CPU, from the first load on, which measures it.

Some models use more memory than they need, such as a language model for its cache. They get what is
free (``room``), and are loaded again with less rather than in place of another model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from workers.failures import raise_if_device_is_lost
from workers.protocol.engine import Demand, Sized, Weighed
from workers.runtime.lanes import Lane

log = logging.getLogger(__name__)

RESIDENCE_LOADS: Final = 4
"""Minimum time in memory, in multiples of the time that the load took."""
RESIDENCE_MIN_US: Final = 500_000
HOST: Final = "cpu"
"""The device of what is in the host's memory."""


class Change(NamedTuple):
    """The next change: models to unload, then a model to load; a ``problem`` means that it never
    fits."""

    load: Lane
    unload: tuple[Lane, ...] = ()
    problem: str | None = None


class Residency:
    """``budget_bytes``: maximum memory of the models on each device. Default: what the engines
    report. ``expected``: models that will be added, for which memory is left."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        now_us: Callable[[], int],
        budget_bytes: int | None = None,
        expected: Collection[str] = (),
    ) -> None:
        self._lanes = lanes
        self._now_us = now_us
        self._budget_bytes = budget_bytes
        self._expected = expected

    @property
    def is_pending(self) -> bool:
        """Whether a model is to be loaded, or others still make room for one that no longer is."""
        return any(lane.leaving or _is_wanted(lane) for lane in self._lanes.values())

    def next(self) -> Change | None:
        """Return the next change that is possible now, or None.

        If only models with running jobs could make room, those admit no further jobs.
        """
        wanted = sorted(filter(_is_wanted, self._lanes.values()), key=_waits_since_us)
        for lane in self._lanes.values():
            lane.leaving = False
        blocked: set[str] = set()
        for lane in wanted:
            self._estimate(lane)
            if not blocked.isdisjoint(_devices(lane)):
                continue
            if (problem := self.problem(lane)) is not None:
                return Change(lane, problem=problem)
            victims = self._make_room(lane)
            if victims is not None:
                return Change(lane, victims)
            # A smaller model behind it could take the room that is being made.
            blocked.update(_devices(lane))
        return None

    def fits(self, lane: Lane) -> bool:
        """Whether a model can be loaded while all others stay."""
        self._estimate(lane)
        return all(self._missing_bytes(lane, device) <= 0 for device in _devices(lane))

    def room(self, lane: Lane) -> int | None:
        """Return the most memory that a model can take if it is loaded now; None without a limit.

        Beside its demand this is what is free, or half of it while other models of its device are
        not loaded.
        """
        self._estimate(lane)
        budget = self.budget_of(lane)
        if budget is None:
            return None
        free = max(0, -self._missing_bytes(lane, lane.demand.device))
        others_to_load = any(
            not other.loaded and other.broken is None and self._shares_device(other, lane)
            for other in self._lanes.values()
        )
        return lane.demand.bytes + (free // 2 if others_to_load or self._expected else free)

    def problem(self, lane: Lane) -> str | None:
        """Return why a model does not fit even into an empty device, or None if it does."""
        self._estimate(lane)
        for device in _devices(lane):
            budget, needed = self._budget(lane, device), _bytes_on(lane, device)
            if budget is not None and needed > budget:
                return (
                    f"needs {_size(needed)} of memory, but the models on {device} can have "
                    f"{_size(budget)} (TOLLGATE_MEMORY_BUDGET)"
                )
        return None

    def excess(self, latest: Lane) -> tuple[Lane, ...]:
        """Return idle models to unload, because the one loaded last is larger than its estimate."""
        leaving: list[Lane] = []
        for device in _devices(latest):
            if (budget := self._budget(latest, device)) is None:
                continue
            idle = [
                lane
                for lane in self._lanes.values()
                if lane.loaded
                and lane is not latest
                and lane not in leaving
                and _bytes_on(lane, device)
                and not (lane.is_busy or lane.waiting)
            ]
            idle.sort(key=lambda lane: lane.used_us)
            gone = sum(_bytes_on(lane, device) for lane in leaving)
            leaving += _take(idle, device, self._used(device) - gone - budget)[0]
        return tuple(leaving)

    def measure(self, lane: Lane, used_before: int) -> None:
        """Record the memory of a loaded model. ``used_before``: of its device, before the load."""
        if isinstance(lane.engine, Weighed):
            memory = lane.engine.memory
            own = memory.weights_bytes + memory.cache_bytes
            grown = memory.device_used_bytes - used_before if memory.device_bytes else 0
            lane.demand = lane.demand._replace(bytes=max(own, grown), host_bytes=memory.host_bytes)
            lane.optional_bytes = memory.optional_bytes

    def note_use(self, lane: Lane) -> None:
        """Record that a request has ended, and the memory of its model if it has grown."""
        lane.used_us = self._now_us()
        if lane.loaded and isinstance(lane.engine, Weighed):
            memory = lane.engine.memory
            own = memory.weights_bytes + memory.cache_bytes
            lane.demand = lane.demand._replace(bytes=max(lane.demand.bytes, own))

    def note_unload(self, lane: Lane) -> None:
        """Record that a model has left: to be loaded again, it needs no optional memory."""
        lane.demand = lane.demand._replace(bytes=lane.demand.bytes - lane.optional_bytes)
        lane.optional_bytes = 0

    def note_shortage(self, lane: Lane) -> bool:
        """Raise the estimate of a model for which memory was lacking, so that another one leaves.
        Return False if there is no other to leave."""
        budget, used = self.budget_of(lane), self._used(lane.demand.device)
        if budget is None or not used:
            return False
        lane.demand = lane.demand._replace(bytes=budget - used + 1)
        return True

    def budget_of(self, lane: Lane) -> int | None:
        """Return the maximum memory of the models on a lane's device; None without a limit."""
        own = lane.demand.budget_bytes
        if self._budget_bytes is None or own is None:
            return own if self._budget_bytes is None else self._budget_bytes
        return min(own, self._budget_bytes)

    def _estimate(self, lane: Lane) -> None:
        if lane.demand.device or not isinstance(lane.engine, Sized):
            return
        try:
            lane.demand = lane.engine.demand()
        except Exception as error:
            raise_if_device_is_lost(error)
            # Its load reports the reason.
            log.warning("memory not estimated: %s", error, extra={"model": lane.model})
            lane.demand = Demand("unknown")

    @staticmethod
    def _shares_device(other: Lane, lane: Lane) -> bool:
        """Whether another model could take memory of a lane's device."""
        return other is not lane and other.demand.device in ("", lane.demand.device)

    def _budget(self, lane: Lane, device: str) -> int | None:
        """Return the maximum memory of all models on a device that a lane's model uses."""
        if device == lane.demand.device:
            return self.budget_of(lane)
        own = lane.demand.host_budget_bytes
        if self._budget_bytes is None or own is None:
            return own if self._budget_bytes is None else self._budget_bytes
        return min(own, self._budget_bytes)

    def _missing_bytes(self, lane: Lane, device: str) -> int:
        budget = self._budget(lane, device)
        return 0 if budget is None else self._used(device) + _bytes_on(lane, device) - budget

    def _used(self, device: str) -> int:
        return sum(_bytes_on(lane, device) for lane in self._lanes.values() if lane.loaded)

    def _make_room(self, wanted: Lane) -> tuple[Lane, ...] | None:
        """Return the models to unload, or None while those that could leave are busy or young."""
        victims: list[Lane] = []
        leaving: list[Lane] = []
        lacks = False
        for device in _devices(wanted):
            missing = self._missing_bytes(wanted, device)
            missing -= sum(_bytes_on(lane, device) for lane in (*victims, *leaving))
            others = [
                lane
                for lane in self._lanes.values()
                if lane.loaded
                and _bytes_on(lane, device)
                and lane not in (*victims, *leaving)
                and self._has_stayed(lane)
            ]
            idle = [lane for lane in others if not lane.is_busy]
            idle.sort(key=lambda lane: lane.used_us)
            more, missing = _take(idle, device, missing)
            victims += more
            busy = sorted(
                (lane for lane in others if lane.is_busy), key=lambda lane: lane.load_ended_us
            )
            more, missing = _take(busy, device, missing)
            leaving += more
            lacks = lacks or missing > 0
        if lacks:
            return None
        if not leaving:
            return tuple(victims)
        for lane in (*victims, *leaving):
            lane.leaving = True
        return None

    def _has_stayed(self, lane: Lane) -> bool:
        load_us = lane.load_ended_us - lane.load_started_us
        stays_us = max(RESIDENCE_LOADS * load_us, RESIDENCE_MIN_US)
        return self._now_us() - lane.load_ended_us >= stays_us


def _devices(lane: Lane) -> tuple[str, ...]:
    """Return where a lane's model takes memory."""
    device = lane.demand.device
    return (device, HOST) if lane.demand.host_bytes and device != HOST else (device,)


def _bytes_on(lane: Lane, device: str) -> int:
    demand = lane.demand
    own = demand.bytes if demand.device == device else 0
    return own + (demand.host_bytes if device == HOST else 0)


def _take(lanes: Iterable[Lane], device: str, missing: int) -> tuple[tuple[Lane, ...], int]:
    """Take lanes until their memory on a device is enough; return them, and what is still
    missing."""
    taken = []
    for lane in lanes:
        if missing <= 0:
            break
        taken.append(lane)
        missing -= _bytes_on(lane, device)
    return tuple(taken), missing


def _is_wanted(lane: Lane) -> bool:
    return not lane.loaded and lane.broken is None and bool(lane.waiting or lane.wished)


def _waits_since_us(lane: Lane) -> int:
    return lane.waiting[0].leased_us if lane.waiting else 0


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
