"""Speculative decoding: proposes draft tokens by prompt lookup or with a smaller model.

A rejected draft token costs time and never changes an answer: ``sampling`` accepts only those that
it would have sampled anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import torch

from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.scheduling.scheduler import DecodeChunk, TokenSequence

NGRAM_LENGTHS: Final = (3, 2)
"""Lengths of the n-grams to match, the longest first."""

TokenAt: TypeAlias = Callable[[TokenSequence, int], int]
"""Returns the token at a position of a sequence."""
Propose: TypeAlias = Callable[[Sequence[TokenSequence], torch.Tensor, int], Sequence[int]]
"""Returns the token that each sequence would sample from its row of the logits, ``offset``
positions after its next one."""


class PromptLookup:
    """The tokens of one sequence, indexed by n-gram. Pure.

    If the latest n-gram occurred before (in a quotation, a list or code, say), the tokens that
    followed it then are likely to follow now.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._positions: dict[tuple[int, ...], int] = {}
        """Position after the last occurrence of each n-gram, the current end excluded."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        for length in NGRAM_LENGTHS:
            if len(self._tokens) >= length:
                self._positions[tuple(self._tokens[-length:])] = len(self._tokens)
        self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """Return up to ``count`` tokens; none if the latest n-grams have not occurred before."""
        for length in NGRAM_LENGTHS:
            position = self._positions.get(tuple(self._tokens[-length:]))
            if position is not None:
                return self._tokens[position : position + count]
        return []


class DraftModel:
    """A smaller model with its own KV cache, which has the same blocks as that of the main model.

    A block of a sequence holds the same tokens in both caches, so one block table, one prefix cache
    and one pool serve both. Only the number of tokens computed for each sequence is kept here.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._computed: WeakKeyDictionary[TokenSequence, int] = WeakKeyDictionary()

    def propose(
        self,
        decodes: Sequence[DecodeChunk],
        prefills: Sequence[SequenceInput],
        token_at: TokenAt,
        propose: Propose,
    ) -> Mapping[TokenSequence, list[int]]:
        """Compute the step's known tokens, then the draft tokens that each chunk has room for."""
        drafts: dict[TokenSequence, list[int]] = {decode.sequence: [] for decode in decodes}
        counts = {
            decode.sequence: max(0, decode.stop - decode.sequence.length) for decode in decodes
        }
        inputs = []
        for decode in decodes:
            sequence = decode.sequence
            start = min(self._computed.get(sequence, sequence.computed), sequence.computed)
            stop = min(decode.stop, sequence.length)
            ids = [token_at(sequence, position) for position in range(start, stop)]
            inputs.append(SequenceInput(ids, start, sequence.blocks, int(counts[sequence] > 0)))
            self._computed[sequence] = stop
        drafting = [decode.sequence for decode in decodes if counts[decode.sequence]]
        logits = self._run(inputs, prefills)
        offset = 0
        while drafting:
            for sequence, token in zip(drafting, propose(drafting, logits, offset), strict=True):
                drafts[sequence].append(token)
            offset += 1
            drafting = [sequence for sequence in drafting if counts[sequence] > offset]
            if drafting:
                inputs = []
                for sequence in drafting:
                    position = sequence.length + offset - 1
                    inputs.append(SequenceInput(drafts[sequence][-1:], position, sequence.blocks))
                    self._computed[sequence] = position + 1
                logits = self._run(inputs, ())
        return drafts

    def reject(self, sequence: TokenSequence) -> None:
        """Discard the draft tokens after the known ones."""
        if sequence in self._computed:
            self._computed[sequence] = min(self._computed[sequence], sequence.length - 1)

    def _run(
        self, decodes: Sequence[SequenceInput], prefills: Sequence[SequenceInput]
    ) -> torch.Tensor:
        return self.decoder.run(self.decoder.stage(decodes, prefills))
