"""Counts the weights of a network, and the operations of one forward pass. Pure.

A multiplication with its addition counts as two operations. Those of norms, activations and
positions are ignored: they are small, and bound by memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]
"""The parsed ``config.json`` of a network."""


class Unknown(Exception):
    """The operations of this network cannot be computed from its configuration."""


@dataclass(frozen=True, slots=True)
class Work:
    """The weights of a network, and the operations of one forward pass for one sample."""

    parameters: int
    operations: int


class Tally:
    """Adds up the layers of a network. ``positions`` is how often a layer is applied in a pass."""

    def __init__(self) -> None:
        self.parameters = 0
        self._products = 0

    @property
    def work(self) -> Work:
        return Work(self.parameters, 2 * self._products)

    def linear(self, inputs: int, outputs: int, positions: int, *, bias: bool = True) -> None:
        self.parameters += inputs * outputs + bias * outputs
        self._products += inputs * outputs * positions

    def conv(
        self, inputs: int, outputs: int, taps: int, positions: int, *, bias: bool = True
    ) -> None:
        """``taps`` is the size of the kernel, such as 9; ``positions`` are those of the output."""
        self.linear(inputs * taps, outputs, positions, bias=bias)

    def weights(self, count: int) -> None:
        """Count weights that are not multiplied, such as embeddings and those of norms."""
        self.parameters += count

    def attend(self, queries: int, keys: int, width: int) -> None:
        """Count scores and weighted sums of attention; ``width`` is that of all heads together."""
        self._products += 2 * queries * keys * width

    def mlp(self, inputs: int, hidden: int, positions: int, outputs: int | None = None) -> None:
        """Count two linear layers."""
        self.linear(inputs, hidden, positions)
        self.linear(hidden, outputs or inputs, positions)
