"""Splits an image into overlapping tiles of equal size, and joins them without seams. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workers.media.pixels import Pixels


@dataclass(frozen=True, slots=True)
class Grid:
    """First rows and columns of tiles of ``height`` by ``width`` that together cover an image."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    height: int
    width: int

    @property
    def tiles(self) -> int:
        return len(self.rows) * len(self.columns)

    def corner(self, tile: int) -> tuple[int, int]:
        row, column = divmod(tile, len(self.columns))
        return self.rows[row], self.columns[column]


def plan(height: int, width: int, *, tile: int, overlap: int) -> Grid:
    """Plan the tiles of an image: a single one if it has no more pixels than a tile.

    Neighbouring tiles share at least ``overlap`` pixels.
    """
    if height * width <= tile * tile:
        return Grid((0,), (0,), height, width)
    return Grid(
        _starts(height, tile, overlap),
        _starts(width, tile, overlap),
        min(height, tile),
        min(width, tile),
    )


def _starts(length: int, tile: int, overlap: int) -> tuple[int, ...]:
    if length <= tile:
        return (0,)
    count = -(-(length - overlap) // (tile - overlap))
    return tuple(round(index * (length - tile) / (count - 1)) for index in range(count))


class Canvas:
    """An image ``(H, W, 3)`` and its upscaled tiles, joined at ``scale`` times the size."""

    def __init__(self, source: Pixels, grid: Grid, scale: int) -> None:
        self.grid = grid
        self._source = source
        self._scale = scale
        self._remaining = grid.tiles
        height, width = source.shape[:2]
        self._rows = _blend_weights(grid.rows, grid.height, height, scale)
        self._columns = _blend_weights(grid.columns, grid.width, width, scale)
        self._sum: npt.NDArray[np.float32] | None = None
        self._size = (height * scale, width * scale)

    @property
    def done(self) -> bool:
        return self._remaining == 0

    def cut(self, tile: int) -> Pixels:
        """Return one tile of the source: ``(h, w, 3)``."""
        top, left = self.grid.corner(tile)
        return self._source[top : top + self.grid.height, left : left + self.grid.width]

    def put(self, tile: int, upscaled: npt.NDArray[np.float32]) -> None:
        """Add an upscaled tile ``(h * scale, w * scale, 3)`` from 0 to 1; each exactly once."""
        self._remaining -= 1
        if self.grid.tiles == 1:
            self._sum = upscaled
            return
        if self._sum is None:
            self._sum = np.zeros((*self._size, 3), np.float32)
        top, left = (corner * self._scale for corner in self.grid.corner(tile))
        row, column = divmod(tile, len(self.grid.columns))
        weights = self._rows[row][:, None, None] * self._columns[column][None, :, None]
        self._sum[top : top + upscaled.shape[0], left : left + upscaled.shape[1]] += (
            upscaled * weights
        )

    def image(self) -> Pixels:
        """Return ``(H * scale, W * scale, 3)`` and free it; call it once, after the last tile."""
        assert self._sum is not None
        assert self.done
        upscaled, self._sum = self._sum, None
        return np.asarray((upscaled.clip(0, 1) * 255).round(), np.uint8)


def _blend_weights(
    starts: Sequence[int], tile: int, length: int, scale: int
) -> list[npt.NDArray[np.float32]]:
    """Compute the blending weights of each tile's pixels, in one direction.

    A tile's weights rise from both ends and are divided by the sum over all tiles, so that they sum
    to one everywhere, and so do the products of both directions. The outermost third of an overlap
    has almost no weight, because there the network lacked context.
    """
    size = tile * scale
    overlap = min((first + tile - second for first, second in pairwise(starts)), default=0)
    distances = np.arange(1, size + 1, dtype=np.float64)
    ramp = (np.minimum(distances, distances[::-1]) - overlap * scale // 3).clip(min=1e-3)
    total = np.zeros(length * scale)
    for start in starts:
        total[start * scale : start * scale + size] += ramp
    return [
        (ramp / total[start * scale : start * scale + size]).astype(np.float32) for start in starts
    ]
