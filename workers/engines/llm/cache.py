"""The key-value cache, by slots, and the attention that reads and writes it.

Transformers' own model code runs unchanged: its attention is swapped through the library's public
interface for ``_attend``, which finds its cache on the attention module, so any number of models
may be loaded in one process. A slot is one sequence.

An answer must not depend on who else is running, to the last bit. Prompts are therefore read one
at a time, in pieces that depend on nothing but the prompt, and a decode step always runs all rows,
the unused ones idle. Measured on a CPU: with the number of rows fixed, matrix products and this
attention give the same bits whatever is in the other rows, and whatever the window; with a varying
number they do not. Which row a sequence has must not matter either. For that the number has to be a
multiple of 4, or the threads of a matrix product split it unevenly, and a decode step on a CPU has
its own attention (``_attend_by_row``), for torch's depends on the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION: Final = "tollgate_slots"
ROWS: Final = 4
"""A decode step runs a multiple of so many rows."""
STRIDE: Final = 64
"""Decode steps look at whole multiples of so many positions, of which whole vectors are made."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: int
    slots: int
    kv_heads: int
    context: int
    head_dim: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return -(-self.slots // ROWS) * ROWS

    @property
    def token_bytes(self) -> int:
        """Keys and values of one position, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.rows * self.context * self.token_bytes


class SlotCache:
    """Keys and values of all layers: each ``(rows, kv_heads, context, head_dim)``."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        size = (shape.rows, shape.kv_heads, shape.context, shape.head_dim)
        self.shape = shape
        self.device = device
        self._keys, self._values = (
            [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
            for _ in range(2)
        )
        self._every_row = torch.arange(shape.rows, device=device)
        self._slot: int | None = None
        self._start = 0
        self._positions = torch.zeros(shape.rows, dtype=torch.long, device=device)
        self._window = 0
        self._mask: torch.Tensor | None = None

    def begin_read(self, slot: int, start: int, stop: int) -> None:
        """The next forward reads the prompt of one slot from ``start`` to before ``stop``."""
        self._slot, self._start, self._window = slot, start, stop
        if start == 0:
            self._mask = None
            return
        reach = torch.arange(stop, device=self.device)
        self._mask = reach[None] <= reach[start:, None]

    def begin_write(self, positions: torch.Tensor, longest: int) -> None:
        """The next forward adds one token to every row, at ``positions`` ``(rows,)`` int64.

        ``longest`` is the greatest position of those that matter.
        """
        self._slot = None
        self._positions = positions
        self._window = min(self.shape.context, -(-(longest + 1) // STRIDE) * STRIDE)
        reach = torch.arange(self._window, device=self.device)
        self._mask = (reach[None] <= positions[:, None])[:, None, None]

    def copy(self, source: int, targets: Sequence[int], tokens: int) -> None:
        """Give other slots the same past, as for several answers to one prompt."""
        for kept in (*self._keys, *self._values):
            for target in targets:
                kept[target, :, :tokens] = kept[source, :, :tokens]

    def clear(self, slots: Sequence[int], tokens: int) -> None:
        """Forget the first tokens of slots.

        A mask hides numbers, but not what is none: 0 times NaN is NaN, also for the next in line.
        """
        for kept in (*self._keys, *self._values):
            for slot in slots:
                kept[slot, :, :tokens] = 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` ``(rows, kv_heads, tokens, head_dim)``, attend to the past.

        Return ``(rows, tokens, heads, head_dim)``.
        """
        keys, values = self._keys[layer], self._values[layer]
        if self._slot is None:
            keys[self._every_row, :, self._positions] = key[:, :, 0]
            values[self._every_row, :, self._positions] = value[:, :, 0]
        else:
            rows = slice(self._slot, self._slot + 1)
            keys, values = keys[rows], values[rows]
            keys[:, :, self._start : self._window] = key
            values[:, :, self._start : self._window] = value
        keys, values = keys[:, :, : self._window], values[:, :, : self._window]
        if self._slot is None and self.device.type == "cpu":
            assert self._mask is not None
            return _attend_by_row(query, keys, values, self._mask, scaling)
        attended = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


def _attend_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of a decode step on a CPU, the same bits in whichever row.

    Torch's own gives each thread a piece of one buffer, which is aligned for the first thread only,
    and products of what is not aligned are summed in another order: with two threads and more, half
    the rows differ in their last bits. ``query`` is ``(rows, heads, 1, head_dim)``; return
    ``(rows, 1, heads, head_dim)``.
    """
    rows, heads, _, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).float()
    scores = (scores * (head_dim**-0.5 if scaling is None else scaling)).masked_fill_(
        ~mask, -torch.inf
    )
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.matmul(weights, values).view(rows, 1, heads, head_dim)


def attention_modules(model: Any) -> list[Any]:
    """Find the attention layers of a model, by what all proven families call their parts."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]


def attach(model: Any, cache: SlotCache) -> None:
    """Make a model's attention layers use a cache."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    for module in attention_modules(model):
        module.tollgate_cache = cache


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    cache: SlotCache = module.tollgate_cache
    return cache.attend(module.layer_idx, query, key, value, scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The cache makes its own masks."""
