"""Keys and values of several sequences of different lengths, for one decoder.

A row is one sequence, or one with guidance and one without (``lanes``). A step runs one token of
each row through the library's own modules, for which the cache stands in for the library's. Rows
are computed in multiples of ``ROWS`` and over lengths in multiples of ``POSITIONS``: a CPU's matrix
products and attention then give a row the same bits, whatever the other rows are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import Cache, DynamicLayer

ROWS: Final = 4
"""Fewer rows use other product kernels."""
POSITIONS: Final = 64
_GROWTH: Final = 1.5


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a ``RowCache``; ``keys`` and ``values`` are what a step reads."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all_keys = keys
        """``(rows * lanes, heads, positions, size)``, as are ``all_values``."""
        self.all_values = values
        self.keys = self.values = keys[:, :, :0]
        self._rows = self._places = torch.empty(0)

    def begin(self, rows: torch.Tensor, places: torch.Tensor, length: int) -> None:
        self._rows, self._places = rows, places
        self.keys = self.all_keys[: len(rows), :, :length]
        self.values = self.all_values[: len(rows), :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token of each row at its place."""
        self.all_keys[self._rows, :, self._places] = key_states[:, :, 0]
        self.all_values[self._rows, :, self._places] = value_states[:, :, 0]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])


class RowCache:
    """Grows with rows and lengths; ``clear`` frees it."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.layers: list[_Layer] = []

    @property
    def cache(self) -> Any:
        """The cache as a module of the library takes it."""
        return Cache(layers=[*self.layers])

    @property
    def bytes(self) -> int:
        return sum(
            kept.numel() * kept.element_size()
            for layer in self.layers
            for kept in (layer.all_keys, layer.all_values)
        )

    def clear(self) -> None:
        self.layers = []

    def store(self, row: int, prefilled: Any) -> None:
        """Copy the keys and values of a row, ``(lanes, heads, length, size)`` in each layer."""
        self.reserve(row + 1, prefilled.layers[0].keys.shape[2], prefilled)
        at = slice(row * self._lanes, (row + 1) * self._lanes)
        for layer, found in zip(self.layers, prefilled.layers, strict=True):
            # A mask does not hide the NaN that an earlier sequence left: it is added to scores.
            layer.all_keys[at] = 0
            layer.all_values[at] = 0
            layer.all_keys[at, :, : found.keys.shape[2]] = found.keys
            layer.all_values[at, :, : found.values.shape[2]] = found.values

    def reserve(self, rows: int, length: int, like: Any = None) -> None:
        """Make room; ``like`` has the shape of the layers, before the first call."""
        rows, length = _rounded(rows, ROWS) * self._lanes, _rounded(length, POSITIONS)
        if not self.layers:
            assert like is not None
            self.layers = [
                _Layer(*(kept.new_zeros(rows, kept.shape[1], length, kept.shape[3]) for kept in of))
                for of in ((layer.keys, layer.values) for layer in like.layers)
            ]
            return
        has_rows, _, has_length, _ = self.layers[0].all_keys.shape
        if rows <= has_rows and length <= has_length:
            return
        if length > has_length:
            length = _rounded(max(length, int(_GROWTH * has_length)), POSITIONS)
        # The keys of the first layer are last: their size tells whether all others have grown.
        for layer in reversed(self.layers):
            layer.all_values = _grown(layer.all_values, rows, length)
            layer.all_keys = _grown(layer.all_keys, rows, length)

    def begin(self, places: torch.Tensor, length: int) -> torch.Tensor:
        """Begin a step of the first rows, whose tokens come to ``places``; return their mask.

        ``length``: number of positions that any of the rows needs.
        """
        self.reserve(0, max(length, int(places.max()) + 1))
        places = places.repeat_interleave(self._lanes)
        first = self.layers[0].all_keys
        length, places = _rounded(length, POSITIONS), places.to(first.device)
        rows = torch.arange(len(places), device=first.device)
        for layer in self.layers:
            layer.begin(rows, places, length)
        return mask_beyond(places + 1, length, first.dtype)


def mask_beyond(lengths: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask ``(rows, 1, 1, length)`` to add to the scores of attention."""
    hidden = torch.arange(length, device=lengths.device) >= lengths[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]


class TextCache(RowCache):
    """Keys and values of the text of each row, which a step only reads."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self._lengths: dict[int, int] = {}

    def store(self, row: int, prefilled: Any) -> None:
        super().store(row, prefilled)
        self._lengths[row] = prefilled.layers[0].keys.shape[2]

    def clear(self) -> None:
        super().clear()
        self._lengths = {}

    def read(self, count: int) -> torch.Tensor:
        """Begin a step of the first ``count`` rows; return their mask."""
        # A row that is not in use needs one position, so that its attention is a number.
        lengths = torch.tensor([self._lengths.get(row, 1) for row in range(count)])
        return self.begin(lengths - 1, int(lengths.max()))


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def _grown(kept: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return a copy with more rows or positions, or the tensor itself if it has enough of both."""
    rows, length = max(rows, kept.shape[0]), max(length, kept.shape[2])
    if (rows, length) == (kept.shape[0], kept.shape[2]):
        return kept
    larger = kept.new_zeros(rows, kept.shape[1], length, kept.shape[3])
    larger[: kept.shape[0], :, : kept.shape[2]] = kept
    return larger
