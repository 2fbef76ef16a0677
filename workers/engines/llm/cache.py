"""The key-value cache, by slots, and the attention that reads and writes it.

Transformers' own model code runs unchanged: its attention is swapped through the library's public
interface for ``_attend``, which finds its cache on the attention module. A slot is one sequence.
Prompts are read one at a time and always alone; a decode step runs all slots, the unused ones idle,
so that a sequence meets the same shapes whatever else is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION: Final = "tollgate_slots"
STRIDE: Final = 64
"""Decode steps look at whole multiples of so many positions: few shapes, and stable sums."""


class SlotCache:
    """Keys and values of all layers: each ``(slots, kv_heads, context, head_dim)``."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, kv_heads, context, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.slots = slots
        self._context = context
        self._device = device
        self._rows = torch.arange(slots, device=device)
        self._prefill: int | None = None
        self._positions = torch.zeros(slots, dtype=torch.long, device=device)
        self._window = 0
        self._mask = torch.zeros(0, device=device)

    def begin_prefill(self, slot: int) -> None:
        """The next forward reads a whole prompt into one slot."""
        self._prefill = slot

    def begin_decode(self, positions: torch.Tensor, longest: int) -> None:
        """The next forward adds one token to every slot, at ``positions`` ``(slots,)`` int64."""
        self._prefill = None
        self._positions = positions
        self._window = min(self._context, -(-(longest + 1) // STRIDE) * STRIDE)
        reach = torch.arange(self._window, device=self._device)
        self._mask = (reach[None] <= positions[:, None])[:, None, None]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give other slots the same past, as for several answers to one prompt."""
        for keys, values in zip(self.keys, self.values, strict=True):
            for target in targets:
                keys[target, :, :length] = keys[source, :, :length]
                values[target, :, :length] = values[source, :, :length]

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
        keys, values = self.keys[layer], self.values[layer]
        if self._prefill is not None:
            tokens = key.shape[2]
            keys[self._prefill, :, :tokens] = key[0]
            values[self._prefill, :, :tokens] = value[0]
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2)
        keys[self._rows, :, self._positions] = key[:, :, 0]
        values[self._rows, :, self._positions] = value[:, :, 0]
        out = F.scaled_dot_product_attention(
            query,
            keys[:, :, : self._window],
            values[:, :, : self._window],
            attn_mask=self._mask,
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2)


def attach(model: Any, cache: SlotCache) -> None:
    """Make a model's attention layers use a cache."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj"):
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
