"""A picture as equal tiles that overlap, and put together again without seams. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workers.media.pixels import Pixels


@dataclass(frozen=True, slots=True)
class Grid:
    """Where tiles of ``height`` by ``width`` begin; together they cover a picture."""

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
    """Lay tiles over a picture: one where that is no more than a tile's pixels.

    Neighbours share at least ``overlap`` pixels, if the picture has more than one tile that way.
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
    return tuple(round(place * (length - tile) / (count - 1)) for place in range(count))


class Canvas:
    """A picture ``(H, W, 3)`` and what becomes of it, ``scale`` times as large."""

    def __init__(self, source: Pixels, grid: Grid, scale: int) -> None:
        self.grid = grid
        self._source = source
        self._scale = scale
        self._left = grid.tiles
        height, width = source.shape[:2]
        self._rows = _shares(grid.rows, grid.height, height, scale)
        self._columns = _shares(grid.columns, grid.width, width, scale)
        self._sum: npt.NDArray[np.float32] | None = None
        self._size = (height * scale, width * scale)

    @property
    def done(self) -> bool:
        return self._left == 0

    def cut(self, tile: int) -> Pixels:
        """One tile of the source: ``(h, w, 3)``."""
        top, left = self.grid.corner(tile)
        return self._source[top : top + self.grid.height, left : left + self.grid.width]

    def put(self, tile: int, drawn: npt.NDArray[np.float32]) -> None:
        """Lay a tile down, ``(h * scale, w * scale, 3)`` from 0 to 1; each is laid once."""
        self._left -= 1
        if self.grid.tiles == 1:
            self._sum = drawn
            return
        if self._sum is None:
            self._sum = np.zeros((*self._size, 3), np.float32)
        top, left = (corner * self._scale for corner in self.grid.corner(tile))
        row, column = divmod(tile, len(self.grid.columns))
        shares = self._rows[row][:, None, None] * self._columns[column][None, :, None]
        self._sum[top : top + drawn.shape[0], left : left + drawn.shape[1]] += drawn * shares

    def picture(self) -> Pixels:
        """The whole, ``(H * scale, W * scale, 3)``, once it is done; afterwards it is gone."""
        assert self._sum is not None
        assert self.done
        drawn, self._sum = self._sum, None
        return np.asarray((drawn.clip(0, 1) * 255).round(), np.uint8)


def _shares(
    starts: Sequence[int], tile: int, length: int, scale: int
) -> list[npt.NDArray[np.float32]]:
    """How much each tile counts at each of its own places, in one direction.

    A ramp from both ends, divided by what all tiles have there: so they sum to one everywhere, and
    the product of both directions does as well. The outermost third of what two share counts for
    next to nothing, because there a network has seen too little of what lies around.
    """
    size = tile * scale
    shared = min((one + tile - other for one, other in pairwise(starts)), default=0)
    ends = np.arange(1, size + 1, dtype=np.float64)
    ramp = (np.minimum(ends, ends[::-1]) - shared * scale // 3).clip(min=1e-3)
    total = np.zeros(length * scale)
    for start in starts:
        total[start * scale : start * scale + size] += ramp
    return [
        (ramp / total[start * scale : start * scale + size]).astype(np.float32) for start in starts
    ]
