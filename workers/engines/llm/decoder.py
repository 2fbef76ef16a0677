"""Runs a model over its paged cache: what is written and what is read, in one forward if it may be.

What a forward needs is staged on the device first, so that the transfer can be timed apart. Whether
all tokens of a step can go through the matrix products together without an answer depending on
who else is there is measured on the device itself when a model is loaded (``is_invariant``): there
the products give each row the same bits however many rows there are, and a step is one forward.
Where they do not, what is written goes in one forward that always has the same shape, and every
piece of a prompt in one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from workers.engines.llm.cache import Cache, Layout, SequenceInput, attach
from workers.engines.llm.graphs import Graph, Recorder, StaticInputs, make_graph

ROWS: Final = 4
"""A forward has a multiple of so many tokens: with fewer, products take another way."""
_PROBED: Final = (1, 7, 16, 33, 96)
"""Tokens of others beside which a prompt is read to see whether that changes it."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One run of the model: ids and positions ``(1, tokens)``, all int64; ``kept`` are the places
    whose logits are wanted, the first ``wanted`` of them, for the last product is one like any."""

    ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    wanted: int
    layout: Layout
    steady: bool = False
    """Whether every such forward has the same shape, so that it may be recorded."""


class Decoder:
    """A model over its cache. ``width`` is the most tokens of one sequence that are written."""

    def __init__(
        self,
        model: Any,
        cache: Cache,
        device: torch.device,
        *,
        rows: int,
        width: int = 1,
        together: bool | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``together``: whether a step may be one forward; without it that is found out.
        ``recorder`` records what is written, where it always has the same shape."""
        self._model = model
        self._cache = cache
        self._device = device
        self._rows = rows
        self._width = width
        self._recorder = recorder
        self._graph: Graph | None = None
        attach(model, cache)
        self.together = True if together is None else together
        if together is None:
            self.together = self._is_invariant()

    def stage(
        self, writing: Sequence[SequenceInput], reading: Sequence[SequenceInput]
    ) -> list[Forward]:
        """Bring a step to the device."""
        if not writing and not reading:
            return []
        if self.together:
            columns = max((len(feed.ids) for feed in writing), default=0)
            tokens = len(writing) * columns + sum(len(feed.ids) for feed in reading)
            return [self._stage(writing, columns, reading, -tokens % ROWS)]
        idle = SequenceInput([], 0, [self._cache.shape.sink], 0)
        forwards = []
        if writing:
            rows = [*writing, *[idle] * (self._rows - len(writing))]
            padding = -len(rows) * self._width % ROWS
            forwards.append(self._stage(rows, self._width, [], padding, steady=True))
        forwards += [self._stage([], 0, [piece], 0) for piece in reading]
        return forwards

    def run(self, forwards: Sequence[Forward]) -> torch.Tensor:
        """Return the logits ``(kept, vocabulary)`` on the device, in the order of the feeds."""
        logits = [self._forward(forward) for forward in forwards]
        if not logits:
            return torch.empty(0, 0)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._cache.zero_blocks(blocks)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._cache.copy(pairs)

    def wait(self) -> None:
        """Wait for the device, so that whoever times a phase times its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _stage(
        self,
        rows: Sequence[SequenceInput],
        columns: int,
        pieces: Sequence[SequenceInput],
        padding: int,
        *,
        steady: bool = False,
    ) -> Forward:
        ids: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        for row in rows:
            end = len(ids) + len(row.ids)
            kept += range(end - row.kept, end)
            spare = columns - len(row.ids)
            ids += [*row.ids, *[0] * spare]
            positions += [*range(row.start, row.stop), *[row.start] * spare]
        for piece in pieces:
            end = len(ids) + len(piece.ids)
            kept += range(end - piece.kept, end)
            ids += piece.ids
            positions += range(piece.start, piece.stop)
        ids += [0] * padding
        positions += [0] * padding
        return Forward(
            self._tensor(ids)[None],
            self._tensor(positions)[None],
            self._tensor(kept + [0] * (-len(kept) % ROWS)),
            len(kept),
            self._cache.lay_out(rows, columns, pieces, padding, steady=steady),
            steady,
        )

    def _forward(self, forward: Forward) -> torch.Tensor:
        if forward.steady and self._recorder is not None:
            return self._replayed(forward)
        self._cache.begin(forward.layout)
        out = self._model(
            input_ids=forward.ids,
            position_ids=forward.positions,
            use_cache=False,
            logits_to_keep=forward.kept,
        )
        logits: torch.Tensor = out.logits[0, : forward.wanted].float()
        return logits

    def _replayed(self, forward: Forward) -> torch.Tensor:
        """All logits of a step of constant shape, of which the wanted are picked."""
        steady = StaticInputs(forward.ids, forward.positions, forward.layout)
        if self._graph is None and self._recorder is not None:
            self._graph = make_graph(self._run_steady, steady, self._recorder)
            if self._graph is None:
                self._recorder = None
        logits = self._run_steady(steady) if self._graph is None else self._graph(steady)
        return logits[forward.kept[: forward.wanted]].float()

    def _run_steady(self, steady: StaticInputs) -> torch.Tensor:
        self._cache.begin(steady.layout)
        out = self._model(
            input_ids=steady.ids, position_ids=steady.positions, use_cache=False, logits_to_keep=0
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    # --- Does it matter who else is there? --------------------------------------------------------

    def _is_invariant(self) -> bool:
        """Whether others in the same forward leave an answer as it is, to the last bit."""
        if self._device.type != "cpu" or self._cache.shape.blocks < 2:
            return False
        with torch.inference_mode():
            first, *others = self._probe()
            same = all(torch.equal(first, other) for other in others)
        self._cache.zero_blocks([1, 2])
        return same

    def _probe(self) -> Iterator[torch.Tensor]:
        """Read and write the same beside ever more of something else."""
        size = self._cache.shape.block_tokens
        ids = [(7 * place) % 97 for place in range(min(21, size - 2))]
        for beside in _PROBED:
            self._cache.zero_blocks([1, 2])
            others = [SequenceInput(list(range(min(beside, size))), 0, [2], 1)]
            while (left := beside - sum(len(feed.ids) for feed in others)) > 0:
                others.append(
                    SequenceInput(list(range(min(left, size))), 0, [self._cache.shape.sink], 0)
                )
            read = self.run(self.stage([], [SequenceInput(ids, 0, [1]), *others]))
            row = SequenceInput([5], len(ids), [1])
            more = [SequenceInput([9], min(beside, size - 1), [2])] * (beside % 3)
            written = self.run(self.stage([row, *more], others[1:]))
            yield torch.cat([read[:1], written[:1]])
