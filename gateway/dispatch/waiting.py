"""Estimates the queueing time of an account's next job under fair queueing. Pure.

The queue is fair between accounts by the cost of their jobs. A job therefore waits for its own
account's backlog, and for what is served of every other account meanwhile: that account's share of
the time and one job more, but never more than it has queued. A queue that is long because of one
account is short for all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate

from workers.contract.load import Load

Weight = Callable[[str], float]
"""Returns the weight of a flow in the queue of a model."""


class Waiting:
    """Load of a model's queue as last read, prepared once for many estimates."""

    def __init__(self, load: Load, weight: Weight) -> None:
        self._load = load
        self._weight = weight
        self._turn = load.cost / load.depth if load.depth else 0.0
        by_weight: defaultdict[float, list[float]] = defaultdict(list)
        for account, cost in load.backlogs.items():
            by_weight[weight(account)].append(cost)
        self._flows = []
        for share, costs in by_weight.items():
            costs.sort()
            self._flows.append((share, costs, list(accumulate(costs, initial=0.0))))

    def seconds(self, account: str) -> float:
        """Estimate the queueing time in seconds of a job that an account enqueues now."""
        load = self._load
        # Until the account's own backlog is served, a flow of weight w receives w times as much as
        # one of weight 1; one more of its jobs can start just before that.
        rounds = load.backlogs.get(account, 0.0) / self._weight(account)
        unread = load.accounts - len(load.backlogs)
        before = unread * (rounds + self._turn)
        for share, costs, sums in self._flows:
            most = share * rounds + self._turn
            small = bisect_right(costs, most)
            before += sums[small] + most * (len(costs) - small)
        return load.seconds(min(before, load.cost))
