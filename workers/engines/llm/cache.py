"""The paged key-value cache, and the attention that reads and writes it.

Transformers' own model code runs unchanged: its attention is swapped through the library's public
interface for ``_attend``, which finds its cache on the attention module, so any number of models
may be loaded in one process. All tokens of a step lie behind each other in one row; a ``Layout``
says whose they are. Here the past is gathered from its blocks and given to torch's attention; on
CUDA ``varlen`` reads it where it lies, if the installed torch can.

An answer must not depend on who else is running, to the last bit. Prompts are therefore read in
pieces that depend on nothing but the prompt, each attended to by itself, and what is written is
attended to row by row and column by column, by products whose shape is always the same
(``_attend_by_row``): torch's own attention depends on the thread that computes a row. Measured on a
CPU: these give the same bits whatever is in the other rows, and however wide the window is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from workers.engines.llm.blocks import BLANK

IMPLEMENTATION: Final = "tollgate_paged"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """``blocks`` can be taken; two more are always there, one blank and one for what is lost."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Keys and values of one position, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return (self.blocks + 2) * self.block_tokens * self.token_bytes

    @property
    def sink(self) -> int:
        """The block to which padding is written; nobody reads it."""
        return self.blocks + 1


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Tokens of one sequence to be run: ``ids`` from position ``start`` on, in the blocks of
    ``table``. The logits after the last ``kept`` of them are wanted."""

    ids: Sequence[int]
    start: int
    table: Sequence[int]
    kept: int = 1

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class Layout(Protocol):
    """Whose the tokens of a step are, and where their past lies; on the device."""


class Cache(Protocol):
    """What a decoder asks of a cache, whichever attention it is made for."""

    shape: CacheShape

    def lay_out(
        self,
        rows: Sequence[SequenceInput],
        columns: int,
        pieces: Sequence[SequenceInput],
        padding: int,
        *,
        steady: bool = False,
    ) -> Layout:
        """Say whose tokens come: ``columns`` of each row, then all of each piece, then padding.

        A ``steady`` layout has the same shape however long the past is, if the cache can do that.
        """
        ...

    def begin(self, layout: Layout) -> None:
        """The next forward is that of this layout."""
        ...

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Forget what stands in blocks.

        A mask hides numbers, but not what is none: 0 times NaN is NaN, also for the next in line.
        """
        ...

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each ``(source, target)``."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` ``(1, kv_heads, tokens, head_dim)``, attend to the past.

        Return ``(1, tokens, heads, head_dim)``.
        """
        ...


def places(
    rows: Sequence[SequenceInput],
    columns: int,
    pieces: Sequence[SequenceInput],
    padding: int,
    shape: CacheShape,
) -> tuple[list[int], list[int]]:
    """The block, and the place in it, of each token of a step; padding goes to the sink."""
    size, sink = shape.block_tokens, shape.sink
    blocks: list[int] = []
    offsets: list[int] = []
    for row in rows:
        for position in range(row.start, row.stop):
            blocks.append(row.table[position // size])
            offsets.append(position % size)
        spare = columns - len(row.ids)
        blocks += [sink] * spare
        offsets += [0] * spare
    for piece in pieces:
        blocks += [piece.table[position // size] for position in range(piece.start, piece.stop)]
        offsets += [position % size for position in range(piece.start, piece.stop)]
    return blocks + [sink] * padding, offsets + [0] * padding


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """``gather`` and ``mask`` are None for the first piece of a prompt, which has no past."""

    begin: int
    end: int
    gather: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Gathered:
    """``store`` ``(tokens · kv_heads,)`` and ``gather`` ``(rows · kv_heads · blocks,)`` int64,
    ``masks`` of each column ``(rows, 1, 1, window)`` float32: 0, or -inf where it may not look."""

    store: torch.Tensor
    rows: int
    columns: int
    gather: torch.Tensor
    masks: tuple[torch.Tensor, ...]
    pieces: tuple[_PrefillChunk, ...]


class Blocks:
    """Keys and values of all layers, each a tensor whose first dimension is the blocks."""

    def __init__(self, shape: CacheShape, device: torch.device, size: Sequence[int]) -> None:
        """``size``: of one block."""
        self.shape = shape
        self.device = device
        whole = (shape.blocks + 2, *size)
        self._keys, self._values = (
            [torch.zeros(whole, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
            for _ in range(2)
        )

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        for kept in (*self._keys, *self._values):
            kept[list(blocks)] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = (list(part) for part in zip(*pairs, strict=True))
        for kept in (*self._keys, *self._values):
            kept[targets] = kept[sources]


class GatherCache(Blocks):
    """A block is ``(kv_heads, block_tokens, head_dim)``, so that it is copied in few pieces."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        super().__init__(shape, device, (shape.kv_heads, shape.block_tokens, shape.head_dim))
        self._heads = torch.arange(shape.kv_heads, device=device)
        self._layout: _Gathered | None = None

    def lay_out(
        self,
        rows: Sequence[SequenceInput],
        columns: int,
        pieces: Sequence[SequenceInput],
        padding: int,
        *,
        steady: bool = False,
    ) -> _Gathered:
        blocks, offsets = places(rows, columns, pieces, padding, self.shape)
        count = max((self._blocks_of(row.stop) for row in rows), default=0)
        tables = [[*row.table[:count], *[BLANK] * (count - len(row.table))] for row in rows]
        positions = [
            [*range(row.start, row.stop), *[row.start] * (columns - len(row.ids))] for row in rows
        ]
        reach = torch.arange(count * self.shape.block_tokens, device=self.device)
        laid: list[_PrefillChunk] = []
        begin = len(rows) * columns
        for piece in pieces:
            end = begin + len(piece.ids)
            laid.append(self._lay_piece(piece, begin, end))
            begin = end
        masks: tuple[torch.Tensor, ...] = ()
        if rows:
            until = torch.tensor(positions, device=self.device)[:, :, None, None, None]
            masks = torch.zeros(()).where(reach <= until, -torch.inf).unbind(1)
        block, offset = torch.tensor([blocks, offsets], device=self.device)
        head = block[:, None] * self.shape.kv_heads + self._heads
        store = head * self.shape.block_tokens + offset[:, None]
        return _Gathered(
            store.flatten(),
            len(rows),
            columns,
            self._index(tables),
            masks,
            tuple(laid),
        )

    def _lay_piece(self, piece: SequenceInput, begin: int, end: int) -> _PrefillChunk:
        if piece.start == 0:
            return _PrefillChunk(begin, end, None, None)
        table = piece.table[: self._blocks_of(piece.stop)]
        reach = torch.arange(len(table) * self.shape.block_tokens, device=self.device)
        mask = reach[None] <= reach[piece.start : piece.stop, None]
        return _PrefillChunk(begin, end, self._index([table]), mask)

    def begin(self, layout: Layout) -> None:
        assert isinstance(layout, _Gathered)
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
        for kept, new in ((keys, key), (values, value)):
            flat = kept.view(-1, self.shape.head_dim)
            flat.index_copy_(0, layout.store, new[0].transpose(0, 1).reshape(-1, flat.shape[1]))
        _, heads, tokens, head_dim = query.shape
        rows, columns = layout.rows, layout.columns
        past = None
        if rows:
            past = self._gather(layer, layout.gather, rows)
        if columns == 1 and not layout.pieces:
            asked = query[0, :, :rows].transpose(0, 1)
            assert past is not None
            written = _attend_by_row(asked, past[0], past[1], layout.masks[0], scaling)
            return F.pad(written, (0, 0, 0, 0, 0, tokens - rows))[None]
        attended = query.new_zeros(1, tokens, heads, head_dim)
        if past is not None:
            end = rows * columns
            for column, mask in enumerate(layout.masks):
                attended[0, column:end:columns] = _attend_by_row(
                    query[0, :, column:end:columns].transpose(0, 1),
                    past[0],
                    past[1],
                    mask,
                    scaling,
                )
        for piece in layout.pieces:
            there = slice(piece.begin, piece.end)
            if piece.gather is None:
                past = key[:, :, there].contiguous(), value[:, :, there].contiguous()
            else:
                past = self._gather(layer, piece.gather, 1)
            attended[:, there] = F.scaled_dot_product_attention(
                query[:, :, there].contiguous(),
                past[0],
                past[1],
                attn_mask=piece.mask,
                is_causal=piece.mask is None,
                scale=scaling,
                enable_gqa=True,
            ).transpose(1, 2)
        return attended

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_tokens)

    def _index(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Where the past of each row lies, for each head by itself, so that it is copied once."""
        table = torch.tensor(tables, dtype=torch.long, device=self.device)
        if not tables:
            return table
        return (table[:, None] * self.shape.kv_heads + self._heads[:, None]).flatten()

    def _gather(
        self, layer: int, index: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each ``(rows, kv_heads, window, head_dim)``."""
        shape = self.shape
        key, value = (
            kept[layer]
            .view(-1, shape.block_tokens * shape.head_dim)
            .index_select(0, index)
            .view(rows, shape.kv_heads, -1, shape.head_dim)
            for kept in (self._keys, self._values)
        )
        return key, value


def _attend_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one token to its row's past, the same bits in whichever row.

    ``query`` is ``(rows, heads, head_dim)``; return the same. In float32, for the products of
    shorter types are now and then summed in another order where a row is not aligned.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim).float()
    scores = torch.matmul(grouped, keys.float().transpose(-1, -2))
    scores = torch.add(mask, scores, alpha=head_dim**-0.5 if scaling is None else scaling)
    attended = torch.matmul(torch.softmax(scores, dim=-1), values.float())
    return attended.view(rows, heads, head_dim).to(query.dtype)


def attention_modules(model: Any) -> list[Any]:
    """Find the attention layers of a model, by what all proven families call their parts."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]


def attach(model: Any, cache: Cache) -> None:
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
    cache: Cache = module.tollgate_cache
    return cache.attend(module.layer_idx, query, key, value, scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The cache makes its own masks."""
