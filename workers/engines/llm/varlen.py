"""The paged cache of a CUDA device: torch's variable-length attention reads the blocks in place.

Not every supported torch has block tables in this attention, so it is detected by its signature.
What its kernels then compute is compared with ``GatherCache`` when a model is loaded; a device on
which it fails or differs uses that cache.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.attention

from workers.engines.llm.cache import (
    CacheShape,
    ForwardTokens,
    GatherCache,
    PagedCache,
    SequenceInput,
)
from workers.engines.llm.scheduling.blocks import ZERO_BLOCK

log = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 256
"""Tokens of a block; the kernels require a multiple of this."""
_PARAMETERS: Final = {"block_table", "seqused_k", "window_size", "enable_gqa", "num_splits"}
_DTYPES: Final = (torch.bfloat16, torch.float16)
_TOLERANCE: Final = 0.05
"""Difference of kernels that is explained by rounding, in numbers of about 1."""
_FA3_MODULE: Final = "flash_attn_interface"

Attention = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _VarlenLayout:
    """``tables`` ``(sequences, blocks)`` int32: a sequence for each row and each prefill chunk."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    past_ends: torch.Tensor
    """Sums of ``used``; the blocks tell the kernels where a past is, but they want its length in
    this form too."""
    used: torch.Tensor
    tables: torch.Tensor
    longest_query: int
    longest_past: int


class VarlenCache(PagedCache[_VarlenLayout]):
    """A block is ``(block_tokens, kv_heads, head_dim)``, as the kernels read it."""

    def __init__(
        self,
        shape: CacheShape,
        device: torch.device,
        attention: Attention,
        longest: int,
        splits: int | None = 1,
    ) -> None:
        """``longest``: maximum length of a sequence, in tokens. ``splits``: parts of a long past
        that the kernel computes at the same time; None lets it choose by what is in the step."""
        super().__init__(shape, device)
        self._longest = longest
        self._attention = attention
        self._splits = splits

    def _allocate(self) -> torch.Tensor:
        shape = self.shape
        pages = (shape.blocks + 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self._layers = torch.zeros(2, shape.layers, *pages, dtype=shape.dtype, device=self.device)
        return self._layers.movedim(2, 0)

    def _free(self) -> None:
        del self._blocks, self._layers

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
            self._tensor([0, *accumulate(used)], torch.int32),
            self._tensor(used, torch.int32),
            self._tensor(tables, torch.int32),
            max(lengths),
            longest,
        )

    def _attend(
        self,
        layout: _VarlenLayout,
        layer: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        stored, window = self._layers[:, layer], self.shape.window(layer)
        for target, source in zip(stored, new, strict=True):
            target[layout.blocks, layout.offsets] = source[0].transpose(0, 1)
        attended: torch.Tensor = self._attention(
            query[0].transpose(0, 1),
            *stored,
            layout.ends,
            layout.past_ends,
            layout.longest_query,
            layout.longest_past,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
            seqused_k=layout.used,
            block_table=layout.tables,
            num_splits=self._splits,
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


def make_cache(
    shape: CacheShape,
    device: torch.device,
    longest: int,
    *,
    heads: int,
    batch_invariant: bool = True,
) -> PagedCache[Any]:
    """``longest``: maximum length of a sequence, in tokens. ``heads``: of the queries.

    Blocks are read in place only if that gives the result of a ``GatherCache`` on this device.
    """
    attention = find_attention(device, shape.dtype)
    if attention is None or shape.latent is not None:  # the kernels support no heads of this size
        return GatherCache(shape, device)
    # One split per row, whatever else is in the step: batch invariance.
    splits = 1 if batch_invariant else None
    for kernel in ("FA3", "FA2"):
        if not _activate(kernel):
            continue
        problem = _problem(shape, device, attention, heads, splits)
        if problem is None:
            log.info("attention reads blocks in place", extra={"kernel": kernel})
            return VarlenCache(shape, device, attention, longest, splits)
        log.warning("%s cannot be used: %s", kernel, problem)
    _activate("FA2")
    return GatherCache(shape, device)


def _activate(kernel: str) -> bool:
    """Make torch use FlashAttention 2, its own, or 3, which is another package for Hopper."""
    implementations: Any = torch.nn.attention
    try:
        if kernel == "FA2":
            if implementations.current_flash_attention_impl() is not None:
                implementations.restore_flash_attention_impl()
            return True
        if importlib.util.find_spec(_FA3_MODULE) is None:
            return False
        implementations.activate_flash_attention_impl(kernel)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        log.warning("%s cannot be activated: %s", kernel, error)
        return kernel == "FA2"
    return True


def _problem(
    shape: CacheShape, device: torch.device, attention: Attention, heads: int, splits: int | None
) -> str | None:
    """Compare the attention over a small cache with that of a ``GatherCache``; None if both agree.

    Errors of a kernel are of any type.
    """
    try:
        with torch.inference_mode():
            # A window that is longer than what is compared would mask nothing.
            longest = shape.block_tokens // 2
            windows = {None if each is None else min(each, longest) for each in shape.windows}
            for window in windows or {None}:
                small = replace(shape, layers=1, blocks=3, windows=(window,))
                cache = VarlenCache(small, device, attention, 2 * small.block_tokens, splits)
                found = _try(cache, heads)
                expected = _try(GatherCache(small, device), heads)
                for one, other in zip(found, expected, strict=True):
                    if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE):
                        return f"its result differs by up to {(one - other).abs().max():.3g}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try(cache: PagedCache[Any], heads: int) -> list[torch.Tensor]:
    """Return the attention of two prompts, of a row beside a chunk and padding, and of two rows."""
    shape = cache.shape
    size = shape.block_tokens
    long, short = (3, 1), (2,)
    steps = [
        ForwardTokens(prefills=[SequenceInput(range(size), 0, long)]),
        ForwardTokens(prefills=[SequenceInput(range(9), 0, short)]),
        ForwardTokens(
            [SequenceInput([0], 9, short)], 1, [SequenceInput(range(7), size, long)], padding=4
        ),
        ForwardTokens(
            [SequenceInput([0], size + 7, long), SequenceInput([0], 10, short)], 1, static=True
        ),
    ]
    generator = torch.Generator().manual_seed(0)
    attended = []
    for step in steps:
        tokens = len(step.rows) * step.columns + sum(len(each.ids) for each in step.prefills)
        query, key, value = (
            torch.randn(1, count, tokens + step.padding, shape.head_dim, generator=generator)
            .to(shape.dtype)
            .to(cache.device)
            for count in (heads, shape.kv_heads, shape.kv_heads)
        )
        cache.begin(cache.lay_out(step))
        attended.append(cache.attend(0, query, key, value, None)[:, :tokens].float())
    return attended
