"""Guesses what comes next by a smaller model, which runs over a cache of its own.

Its cache has the same blocks as that of the model that it guesses for: a block of a sequence holds
the same tokens in both. So there is one table, one prefix cache and one account of who may have
what; the smaller model only follows, and remembers how far it has come in each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from workers.engines.llm.cache import SequenceInput
from workers.engines.llm.decoder import Decoder
from workers.engines.llm.scheduler import DecodeChunk, TokenSequence

TokenAt: TypeAlias = Callable[[TokenSequence, int], int]
Guess: TypeAlias = Callable[[TokenSequence, torch.Tensor, int], int]
"""What a chain would choose by these logits, so many places after the next."""


class DraftModel:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._computed: WeakKeyDictionary[TokenSequence, int] = WeakKeyDictionary()

    def guess(
        self,
        turns: Sequence[DecodeChunk],
        pieces: Sequence[SequenceInput],
        token_at: TokenAt,
        choose: Guess,
    ) -> Mapping[TokenSequence, list[int]]:
        """Follow what the step writes and reads, and guess as many tokens as each turn asks for."""
        guesses: dict[TokenSequence, list[int]] = {turn.chain: [] for turn in turns}
        wanted = {turn.chain: max(0, turn.stop - turn.chain.known) for turn in turns}
        feeds = []
        for turn in turns:
            chain = turn.chain
            begin = min(self._computed.get(chain, chain.computed), chain.computed)
            stop = min(turn.stop, chain.known)
            ids = [token_at(chain, position) for position in range(begin, stop)]
            feeds.append(SequenceInput(ids, begin, chain.blocks, int(wanted[chain] > 0)))
            self._computed[chain] = stop
        asking = [turn.chain for turn in turns if wanted[turn.chain]]
        logits = self._run(feeds, pieces)
        place = 0
        while asking:
            for chain, row in zip(asking, logits, strict=True):
                guesses[chain].append(choose(chain, row, place))
            place += 1
            asking = [chain for chain in asking if wanted[chain] > place]
            if asking:
                feeds = []
                for chain in asking:
                    position = chain.known + place - 1
                    feeds.append(SequenceInput(guesses[chain][-1:], position, chain.blocks))
                    self._computed[chain] = position + 1
                logits = self._run(feeds, ())
        return guesses

    def correct(self, chain: TokenSequence) -> None:
        """Forget what was guessed wrongly."""
        if chain in self._computed:
            self._computed[chain] = min(self._computed[chain], chain.known - 1)

    def _run(self, feeds: Sequence[SequenceInput], pieces: Sequence[SequenceInput]) -> torch.Tensor:
        return self.decoder.run(self.decoder.stage(feeds, pieces)).cpu()
