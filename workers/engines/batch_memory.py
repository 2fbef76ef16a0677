"""Bounds the rows of a batch by the memory that batches of their shape were measured to take.

Pure but for its meter. A shape that is not known yet is measured with one call alone, and a batch
has at most twice the rows of the largest one measured, because memory can grow faster than rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple, Protocol

import torch

SHAPES_MAX: Final = 256
"""Shapes that are remembered."""
GROWTH: Final = 2
"""Rows of a batch at most, relative to the largest that was measured."""


class Meter(Protocol):
    """Measures the memory of a device."""

    def start(self) -> int:
        """Return the allocated bytes, and measure the peak from here on."""
        ...

    def stop(self) -> tuple[int, int]:
        """Return the allocated bytes, and their peak since ``start``."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def stop(self) -> tuple[int, int]:
        return (
            torch.cuda.memory_allocated(self._device),
            torch.cuda.max_memory_allocated(self._device),
        )


class _Known(NamedTuple):
    rows: int
    """Rows of the largest batch."""
    row_bytes: float


class BatchMemory:
    """``allowance_bytes``: memory for the activations of a batch. The meter runs only in slices of
    the batch, so memory that others allocate between them does not count."""

    def __init__(self, allowance_bytes: int, meter: Meter) -> None:
        self.peak_bytes = 0
        """Most memory that a batch has taken."""
        self._allowance_bytes = allowance_bytes
        self._meter = meter
        self._known: dict[Hashable, _Known] = {}
        self._started = self._held = self._peak = 0

    def rows_max(self, shape: Hashable, rows_max: int) -> int:
        """Return the rows that fit; 0 if the shape is unknown, so that one call runs alone."""
        known = self._known.get(shape)
        if known is None:
            return 0
        fitting = int(self._allowance_bytes / known.row_bytes) if known.row_bytes else rows_max
        return min(rows_max, fitting, GROWTH * known.rows)

    def begin(self) -> None:
        """Begin a batch."""
        self._held = self._peak = 0

    def start_slice(self) -> None:
        self._started = self._meter.start()

    def stop_slice(self) -> None:
        allocated, peak = self._meter.stop()
        self._peak = max(self._peak, self._held + peak - self._started)
        self._held += allocated - self._started

    def end(self, shape: Hashable, rows: int) -> None:
        """Record the batch."""
        self.peak_bytes = max(self.peak_bytes, self._peak)
        known = self._known.pop(shape, _Known(rows, 0.0))
        if len(self._known) >= SHAPES_MAX:
            del self._known[next(iter(self._known))]
        self._known[shape] = _Known(max(known.rows, rows), max(known.row_bytes, self._peak / rows))
