"""The paged KV cache and the attention over it.

Transformers' own model code runs unchanged: its attention is replaced through the library's public
interface by ``_attend``, which finds its cache on the attention module, so that one process can
load any number of models. All tokens of a step are concatenated in one row; a layout says which
sequence each belongs to. ``GatherCache`` copies the past out of its blocks for torch's attention;
on CUDA ``varlen`` reads the blocks in place, if the installed torch supports that.

Answers are batch invariant, to the last bit. Prompts are therefore prefilled in chunks that depend
on nothing but the prompt, each with a separate attention call; decoded tokens attend row by row and
column by column, in products of constant shape (``_attend_by_row``), because the result of torch's
own attention depends on the thread that computes a row. Measured on a CPU: these products give the
same bits whatever is in the other rows, and however wide the window is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from workers.engines.llm.blocks import ZERO_BLOCK

IMPLEMENTATION: Final = "tollgate_paged"


@dataclass(frozen=True, slots=True)
class CacheShape:
    """``blocks`` can be allocated; there are two more, the zero block and the sink."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Size of the keys and values of one position, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return (self.blocks + 2) * self.block_tokens * self.token_bytes

    @property
    def sink(self) -> int:
        """The block to which padding is written; its content is never used."""
        return self.blocks + 1


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Tokens ``ids`` of one sequence, from position ``start`` on, stored in the blocks ``table``.

    The forward returns the logits of the last ``logits_kept`` of them.
    """

    ids: Sequence[int]
    start: int
    table: Sequence[int]
    logits_kept: int = 1

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class ForwardTokens:
    """Tokens of one forward, in this order: ``columns`` of each row, all of each prefill chunk, and
    padding."""

    rows: Sequence[SequenceInput] = ()
    columns: int = 0
    prefills: Sequence[SequenceInput] = ()
    padding: int = 0
    static: bool = False
    """Whether the layout must have the same shape for any length of the past, if the cache supports
    that."""


LayoutT = TypeVar("LayoutT")


class PagedCache(ABC, Generic[LayoutT]):
    """Keys and values of all layers, each a tensor whose first dimension is the blocks.

    Subclasses choose the order within a block, and the attention that reads it.
    """

    def __init__(self, shape: CacheShape, device: torch.device, block_shape: Sequence[int]) -> None:
        self.shape = shape
        self.device = device
        self._layout: LayoutT | None = None
        dimensions = (shape.blocks + 2, *block_shape)
        self._keys, self._values = (
            [torch.zeros(dimensions, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
            for _ in range(2)
        )

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zero blocks before they are used again.

        Masks hide old numbers, but not NaN: 0 times NaN is NaN, for the next user too.
        """
        for stored in (*self._keys, *self._values):
            stored[list(blocks)] = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each ``(source, target)``."""
        sources, targets = (list(part) for part in zip(*pairs, strict=True))
        for stored in (*self._keys, *self._values):
            stored[targets] = stored[sources]

    @abstractmethod
    def lay_out(self, tokens: ForwardTokens) -> LayoutT:
        """Describe where the tokens of a forward are stored, and what they attend to."""

    def begin(self, layout: LayoutT) -> None:
        """Set the layout of the next forward."""
        self._layout = layout

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` ``(1, kv_heads, tokens, head_dim)``, then attend to the past.

        Return ``(1, tokens, heads, head_dim)``.
        """
        assert self._layout is not None
        stored = self._keys[layer], self._values[layer]
        return self._attend(self._layout, stored, query, (key, value), scaling)

    @abstractmethod
    def _attend(
        self,
        layout: LayoutT,
        stored: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        """Write the ``new`` keys and values to the ``stored`` ones, then attend."""

    def _locate(self, tokens: ForwardTokens) -> tuple[list[int], list[int]]:
        """Return the block of each token, and the offset in it; the sink for padding."""
        size, sink = self.shape.block_tokens, self.shape.sink
        blocks: list[int] = []
        offsets: list[int] = []
        for row in tokens.rows:
            for position in range(row.start, row.stop):
                blocks.append(row.table[position // size])
                offsets.append(position % size)
            spare = tokens.columns - len(row.ids)
            blocks += [sink] * spare
            offsets += [0] * spare
        for chunk in tokens.prefills:
            blocks += [chunk.table[position // size] for position in range(chunk.start, chunk.stop)]
            offsets += [position % size for position in range(chunk.start, chunk.stop)]
        return blocks + [sink] * tokens.padding, offsets + [0] * tokens.padding

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_tokens)

    def _tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """Tokens ``[start, stop)`` of the step. ``gather`` and ``mask`` are None for the first chunk of
    a prompt, which has no past."""

    start: int
    stop: int
    gather: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _GatherLayout:
    """``store`` ``(tokens · kv_heads,)`` and ``gather`` ``(rows · kv_heads · blocks,)`` int64;
    ``masks`` of each column ``(rows, 1, 1, window)`` float32: 0, or -inf for masked positions."""

    store: torch.Tensor
    rows: int
    columns: int
    gather: torch.Tensor
    masks: tuple[torch.Tensor, ...]
    prefills: tuple[_PrefillChunk, ...]


class GatherCache(PagedCache[_GatherLayout]):
    """A block is ``(kv_heads, block_tokens, head_dim)``, so that few large parts are copied."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        super().__init__(shape, device, (shape.kv_heads, shape.block_tokens, shape.head_dim))
        self._heads = torch.arange(shape.kv_heads, device=device)

    def lay_out(self, tokens: ForwardTokens) -> _GatherLayout:
        rows, columns = tokens.rows, tokens.columns
        count = max((self._blocks_of(row.stop) for row in rows), default=0)
        tables = [[*row.table[:count], *[ZERO_BLOCK] * (count - len(row.table))] for row in rows]
        positions = [
            [*range(row.start, row.stop), *[row.start] * (columns - len(row.ids))] for row in rows
        ]
        window = torch.arange(count * self.shape.block_tokens, device=self.device)
        chunks: list[_PrefillChunk] = []
        start = len(rows) * columns
        for prefill in tokens.prefills:
            stop = start + len(prefill.ids)
            chunks.append(self._lay_out_prefill(prefill, start, stop))
            start = stop
        masks: tuple[torch.Tensor, ...] = ()
        if rows:
            until = self._tensor(positions)[:, :, None, None, None]
            masks = torch.zeros(()).where(window <= until, -torch.inf).unbind(1)
        block, offset = self._tensor(self._locate(tokens))
        head = block[:, None] * self.shape.kv_heads + self._heads
        store = head * self.shape.block_tokens + offset[:, None]
        return _GatherLayout(
            store.flatten(), len(rows), columns, self._index(tables), masks, tuple(chunks)
        )

    def _lay_out_prefill(self, prefill: SequenceInput, start: int, stop: int) -> _PrefillChunk:
        if prefill.start == 0:
            return _PrefillChunk(start, stop, None, None)
        table = prefill.table[: self._blocks_of(prefill.stop)]
        window = torch.arange(len(table) * self.shape.block_tokens, device=self.device)
        mask = window[None] <= window[prefill.start : prefill.stop, None]
        return _PrefillChunk(start, stop, self._index([table]), mask)

    def _attend(
        self,
        layout: _GatherLayout,
        stored: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        for target, source in zip(stored, new, strict=True):
            flat = target.view(-1, self.shape.head_dim)
            flat.index_copy_(0, layout.store, source[0].transpose(0, 1).reshape(-1, flat.shape[1]))
        _, heads, tokens, head_dim = query.shape
        rows, columns = layout.rows, layout.columns
        past = None
        if rows:
            past = self._gather(stored, layout.gather, rows)
        if columns == 1 and not layout.prefills:
            assert past is not None
            decoded = _attend_by_row(
                query[0, :, :rows].transpose(0, 1), *past, layout.masks[0], scaling
            )
            return F.pad(decoded, (0, 0, 0, 0, 0, tokens - rows))[None]
        attended = query.new_zeros(1, tokens, heads, head_dim)
        if past is not None:
            end = rows * columns
            for column, mask in enumerate(layout.masks):
                attended[0, column:end:columns] = _attend_by_row(
                    query[0, :, column:end:columns].transpose(0, 1), *past, mask, scaling
                )
        for chunk in layout.prefills:
            tokens_of = slice(chunk.start, chunk.stop)
            if chunk.gather is None:
                key, value = (part[:, :, tokens_of].contiguous() for part in new)
            else:
                key, value = self._gather(stored, chunk.gather, 1)
            attended[:, tokens_of] = F.scaled_dot_product_attention(
                query[:, :, tokens_of].contiguous(),
                key,
                value,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=scaling,
                enable_gqa=True,
            ).transpose(1, 2)
        return attended

    def _index(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the position of each row's past, per head, so that it is copied only once."""
        table = self._tensor(tables)
        if not tables:
            return table
        return (table[:, None] * self.shape.kv_heads + self._heads[:, None]).flatten()

    def _gather(
        self, stored: tuple[torch.Tensor, torch.Tensor], index: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each ``(rows, kv_heads, window, head_dim)``."""
        shape = self.shape
        key, value = (
            part.view(-1, shape.block_tokens * shape.head_dim)
            .index_select(0, index)
            .view(rows, shape.kv_heads, -1, shape.head_dim)
            for part in stored
        )
        return key, value


def _attend_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of one token per row to that row's past, with the same bits in any row.

    ``query`` and the result are ``(rows, heads, head_dim)``. Computed in float32, because products
    of shorter types are occasionally summed in a different order if a row is not aligned.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim).float()
    scores = torch.matmul(grouped, keys.float().transpose(-1, -2))
    scores = torch.add(mask, scores, alpha=head_dim**-0.5 if scaling is None else scaling)
    attended = torch.matmul(torch.softmax(scores, dim=-1), values.float())
    return attended.view(rows, heads, head_dim).to(query.dtype)


def attention_modules(model: Any) -> list[Any]:
    """Return the attention layers of a model, found by attributes common to all families."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]


def attach(model: Any, cache: PagedCache[Any]) -> None:
    """Make a model's attention layers use ``cache``."""
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
    cache: PagedCache[Any] = module.tollgate_cache
    return cache.attend(module.layer_idx, query, key, value, scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the cache creates its own."""
