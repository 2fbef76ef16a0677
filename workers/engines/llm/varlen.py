"""The paged cache of a CUDA device: torch's variable-length attention reads the blocks in place.

Not every supported torch has block tables in this attention, so it is detected by its signature;
without them a device uses ``GatherCache``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

from workers.engines.llm.blocks import ZERO_BLOCK
from workers.engines.llm.cache import CacheShape, ForwardTokens, GatherCache, PagedCache

BLOCK_TOKENS: Final = 256
"""Tokens of a block; the kernels require a multiple of this."""
_PARAMETERS: Final = {"block_table", "seqused_k", "window_size", "enable_gqa", "num_splits"}
_DTYPES: Final = (torch.bfloat16, torch.float16)

Attention = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _VarlenLayout:
    """``tables`` ``(sequences, blocks)`` int32: a sequence for each row and each prefill chunk."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    used: torch.Tensor
    tables: torch.Tensor
    longest_query: int
    longest_past: int


class VarlenCache(PagedCache[_VarlenLayout]):
    """A block is ``(block_tokens, kv_heads, head_dim)``, as the kernels read it."""

    def __init__(
        self, shape: CacheShape, device: torch.device, attention: Attention, longest: int
    ) -> None:
        """``longest``: maximum length of a sequence, in tokens."""
        super().__init__(shape, device, (shape.block_tokens, shape.kv_heads, shape.head_dim))
        self._longest = longest
        self._attention = attention

    def lay_out(self, tokens: ForwardTokens) -> _VarlenLayout:
        blocks, offsets = self._locate(tokens)
        rows, columns, prefills = tokens.rows, tokens.columns, tokens.prefills
        # Padding of a row follows its own tokens and may see beyond its past; padding of the step
        # is a separate sequence. The output of neither is used.
        lengths = [columns] * len(rows) + [len(prefill.ids) for prefill in prefills]
        used = [row.start + columns for row in rows] + [prefill.stop for prefill in prefills]
        tables = [list(sequence.table) for sequence in (*rows, *prefills)]
        if padding := tokens.padding:
            lengths.append(padding)
            used.append(padding)
            tables.append([self.shape.sink] * self._blocks_of(padding))
        width = max(max(map(len, tables)), max(map(self._blocks_of, used)))
        longest = max(used)
        if tokens.static:
            width = max(width, self._blocks_of(self._longest))
            longest = width * self.shape.block_tokens
        for table in tables:
            table += [ZERO_BLOCK] * (width - len(table))
        return _VarlenLayout(
            self._tensor(blocks),
            self._tensor(offsets),
            self._tensor([0, *accumulate(lengths)], torch.int32),
            self._tensor(used, torch.int32),
            self._tensor(tables, torch.int32),
            max(lengths),
            longest,
        )

    def _attend(
        self,
        layout: _VarlenLayout,
        stored: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        for target, source in zip(stored, new, strict=True):
            target[layout.blocks, layout.offsets] = source[0].transpose(0, 1)
        attended: torch.Tensor = self._attention(
            query[0].transpose(0, 1),
            *stored,
            layout.ends,
            None,
            layout.longest_query,
            layout.longest_past,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=layout.used,
            block_table=layout.tables,
            # One split per row, whatever else is in the step: batch invariance.
            num_splits=1,
        )
        return attended[None]


def find_attention(device: torch.device, dtype: torch.dtype) -> Attention | None:
    """Return torch's attention over block tables, if it supports this device and type."""
    if device.type != "cuda" or dtype not in _DTYPES:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if inspect.signature(varlen_attn).parameters.keys() >= _PARAMETERS else None


def make_cache(shape: CacheShape, device: torch.device, longest: int) -> PagedCache[Any]:
    """``longest``: maximum length of a sequence, in tokens."""
    attention = find_attention(device, shape.dtype)
    if attention is None:
        return GatherCache(shape, device)
    return VarlenCache(shape, device, attention, longest)
