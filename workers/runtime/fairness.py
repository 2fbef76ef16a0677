"""Whose turn it is: weighted deficit round robin over flows whose cost is known only afterwards.

Pure; it knows neither engines nor a clock. The invariant: flows that always have work receive time
in proportion to their weights, to within a round and one turn each, however unequal their turns.
"""

from __future__ import annotations

import math
from collections.abc import Collection


class DeficitRoundRobin:
    """Each round grants every ready flow ``quantum_us`` times its weight; a turn is paid later.

    A turn may overdraw the credit, since a step cannot be cut short: the debt is worked off in the
    rounds that follow. A flow without work keeps its debt and forfeits its credit, so that a pause
    can neither be saved up nor used to escape.
    """

    def __init__(self, quantum_us: int) -> None:
        self._quantum_us = quantum_us
        self._grants: dict[str, float] = {}
        self._credits: dict[str, float] = {}
        self._ring: list[str] = []
        self._turn = 0

    def add(self, flow: str, weight: float) -> None:
        if not 0.0 < weight < math.inf:
            raise ValueError(f"the weight of {flow} is {weight}; it must be positive and finite")
        self._grants[flow] = self._quantum_us * weight
        self._credits[flow] = 0.0
        self._ring.append(flow)

    def choose(self, ready: Collection[str]) -> str:
        """Return the flow whose turn it is among those that have work; there must be one."""
        credits = self._credits
        for flow in self._ring:
            if credits[flow] > 0.0 and flow not in ready:
                credits[flow] = 0.0
        current = self._ring[self._turn]
        if credits[current] > 0.0:
            return current
        while True:
            for _ in self._ring:
                self._turn = (self._turn + 1) % len(self._ring)
                flow = self._ring[self._turn]
                if flow in ready:
                    credits[flow] += self._grants[flow]
                    if credits[flow] > 0.0:
                        return flow
            self._skip_rounds(ready)

    def spend(self, flow: str, us: int) -> None:
        self._credits[flow] -= us

    def _skip_rounds(self, ready: Collection[str]) -> None:
        """Grant at once all rounds in which everybody would still be in debt."""
        rounds = min(math.floor(-self._credits[flow] / self._grants[flow]) for flow in ready)
        for flow in ready:
            self._credits[flow] += rounds * self._grants[flow]
