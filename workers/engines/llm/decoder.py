"""Runs a model over its paged cache: decode and prefill in one forward where results allow it.

The inputs of a forward are staged on the device first, so that the transfer can be timed apart.
Whether a whole step can be one forward without an answer depending on the other requests in it is
measured on the device when the model is loaded (``_find_multiple``): if matrix products give each
row the same bits for any multiple of a few rows, it can. Otherwise decode is one forward that
always has the same shape, and each prefill chunk is a separate forward.

If answers may depend on others and decoding can be recorded (``graphs``), decode is a forward of
one of few shapes, by the number of rows, and all prefill chunks are another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from workers.engines.devices import stage
from workers.engines.llm.cache import ForwardTokens, PagedCache, SequenceInput
from workers.engines.llm.fused import Features, PagedModel
from workers.engines.llm.graphs import Graph, Recorder, StaticInputs, make_graph
from workers.engines.llm.vision.pictures import PictureInput

_MULTIPLES: Final = (4, 8, 16)
"""Multiples to which the tokens of a forward may be padded: fewer rows use other product kernels.
How many are enough depends on the processor."""
_GRAPH_ROWS: Final = 4
"""Rows of the smallest decode forward that is recorded."""
_PROBED: Final = (1, 7, 16, 33, 96)
"""Numbers of other tokens beside which a prompt is prefilled, to see whether its logits change."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One run of the model: ids ``(1, tokens)`` and positions ``(1, tokens)``, or ``(3, tokens)``
    on three axes, all int64.

    Logits are computed for the indices ``logits_at``, padded like any other product; the first
    ``logits_kept`` of them are returned.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    logits_at: torch.Tensor
    logits_kept: int
    layout: Any
    static: bool = False
    """Whether every such forward has the same shape, so that it can be recorded."""
    features: Features | None = None
    """Embeddings of pictures, in place of those of their tokens."""


