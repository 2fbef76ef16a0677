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
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from workers.engines.devices import stage
from workers.engines.llm.scheduling.blocks import ZERO_BLOCK
from workers.engines.llm.vision.pictures import PictureInput

IMPLEMENTATION: Final = "tollgate_paged"
_BUFFER_MAX: Final = 1 << 24
"""Maximum numbers of the buffer for the past of a step's rows in one layer."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """``blocks`` can be allocated; there are two more, the zero block and the sink."""

    layers: int
    blocks: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    windows: tuple[int | None, ...] = ()
    """Number of latest tokens that each layer attends to, its own included; None for all. Empty if
    all layers attend to all tokens."""
    latent: int | None = None
    """Size of a value if it is the beginning of its key, so that only keys are stored."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def parts(self) -> int:
        return 2 if self.latent is None else 1

    @property
    def token_bytes(self) -> int:
        """Size of the keys and values of one position, in all layers."""
        return self.parts * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def bytes(self) -> int:
        return (self.blocks + 2) * self.block_bytes

    @property
    def sink(self) -> int:
        """The block to which padding is written; its content is never used."""
        return self.blocks + 1


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Tokens ``ids`` of one sequence, from index ``start`` on, stored in the blocks ``table``.

    The forward returns the logits of the last ``logits_kept`` of them.
    """

    ids: Sequence[int]
    start: int
    table: Sequence[int]
    logits_kept: int = 1
    shift: int = 0
    """Position of a token, less its index: pictures take fewer positions than tokens."""
    pictures: PictureInput | None = None
    """Positions and embeddings of a prompt with pictures."""

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
    """Keys and values of all layers in one tensor, so that a block is cleared or copied at once.

    Subclasses choose the order of its dimensions, and the attention that reads it.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._layout: LayoutT | None = None
        self._blocks = self._allocate()

    @abstractmethod
    def _allocate(self) -> torch.Tensor:
        """Allocate the cache. Return it, or a view of it, with the blocks as first dimension."""

    @abstractmethod
    def _free(self) -> None:
        """Drop all references to the cache."""

    def resize(self, blocks: int) -> None:
        """Allocate another number of blocks; what is stored is lost."""
        self.shape = replace(self.shape, blocks=blocks)
        self._free()
        self._blocks = self._allocate()

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zero blocks before they are used again.

        Masks hide old numbers, but not NaN: 0 times NaN is NaN, for the next user too.
        """
        self._blocks.index_fill_(0, self._tensor(blocks), 0)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each ``(source, target)``."""
        sources, targets = self._tensor(pairs).unbind(1)
        self._blocks.index_copy_(0, targets, self._blocks.index_select(0, sources))

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
        return self._attend(self._layout, layer, query, (key, value), scaling)

    @abstractmethod
    def _attend(
        self,
        layout: LayoutT,
        layer: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        """Store the ``new`` keys and values, then attend."""

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
        return stage(values, self.device, dtype)


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """Tokens ``[start, stop)`` of the step. ``gather`` and ``mask`` are None for the first chunk of
    a prompt, which has no past. ``near`` is the mask of layers with a window, by its size."""

    start: int
    stop: int
    gather: torch.Tensor | None
    mask: torch.Tensor | None
    near: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _GatherLayout:
    """``store`` ``(parts · tokens · kv_heads,)`` and ``gather`` ``(parts · rows · kv_heads ·
    blocks,)`` int64; ``masks`` of each column ``(rows, 1, 1, past)`` float32: 0, or -inf for masked
    positions. ``near`` has those of layers with a window, by its size."""

    store: torch.Tensor
    rows: int
    columns: int
    gather: torch.Tensor
    masks: tuple[torch.Tensor, ...]
    near: dict[int, tuple[torch.Tensor, ...]]
    prefills: tuple[_PrefillChunk, ...]


class GatherCache(PagedCache[_GatherLayout]):
    """A block of a layer is ``(parts, kv_heads, block_tokens, head_dim)``: its keys and its values,
    so that one operation copies few large parts."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        super().__init__(shape, device)
        parts = torch.arange(shape.parts * shape.kv_heads, device=device)
        self._parts = parts.view(shape.parts, -1)
        self._windows = {window for window in shape.windows if window is not None}
        self._buffer: torch.Tensor | None = None

    def _allocate(self) -> torch.Tensor:
        shape = self.shape
        block = (shape.parts * shape.kv_heads, shape.block_tokens, shape.head_dim)
        self._layers = torch.zeros(
            shape.layers, shape.blocks + 2, *block, dtype=shape.dtype, device=self.device
        )
        return self._layers.transpose(0, 1)

    def _free(self) -> None:
        del self._blocks, self._layers
        self._buffer = None

    def lay_out(self, tokens: ForwardTokens) -> _GatherLayout:
        rows, columns = tokens.rows, tokens.columns
        count = max((self._blocks_of(row.stop) for row in rows), default=0)
        tables = [[*row.table[:count], *[ZERO_BLOCK] * (count - len(row.table))] for row in rows]
        positions = [
            [*range(row.start, row.stop), *[row.start] * (columns - len(row.ids))] for row in rows
        ]
        past = torch.arange(count * self.shape.block_tokens, device=self.device)
        chunks: list[_PrefillChunk] = []
        start = len(rows) * columns
        for prefill in tokens.prefills:
            stop = start + len(prefill.ids)
            chunks.append(self._lay_out_prefill(prefill, start, stop))
            start = stop
        masks: tuple[torch.Tensor, ...] = ()
        near: dict[int, tuple[torch.Tensor, ...]] = {}
        if rows:
            until = self._tensor(positions)[:, :, None, None, None]
            visible = torch.zeros((), device=self.device)
            masks = visible.where(past <= until, -torch.inf).unbind(1)
            for window in self._windows:
                seen = _is_near(past, until, window)
                near[window] = visible.where(seen, -torch.inf).unbind(1)
        block, offset = self._tensor(self._locate(tokens))
        part = block[:, None] * self._parts.numel() + self._parts[:, None]
        store = part * self.shape.block_tokens + offset[:, None]
        return _GatherLayout(
            *(store.flatten(), len(rows), columns, self._index(tables)),
            *(masks, near, tuple(chunks)),
        )

    def _lay_out_prefill(self, prefill: SequenceInput, start: int, stop: int) -> _PrefillChunk:
        if prefill.start == 0:
            own = torch.arange(len(prefill.ids), device=self.device)
            windows = [window for window in self._windows if window < len(own)]
            near = {window: _is_near(own, own[:, None], window) for window in windows}
            return _PrefillChunk(start, stop, None, None, near)
        table = prefill.table[: self._blocks_of(prefill.stop)]
        past = torch.arange(len(table) * self.shape.block_tokens, device=self.device)
        until = past[prefill.start : prefill.stop, None]
        near = {window: _is_near(past, until, window) for window in self._windows}
        return _PrefillChunk(start, stop, self._index([table]), past <= until, near)

    def _attend(
        self,
        layout: _GatherLayout,
        layer: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        stored = self._layers[layer]
        flat = stored.view(-1, self.shape.head_dim)
        source = torch.stack([part[0].transpose(0, 1) for part in new[: self.shape.parts]])
        flat.index_copy_(0, layout.store, source.view(-1, self.shape.head_dim))
        _, heads, tokens, _ = query.shape
        rows, columns = layout.rows, layout.columns
        window = self.shape.window(layer)
        masks = layout.masks if window is None else layout.near.get(window, ())
        past = None
        if rows:
            past = self._gather(stored, layout.gather, rows)
        if columns == 1 and not layout.prefills:
            assert past is not None
            decoded = _attend_by_row(query[0, :, :rows].transpose(0, 1), *past, masks[0], scaling)
            return F.pad(decoded, (0, 0, 0, 0, 0, tokens - rows))[None]
        attended = query.new_zeros(1, tokens, heads, new[1].shape[-1])
        if past is not None:
            end = rows * columns
            for column, mask in enumerate(masks):
                attended[0, column:end:columns] = _attend_by_row(
                    query[0, :, column:end:columns].transpose(0, 1), *past, mask, scaling
                )
        for chunk in layout.prefills:
            tokens_of = slice(chunk.start, chunk.stop)
            if chunk.gather is None:
                key, value = (part[:, :, tokens_of].contiguous() for part in new)
            else:
                key, value = self._gather(stored, chunk.gather, 1)
            visible = chunk.mask if window is None else chunk.near.get(window, chunk.mask)
            attended[:, tokens_of] = F.scaled_dot_product_attention(
                query[:, :, tokens_of].contiguous(),
                key,
                value,
                attn_mask=visible,
                is_causal=visible is None,
                scale=scaling,
                enable_gqa=True,
            ).transpose(1, 2)
        return attended

    def _index(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the position of each row's past, per head, so that it is copied only once."""
        table = self._tensor(tables)
        if not tables:
            return table
        return (table[:, None] * self._parts.numel() + self._parts[:, None, :, None]).flatten()

    def _gather(
        self, stored: torch.Tensor, index: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each ``(rows, kv_heads, window, head_dim)``. The next call
        overwrites them."""
        shape = self.shape
        taken = self._take(stored.view(-1, shape.block_tokens * shape.head_dim), index)
        parts = taken.view(shape.parts, rows, shape.kv_heads, -1, shape.head_dim)
        return parts[0], parts[-1] if shape.latent is None else parts[0, ..., : shape.latent]

    def _take(self, blocks: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Select blocks into a buffer, which takes half as long as into new memory."""
        count, size = len(index), blocks.shape[1]
        if count * size > _BUFFER_MAX:
            return blocks.index_select(0, index)
        if self._buffer is None or len(self._buffer) < count:
            with torch.inference_mode(False):
                self._buffer = torch.empty(
                    2 * count, size, dtype=blocks.dtype, device=blocks.device
                )
        return torch.index_select(blocks, 0, index, out=self._buffer[:count])


def _is_near(past: torch.Tensor, until: torch.Tensor, window: int) -> torch.Tensor:
    """Return which positions of a ``past`` are the ``window`` latest up to ``until``."""
    return (past <= until) & (past > until - window)


def _attend_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Compute the attention of one token per row to that row's past, with the same bits in any row.

    ``query`` is ``(rows, heads, head_dim)``; the result has the size of values. Computed in
    float32, because products of shorter types are occasionally summed in a different order if a row
    is not aligned.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, head_dim).float()
    scores = torch.matmul(grouped, keys.float().transpose(-1, -2))
    scores = torch.add(mask, scores, alpha=head_dim**-0.5 if scaling is None else scaling)
    attended = torch.matmul(torch.softmax(scores, dim=-1), values.float())
    return attended.view(rows, heads, -1).to(query.dtype)


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
    latents = getattr(module, "tollgate_latents", None)
    if latents is None:
        return cache.attend(module.layer_idx, query, key, value, scaling), None
    projected = latents.project_query(query)
    attended = cache.attend(module.layer_idx, projected, key, value, scaling)
    return latents.project_result(attended), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the cache creates its own."""
