"""Measures what an engine process has done, and how much memory it takes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

from workers.protocol.engine import Memory, Weighed
from workers.protocol.ipc import Measured, ModelMeasures
from workers.runtime.step_loop import StepLoop

_STATISTICS: Final = Path("/proc/self/statm")


def measure(loop: StepLoop) -> Measured:
    """Return the work of all engines and the memory of their device.

    On a CPU these are the memory of the machine and what this process occupies of it.
    """
    models, device, budgets = {}, Memory(), set()
    offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
    for model, lane in loop.lanes.items():
        engine, memory = lane.engine, Memory()
        if lane.loaded and isinstance(engine, Weighed):
            memory = engine.memory
        models[model] = ModelMeasures(
            lane.busy_us,
            memory.weights_bytes,
            memory.cache_bytes,
            used_ms=(lane.used_us + offset_us) // 1000 if lane.loads else 0,
            loads=lane.loads,
            load_us=max(lane.load_ended_us - lane.load_started_us, 0),
            resident_bytes=lane.demand.bytes if lane.loaded else 0,
            longest_us=lane.longest_us,
        )
        budgets.add(loop.residency.budget_of(lane) or 0)
        if memory.device_bytes:
            device = memory
    if device.device_bytes:
        total, used = device.device_bytes, device.device_used_bytes
    else:
        total, used = _machine_bytes(), _resident_bytes()
    return Measured(loop.busy_us, loop.steps, total, used, max(budgets, default=0), models)


def _machine_bytes() -> int:
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    with contextlib.suppress(ValueError, OSError, IndexError):
        return int(_STATISTICS.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
