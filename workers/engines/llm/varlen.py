"""The paged cache of a CUDA device: torch's variable-length attention reads the blocks in place.

Found by its signature, for not every torch that we support has block tables in it; without them a
device gets the cache that gathers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

from workers.engines.llm.blocks import BLANK
from workers.engines.llm.cache import (
    Blocks,
    Cache,
    CacheShape,
    GatherCache,
    Layout,
    SequenceInput,
    places,
)

BLOCK_TOKENS: Final = 256
"""The kernels take blocks of a multiple of so many tokens."""
_NEEDED: Final = {"block_table", "seqused_k", "window_size", "enable_gqa", "num_splits"}
_DTYPES: Final = (torch.bfloat16, torch.float16)

Attention = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Laid:
    """``tables`` ``(sequences, blocks)`` int32, a sequence for each row and piece."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    used: torch.Tensor
    tables: torch.Tensor
    longest_query: int
    longest_past: int


class VarlenCache(Blocks):
    """A block is ``(block_tokens, kv_heads, head_dim)``, as the kernels read it."""

    def __init__(
        self, shape: CacheShape, device: torch.device, attention: Attention, longest: int
    ) -> None:
        """``longest``: tokens of the longest sequence that there can be."""
        super().__init__(shape, device, (shape.block_tokens, shape.kv_heads, shape.head_dim))
        self._longest = longest
        self._attention = attention
        self._layout: _Laid | None = None

    def lay_out(
        self,
        rows: Sequence[SequenceInput],
        columns: int,
        pieces: Sequence[SequenceInput],
        padding: int,
        *,
        steady: bool = False,
    ) -> _Laid:
        blocks, offsets = places(rows, columns, pieces, padding, self.shape)
        size, sink = self.shape.block_tokens, self.shape.sink
        # What pads a row comes after its own tokens and may see more of its past than there is of
        # it; what pads the step is a sequence of its own. Neither is looked at.
        lengths = [columns] * len(rows) + [len(piece.ids) for piece in pieces]
        used = [row.start + columns for row in rows] + [piece.stop for piece in pieces]
        tables = [list(feed.table) for feed in (*rows, *pieces)]
        if padding:
            lengths.append(padding)
            used.append(padding)
            tables.append([sink] * -(-padding // size))
        width = max(max(map(len, tables)), max(-(-count // size) for count in used))
        longest = max(used)
        if steady:
            width = max(width, -(-self._longest // size))
            longest = width * size
        for table in tables:
            table += [BLANK] * (width - len(table))
        return _Laid(
            self._tensor(blocks, torch.long),
            self._tensor(offsets, torch.long),
            self._tensor([0, *accumulate(lengths)], torch.int32),
            self._tensor(used, torch.int32),
            self._tensor(tables, torch.int32),
            max(lengths),
            longest,
        )

    def begin(self, layout: Layout) -> None:
        assert isinstance(layout, _Laid)
        self._layout = layout

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        layout = self._layout
        assert layout is not None
        keys, values = self._keys[layer], self._values[layer]
        keys[layout.blocks, layout.offsets] = key[0].transpose(0, 1)
        values[layout.blocks, layout.offsets] = value[0].transpose(0, 1)
        attended: torch.Tensor = self._attention(
            query[0].transpose(0, 1),
            keys,
            values,
            layout.ends,
            None,
            layout.longest_query,
            layout.longest_past,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=layout.used,
            block_table=layout.tables,
            # One piece of work for each row, whoever else is in the step.
            num_splits=1,
        )
        return attended[None]

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def find_attention(device: torch.device, dtype: torch.dtype) -> Attention | None:
    """Torch's attention over block tables, where it has it for this device and type."""
    if device.type != "cuda" or dtype not in _DTYPES:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if inspect.signature(varlen_attn).parameters.keys() >= _NEEDED else None


def make_cache(shape: CacheShape, device: torch.device, longest: int) -> Cache:
    """``longest``: tokens of the longest sequence that there can be."""
    attention = find_attention(device, shape.dtype)
    if attention is None:
        return GatherCache(shape, device)
    return VarlenCache(shape, device, attention, longest)
