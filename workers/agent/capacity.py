"""Decides how many jobs of a model a worker leases: those that run, and those that start soon.

A leased job is out of reach of other workers and of the fair order of accounts. So leasing ahead is
limited by time rather than count, based on how fast recent jobs have ended.
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
"""Duration of the work leased ahead of free slots: as long as a worker waits for a queue."""
_RECENT: Final = 0.2
"""Weight of the latest job in the moving average."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model that this worker serves, with its queue, its host and its capacity."""

    model: str
    queue: Queue
    host: Host
    slots: int
    """Maximum number of running jobs."""
    leases_ahead: bool = False
    """Whether jobs that will start soon are leased beyond ``slots``."""
    running: int = 0
    """Number of leased jobs that have not ended."""
    job_s: float = 0.0
    """Moving average of the time from lease to end; 0 until a job has ended."""
    answered_s: float = 0.0
    """Time of the last answered lease call, or since when one is possible."""
    nonce: str | None = None
    """Nonce of a lease call without an answer yet."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while jobs may be leased."""
    is_cold: bool = False
    """Whether its weights are not in memory, so that its first job waits for them."""
    retired: bool = False
    """Whether it leases nothing more because its entry changed or went."""
    leasing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the lease call until its jobs are with their host."""

    @property
    def capacity(self) -> int:
        """Maximum number of leased jobs: between one and two times ``slots``.

        One job loads a cold model. Other workers that have it in memory can take the rest.
        """
        if self.is_cold:
            return 1
        if not self.leases_ahead or not self.job_s:
            return self.slots
        # Jobs that end per second, by Little's law, if all slots are in use.
        ending = max(self.slots, self.running) / self.job_s
        return self.slots + min(self.slots, math.floor(AHEAD_S * ending))

    @property
    def wanted(self) -> int:
        """Number of jobs to lease. At least 1 after a lost answer, which may contain leases."""
        least = 1 if self.nonce else 0
        return max(least, min(self.capacity - self.running, LEASE_COUNT_MAX))

    def record_duration(self, job_s: float) -> None:
        """Add the duration of a job that has ended."""
        if not self.job_s:
            self.job_s = job_s
        self.job_s += _RECENT * (job_s - self.job_s)


def serve_local(spec: ModelSpec, queue: Queue, host: Host) -> ServedModel:
    """Return the served model of an engine of this worker."""
    leases_ahead = registry.serving(spec).concurrency is None
    return ServedModel(spec.name, queue, host, registry.slots(spec), leases_ahead=leases_ahead)
