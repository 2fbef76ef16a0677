"""How long an account's next job waits in the queue of a model under its fair order. Pure.

Accounts are served in turn by the cost of their jobs, so a job waits for its own account's backlog,
and for as much of every other account as is served meanwhile: its share of that time and one turn
more, but never more than it has queued. A queue that is long because of one account is therefore
short for all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate

from workers.contract.load import Load

Weight = Callable[[str], float]
"""Share of an account's flow in the queue of a model."""


class Waiting:
    """The queue of a model as it was read last; made once, asked for each order."""

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
        """Estimate how long a job that an account enqueues now will be queued."""
        load = self._load
        # Until its own backlog is served, a flow of weight w receives w times as much as one of
        # weight 1; a turn may begin just before that.
        rounds = load.backlogs.get(account, 0.0) / self._weight(account)
        unread = load.accounts - len(load.backlogs)
        before = unread * (rounds + self._turn)
        for share, costs, sums in self._flows:
            most = share * rounds + self._turn
            small = bisect_right(costs, most)
            before += sums[small] + most * (len(costs) - small)
        return load.seconds(min(before, load.cost))