class Decoder:
    """A model over its cache. ``decode_tokens_max``: maximum tokens of a decoding sequence in a
    step."""

    def __init__(
        self,
        model: PagedModel,
        cache: PagedCache[Any],
        device: torch.device,
        *,
        rows: int,
        decode_tokens_max: int = 1,
        one_forward: bool | None = None,
        recorder: Recorder | None = None,
        pad_experts: Callable[[int], None] = lambda multiple: None,
    ) -> None:
        """``one_forward``: whether a step can be one forward; if None, it is measured.
        ``recorder`` records the decode forwards of constant shape. ``pad_experts`` sets the
        multiple to which the rows of each expert are padded."""
        self._model = model
        self._cache = cache
        self._device = device
        self._rows = rows
        self._decode_tokens_max = decode_tokens_max
        self._recorder = recorder
        self._graphs: dict[int, Graph] = {}
        """By the number of tokens."""
        self._pad_experts = pad_experts
        self._multiple = _MULTIPLES[0]
        self.one_forward = True if one_forward is None else one_forward
        if one_forward is None:
            self.one_forward = self._find_multiple()

    @property
    def cache_bytes(self) -> int:
        return self._cache.shape.bytes

    def stage(
        self, decodes: Sequence[SequenceInput], prefills: Sequence[SequenceInput]
    ) -> list[Forward]:
        """Copy the inputs of a step to the device."""
        if not decodes and not prefills:
            return []
        if self.one_forward and self._recorder is None:
            columns = max((len(decode.ids) for decode in decodes), default=0)
            tokens = len(decodes) * columns + sum(len(prefill.ids) for prefill in prefills)
            return [
                self._stage(ForwardTokens(decodes, columns, prefills, -tokens % self._multiple))
            ]
        idle = SequenceInput([], 0, [self._cache.shape.sink], 0)
        forwards = []
        if decodes:
            rows = [*decodes, *[idle] * (self._row_count(len(decodes)) - len(decodes))]
            columns = self._decode_tokens_max
            padding = -len(rows) * columns % self._multiple
            forwards.append(self._stage(ForwardTokens(rows, columns, (), padding, static=True)))
        if self.one_forward and prefills:
            padding = -sum(len(prefill.ids) for prefill in prefills) % self._multiple
            forwards.append(self._stage(ForwardTokens(prefills=prefills, padding=padding)))
        elif prefills:
            forwards += [self._stage(ForwardTokens(prefills=[prefill])) for prefill in prefills]
        return forwards

    def fill(
        self,
        forwards: Sequence[Forward],
        places: Sequence[tuple[int, int]],
        tokens: torch.Tensor,
    ) -> None:
        """Set the only token of decodes: each is ``(its row, its place among the tokens)``.

        On the device, so that the tokens need not be known here.
        """
        rows, sources = stage(places, self._device, torch.long).unbind(1)
        forwards[0].ids[0].index_copy_(0, rows, tokens[sources])

    @property
    def records(self) -> bool:
        """Whether decode forwards are recorded."""
        return self._recorder is not None

    @property
    def row_counts(self) -> list[int]:
        """The numbers of rows of decode forwards of constant shape."""
        if not self.one_forward:
            return [self._rows]
        counts = [min(_GRAPH_ROWS, self._rows)]
        while counts[-1] < self._rows:
            counts.append(min(2 * counts[-1], self._rows))
        return counts

    def _row_count(self, decodes: int) -> int:
        return next(count for count in self.row_counts if count >= decodes)

    def run(self, forwards: Sequence[Forward]) -> torch.Tensor:
        """Return the logits ``(kept, vocabulary)`` on the device, in the order of the inputs."""
        logits = [self._forward(forward) for forward in forwards]
        if not logits:
            return torch.empty(0, 0)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._cache.zero_blocks(blocks)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._cache.copy_blocks(pairs)

    def wait(self) -> None:
        """Synchronize with the device, so that a timed phase includes its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _stage(self, tokens: ForwardTokens) -> Forward:
        ids: list[int] = []
        positions: list[int] = []
        logits_at: list[int] = []
        for row in tokens.rows:
            end = len(ids) + len(row.ids)
            logits_at += range(end - row.logits_kept, end)
            spare = tokens.columns - len(row.ids)
            ids += [*row.ids, *[0] * spare]
            start = row.start + row.shift
            positions += [*range(start, row.stop + row.shift), *[start] * spare]
        pictured: list[tuple[int, PictureInput]] = []
        for prefill in tokens.prefills:
            end = len(ids) + len(prefill.ids)
            logits_at += range(end - prefill.logits_kept, end)
            if prefill.pictures is not None:
                pictured.append((len(ids), prefill.pictures))
            ids += prefill.ids
            positions += range(prefill.start, prefill.stop)
        ids += [0] * tokens.padding
        positions += [0] * tokens.padding
        return Forward(
            self._tensor(ids)[None],
            self._place(positions, pictured),
            self._tensor(logits_at + [0] * (-len(logits_at) % self._multiple)),
            len(logits_at),
            self._cache.lay_out(tokens),
            tokens.static,
            self._collect(pictured),
        )

    def _place(
        self, positions: Sequence[int], pictured: Sequence[tuple[int, PictureInput]]
    ) -> torch.Tensor:
        """Return positions; on three axes if some are those of a prompt with pictures."""
        if not pictured:
            return self._tensor(positions)[None]
        axes = torch.tensor(positions).repeat(3, 1)
        for start, part in pictured:
            axes[:, start : start + part.positions.shape[1]] = part.positions
        return axes.to(self._device)

    def _collect(self, pictured: Sequence[tuple[int, PictureInput]]) -> Features | None:
        places = [start + place for start, part in pictured for place in part.places]
        if not places:
            return None
        return self._tensor(places), torch.cat(
            [one for _, part in pictured for one in part.features]
        )

    def _forward(self, forward: Forward) -> torch.Tensor:
        if forward.static and self._recorder is not None:
            return self._replay(forward)
        self._cache.begin(forward.layout)
        logits = self._model(forward.ids, forward.positions, forward.logits_at, forward.features)
        return logits[: forward.logits_kept].float()

    def _replay(self, forward: Forward) -> torch.Tensor:
        """Compute all logits of a step of constant shape, then select those that are kept."""
        inputs = StaticInputs(forward.ids, forward.positions, forward.layout)
        tokens = forward.ids.shape[1]
        if tokens not in self._graphs and self._recorder is not None:
            graph = make_graph(self._run_static, inputs, self._recorder)
            if graph is None:
                self._recorder = None
                self._graphs.clear()
            else:
                self._graphs[tokens] = graph
        graph = self._graphs.get(tokens)
        logits = self._run_static(inputs) if graph is None else graph(inputs)
        return logits[forward.logits_at[: forward.logits_kept]].float()

    def _run_static(self, inputs: StaticInputs) -> torch.Tensor:
        self._cache.begin(inputs.layout)
        return self._model(inputs.ids, inputs.positions, None, None)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return stage(values, self._device, torch.long)

    # --- Batch invariance -------------------------------------------------------------------------

    def _find_multiple(self) -> bool:
        """Choose the smallest multiple with which other tokens in the same forward leave logits
        unchanged, to the last bit. Return whether there is one."""
        if self._device.type != "cpu" or self._cache.shape.blocks < 2:
            return False
        is_found = False
        for multiple in _MULTIPLES:
            self._pad(multiple)
            with torch.inference_mode():
                first, *others = self._probe()
            if is_found := all(torch.equal(first, other) for other in others):
                break
        if not is_found:
            self._pad(_MULTIPLES[0])
        self._cache.zero_blocks([1, 2])
        return is_found

    def _pad(self, multiple: int) -> None:
        self._multiple = multiple
        self._pad_experts(multiple)

    def _probe(self) -> Iterator[torch.Tensor]:
        """Prefill and decode the same tokens beside more and more others; yield their logits."""
        size = self._cache.shape.block_tokens
        ids = [(7 * index) % 97 for index in range(min(21, size - 2))]
        for beside in _PROBED:
            self._cache.zero_blocks([1, 2])
            others = [SequenceInput(list(range(min(beside, size))), 0, [2], 1)]
            while (left := beside - sum(len(other.ids) for other in others)) > 0:
                others.append(
                    SequenceInput(list(range(min(left, size))), 0, [self._cache.shape.sink], 0)
                )
            prefilled = self.run(self.stage([], [SequenceInput(ids, 0, [1]), *others]))
            row = SequenceInput([5], len(ids), [1])
            more = [SequenceInput([9], min(beside, size - 1), [2])] * (beside % 3)
            decoded = self.run(self.stage([row, *more], others[1:]))
            yield torch.cat([prefilled[:1], decoded[:1]])
