"""Samples the next token of a sequence from its logits, by its own parameters and generator.

Each sequence has a separate generator, on the CPU, so the same seed gives the same answer whatever
else is running. The order is that of vLLM: bias and penalties, temperature, then top-k, min-p and
top-p. Log probabilities are those of the model, before all of these.

A token is sampled by adding noise to every logit and taking the highest (Gumbel, 1954). The noise
of each position is drawn once and in order, so a draft model that proposes tokens with the same
noise tends to agree. A draft token is accepted only if it is the token that would have been sampled
anyway: speculation is exact for every seed, not only in distribution.
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
"""Temperature below which sampling is greedy; dividing by it could overflow."""

HEAD: Final = 1024
"""Number of likeliest tokens in which top-p is searched first; sorting all takes far longer."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, with its log probability and the likeliest tokens if the request wants them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ends: bool = False
    """Whether the grammar allows no further token."""


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
        """Noise of the positions to come, the next one first."""
        # A generator accepts 63 bits of either sign.
        self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        self._bias: torch.Tensor | None = None
        if chat.logit_bias:
            self._bias = torch.zeros(vocabulary)
            self._bias[list(chat.logit_bias)] = torch.tensor(list(chat.logit_bias.values()))
        self._counts: torch.Tensor | None = None
        """Occurrences of each token in the answer."""
        self._seen: torch.Tensor | None = None
        """Whether each token occurs in prompt or answer."""
        if chat.frequency_penalty or chat.presence_penalty:
            self._counts = torch.zeros(vocabulary)
        if chat.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[list(prompt)] = True

    @property
    def is_plain(self) -> bool:
        """Whether sampling is just the argmax of the logits."""
        state = (self._bias, self._counts, self._seen, self._constraint)
        return self._greedy and not self._chat.logprobs and state == (None,) * len(state)

    @property
    def _greedy(self) -> bool:
        return self._chat.temperature < GREEDY_BELOW

    def sample(self, logits: torch.Tensor) -> SampledToken:
        """Sample from logits ``(vocabulary,)`` float32, cpu, which are not modified.

        Raise ``FloatingPointError`` if they are not finite, before or after the parameters are
        applied, and ``GrammarError`` if the grammar cannot be followed.
        """
        token = self._pick(self._adjust(logits))
        ends = False
        if self._constraint is not None:
            self._constraint.accept(token)
            ends = self._constraint.ended
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True
        if not self._chat.logprobs:
            return SampledToken(token, ends=ends)
        logprobs = torch.log_softmax(logits, dim=-1)
        likeliest = torch.topk(logprobs, min(self._chat.top_logprobs, len(logprobs)))
        top = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        return SampledToken(token, float(logprobs[token]), tuple(top), ends)

    def _adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply bias and penalties; the repetition penalty includes the prompt's tokens."""
        chat = self._chat
        if self._bias is not None:
            logits = logits + self._bias
        if self._seen is not None:
            scale = chat.repetition_penalty
            scaled = torch.where(logits > 0, logits / scale, logits * scale)
            logits = torch.where(self._seen, scaled, logits)
        if self._counts is not None:
            penalty = chat.frequency_penalty * self._counts
            logits = logits - penalty - chat.presence_penalty * (self._counts > 0)
        # The mask could hide NaN or infinity, which must fail the request.
        if self._constraint is not None and bool(logits.sum().isfinite()):
            logits = logits.masked_fill(~self._constraint.allowed(), -torch.inf)
        return logits

    def propose(self, logits: torch.Tensor, offset: int) -> int:
        """Return the token that these logits would yield ``offset`` positions after the next one.

        Does not affect later samples. Ignores penalties and constraints.
        """
        if self._greedy:
            return int(logits.argmax())
        return int(self._scores(logits, self._noise_at(offset)).argmax())

    def _pick(self, logits: torch.Tensor) -> int:
        if not self._greedy:
            noise = self._noise_at(0)
            self._noise.popleft()
            logits = self._scores(logits, noise)
        highest, token = logits.max(dim=-1)
        if not highest.isfinite():
            raise FloatingPointError("the logits are not finite")
        return int(token)

    def _scores(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self._truncate(logits / self._chat.temperature) - noise

    def _noise_at(self, offset: int) -> torch.Tensor:
        while len(self._noise) <= offset:
            noise = torch.empty(self._vocabulary).exponential_(generator=self._generator)
            self._noise.append(noise.clamp_min_(1e-30).log_())
        return self._noise[offset]

    def _truncate(self, logits: torch.Tensor) -> torch.Tensor:
        """Exclude tokens by top-k, min-p and top-p, but never the likeliest."""
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
    """Keep the smallest set of likeliest tokens whose probabilities reach ``top_p``."""
    weights = torch.softmax(logits, dim=-1)
    ordered, order = torch.topk(weights, min(HEAD, len(weights)))
    if float(ordered.sum()) < top_p:
        ordered, order = torch.sort(weights, descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    beyond[0] = False
    kept = order[~beyond]
    return torch.full_like(logits, -torch.inf).index_copy_(0, kept, logits[kept])
