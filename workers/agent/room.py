"""How many jobs of a model a worker leases: those that run, and those that start within seconds.

What a worker holds, no other worker can have, and no order by fairness or priority reaches it any
more. So work ahead is bounded by time, not by count: by how fast jobs have ended of late.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Final

from workers.contract.models import ModelSpec
from workers.contract.queue import LEASE_COUNT_MAX, Queue
from workers.engines import registry
from workers.protocol.host import Host

AHEAD_S: Final = 2.0
"""Of work that is leased before there is room for it: as long as a worker waits for a queue."""
_RECENT: Final = 0.2
"""Weight of the last job in the mean."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model that this worker serves: its queue, its host, and the room that it has."""

    model: str
    queue: Queue
    host: Host
    slots: int
    """Jobs that run at a time."""
    leases_ahead: bool = False
    """Whether more are leased, as many as will start soon."""
    running: int = 0
    """Jobs that are leased and have not ended."""
    job_s: float = 0.0
    """Mean time from lease to end of late; 0 while none has ended."""
    asked_s: float = 0.0
    """When the queue last answered a lease call, or the first could be made."""
    nonce: str | None = None
    """Of a lease call whose answer has not arrived."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while jobs may be leased."""
    leasing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the lease call until its jobs are with their host."""

    @property
    def capacity(self) -> int:
        """The most jobs to hold: at least the slots, at most as many again."""
        if not self.leases_ahead or not self.job_s:
            return self.slots
        # So many end in a second, by Little's law, if as many are leased as there are slots.
        ending = max(self.slots, self.running) / self.job_s
        return self.slots + min(self.slots, math.floor(AHEAD_S * ending))

    @property
    def wanted(self) -> int:
        """How many jobs to ask for; also without room, if an answer was lost that may hold some."""
        least = 1 if self.nonce else 0
        return max(least, min(self.capacity - self.running, LEASE_COUNT_MAX))

    def record_duration(self, job_s: float) -> None:
        """Note how long a job took that has ended."""
        if not self.job_s:
            self.job_s = job_s
        self.job_s += _RECENT * (job_s - self.job_s)


def serve_local(spec: ModelSpec, queue: Queue, host: Host) -> ServedModel:
    """The room of a model that an engine here runs."""
    leases_ahead = registry.serving(spec).concurrency is None
    return ServedModel(spec.name, queue, host, registry.slots(spec), leases_ahead=leases_ahead)
