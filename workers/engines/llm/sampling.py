"""Chooses the next token of one sequence from its logits, by its own parameters and generator.

Every sequence draws from a generator of its own, on the CPU, so the same seed gives the same answer
whatever else is running. The order is that of vLLM: bias and penalties, temperature, then the cuts.
Log-probabilities are the model's own, before all of these.

A token is drawn by adding noise to every logit and taking the highest (Gumbel, 1954), the noise of
each place in the answer drawn once and in order. So a draft model that guesses ahead with the same
noise guesses alike, and what is guessed never changes what is chosen: a guess counts only if it is
the token that would have been chosen anyhow. Speculation is exact with every seed, not only in the
mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.contract.jobs import ChatInput
from workers.engines.llm.grammar import Constraint

GREEDY_BELOW: Final = 1e-5
"""A lower temperature would only overflow; the likeliest token is all that is left of it."""

HEAD: Final = 1024
"""Top-p is nearly always reached within so many tokens; to sort them all takes far longer."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token; with its log-probability and the likeliest ones if those were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ends: bool = False
    """Whether the grammar allows nothing more."""


class Sampler:
    """The sampling state of one sequence."""

    def __init__(
        self,
        chat: ChatInput,
        *,
        prompt: Sequence[int],
        vocabulary: int,
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._chat = chat
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._noise: deque[torch.Tensor] = deque()
        """Of the places to come, the next first."""
        # 63 bits, as many as a generator takes of either sign.
        self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        self._bias: torch.Tensor | None = None
        if chat.logit_bias:
            self._bias = torch.zeros(vocabulary)
            self._bias[list(chat.logit_bias)] = torch.tensor(list(chat.logit_bias.values()))
        self._said: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        if chat.frequency_penalty or chat.presence_penalty:
            self._said = torch.zeros(vocabulary)
        if chat.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[list(prompt)] = True

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        state = (self._bias, self._said, self._seen, self._constraint)
        return self._greedy and not self._chat.logprobs and state == (None,) * len(state)

    @property
    def _greedy(self) -> bool:
        return self._chat.temperature < GREEDY_BELOW

    def choose(self, logits: torch.Tensor) -> SampledToken:
        """Choose from logits ``(vocabulary,)`` float32, cpu, which are left as they are.

        Raise ``FloatingPointError`` if they, or what the parameters make of them, are no numbers,
        and ``GrammarError`` if the answer cannot be kept to its grammar.
        """
        token = self._draw(self._adjust(logits))
        ends = False
        if self._constraint is not None:
            self._constraint.accept(token)
            ends = self._constraint.ended
        if self._said is not None:
            self._said[token] += 1
        if self._seen is not None:
            self._seen[token] = True
        if not self._chat.logprobs:
            return SampledToken(token, ends=ends)
        logprobs = torch.log_softmax(logits, dim=-1)
        likeliest = torch.topk(logprobs, min(self._chat.top_logprobs, len(logprobs)))
        top = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        return SampledToken(token, float(logprobs[token]), tuple(top), ends)

    def _adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply bias and penalties; the repetition penalty also counts what the prompt said."""
        chat = self._chat
        if self._bias is not None:
            logits = logits + self._bias
        if self._seen is not None:
            scale = chat.repetition_penalty
            scaled = torch.where(logits > 0, logits / scale, logits * scale)
            logits = torch.where(self._seen, scaled, logits)
        if self._said is not None:
            penalty = chat.frequency_penalty * self._said
            logits = logits - penalty - chat.presence_penalty * (self._said > 0)
        if self._constraint is not None:
            # What is no number must stay so, to be noticed.
            broken = not bool(logits.sum().isfinite())
            if not broken:
                logits = logits.masked_fill(~self._constraint.allowed(), -torch.inf)
        return logits

    def guess(self, logits: torch.Tensor, ahead: int) -> int:
        """Say what would be chosen ``ahead`` places after the next if these were the logits there.

        Changes no choice. Penalties and constraints are left out.
        """
        if self._greedy:
            return int(logits.argmax())
        return int(self._scores(logits, self._noise_at(ahead)).argmax())

    def _draw(self, logits: torch.Tensor) -> int:
        if not self._greedy:
            noise = self._noise_at(0)
            self._noise.popleft()
            logits = self._scores(logits, noise)
        highest, token = logits.max(dim=-1)
        if not highest.isfinite():
            raise FloatingPointError("there is no likeliest token")
        return int(token)

    def _scores(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self._cut(logits / self._chat.temperature) - noise

    def _noise_at(self, ahead: int) -> torch.Tensor:
        while len(self._noise) <= ahead:
            drawn = torch.empty(self._vocabulary).exponential_(generator=self._generator)
            self._noise.append(drawn.clamp_min_(1e-30).log_())
        return self._noise[ahead]

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Rule out what is beyond top-k, below min-p or outside top-p; never the likeliest."""
        chat = self._chat
        if 0 < chat.top_k < len(logits):
            bound = torch.topk(logits, chat.top_k).values[-1]
            logits = logits.masked_fill(logits < bound, -torch.inf)
        if chat.min_p > 0:
            weights = torch.softmax(logits, dim=-1)
            logits = logits.masked_fill(weights < chat.min_p * weights.max(), -torch.inf)
        if chat.top_p < 1:
            logits = _nucleus(logits, chat.top_p)
        return logits


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest likeliest tokens that together reach ``top_p``."""
    weights = torch.softmax(logits, dim=-1)
    ordered, order = torch.topk(weights, min(HEAD, len(weights)))
    if float(ordered.sum()) < top_p:
        ordered, order = torch.sort(weights, descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    beyond[0] = False
    kept = order[~beyond]
    return torch.full_like(logits, -torch.inf).index_copy_(0, kept, logits[kept])
