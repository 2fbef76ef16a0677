"""Sets the gauges of queues and models, from what the last refresh of the queue server found."""

from __future__ import annotations

from collections import Counter

from gateway import metrics
from gateway.dispatch.health import QueueHealth


class LoadGauges:
    """No label names a worker: names are new with each start, and would never end."""

    def __init__(self, health: QueueHealth) -> None:
        self._health = health
        self._served: set[str] = set()
        """Models that some worker has served since the start."""

    def observe(self) -> None:
        announcements = self._health.announcements
        metrics.WORKERS.set(len(announcements))
        resident: Counter[str] = Counter()
        loads: Counter[str] = Counter()
        for worker in announcements:
            for model, state in worker.states.items():
                resident[model] += state.resident_bytes
                loads[model] += state.loads
        self._served |= resident.keys()
        for model in self._served:
            metrics.MODEL_RESIDENT.labels(model).set(resident[model])
            metrics.MODEL_LOADS.labels(model).set(loads[model])
        for model, load in self._health.loads.items():
            metrics.QUEUE_DEPTH.labels(model).set(load.depth)
            metrics.QUEUE_WORK_SECONDS.labels(model).set(load.work_s)
            metrics.QUEUE_OLDEST_SECONDS.labels(model).set(load.oldest_ms / 1000)
