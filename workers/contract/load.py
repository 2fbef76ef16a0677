"""Load of one model's queue, as returned by the script's ``load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    depth: int
    """Number of queued jobs."""
    cost: float
    """Their estimated device time in seconds."""
    running: int
    delayed: int
    live: int
    """Number of jobs that have not ended: the demand signal for autoscaling."""
    oldest_ms: int
    """Age of the oldest live job."""
    pace: float
    """Actual seconds from lease to end per estimated second, over recent jobs; 0 if unknown."""
    service_s: float
    """Seconds from lease to end, averaged over recent jobs; 0 if unknown."""
    accounts: int = 0
    """Number of accounts with queued jobs."""
    backlogs: Mapping[str, float] = {}
    """Account → estimated device time of its queued jobs in seconds; empty beyond 4,096 accounts,
    because the server does nothing else while it reads them."""

    @property
    def work_s(self) -> float:
        """Time that all live jobs take in slots of workers; divided by the slots, the time until
        the queue is empty. A leased job counts as a whole, as long as recent ones took."""
        return self.cost * (self.pace or 1.0) + self.running * self.service_s

    def seconds(self, cost: float) -> float:
        """Estimate the time to process queued work of ``cost`` seconds.

        While work is queued, the number of running jobs is the capacity of the workers.
        """
        return cost * (self.pace or 1.0) / max(self.running, 1)


def read_load(answer: Any) -> Load:
    """Decode the answer of the script."""
    depth, cost_us, running, delayed, live, oldest_ms, pace, service_us, accounts, flat = answer
    return Load(
        depth=depth,
        cost=cost_us / 1e6,
        running=running,
        delayed=delayed,
        live=live,
        oldest_ms=oldest_ms,
        pace=float(pace),
        service_s=service_us / 1e6,
        accounts=accounts,
        backlogs={
            account.decode(): int(cost) / 1e6
            for account, cost in zip(flat[::2], flat[1::2], strict=True)
        },
    )
