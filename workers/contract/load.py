"""How busy the queue of one model is: the answer of its script's ``load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    """How busy one model is."""

    depth: int
    """Jobs queued."""
    cost: float
    """Their estimated device time in seconds."""
    running: int
    delayed: int
    live: int
    """All that have not ended: the demand that autoscaling goes by."""
    oldest_ms: int
    """Age of the oldest of those."""
    pace: float
    """Seconds from lease to end per estimated second, averaged over recent jobs; 0 if unknown."""
    service_s: float
    """Seconds from lease to end, averaged over recent jobs; 0 if unknown."""
    accounts: int = 0
    """Accounts with queued jobs."""
    backlogs: Mapping[str, float] = {}
    """Account → estimated device time of its queued jobs in seconds; empty beyond 4,096 accounts,
    because the server does nothing else while it reads them."""

    def seconds(self, cost: float) -> float:
        """Estimate of how long an amount of queued work takes.

        With work queued, the number of running jobs is what the workers can take at once.
        """
        return cost * (self.pace or 1.0) / max(self.running, 1)


def read_load(answer: Any) -> Load:
    """Read the answer of the script."""
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
