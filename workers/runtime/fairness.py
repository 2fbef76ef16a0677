"""Weighted deficit round robin over flows whose cost is known only afterwards.

Pure; knows neither engines nor a clock. Invariant: flows that always have work receive time in
proportion to their weights, to within a round and one turn each, however unequal their turns are.
"""

from __future__ import annotations

import math
from collections.abc import Collection


class DeficitRoundRobin:
    """Each round grants every ready flow ``quantum_us`` times its weight; turns are paid
    afterwards.

    A turn can overdraw the credit, because a step cannot be interrupted; later rounds repay the
    debt. A flow without work keeps its debt but loses its credit, so that a flow can neither save
    up credit nor escape a debt by pausing.
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

    def remove(self, flow: str) -> None:
        place = self._ring.index(flow)
        del self._ring[place], self._grants[flow], self._credits[flow]
        if place < self._turn or self._turn == len(self._ring):
            self._turn = max(self._turn - 1, 0)

    def choose(self, ready: Collection[str]) -> str:
        """Return the next of the flows in ``ready``, which must not be empty."""
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
        """Grant all rounds in which every ready flow would still be in debt, in one step."""
        rounds = min(math.floor(-self._credits[flow] / self._grants[flow]) for flow in ready)
        for flow in ready:
            self._credits[flow] += rounds * self._grants[flow]
