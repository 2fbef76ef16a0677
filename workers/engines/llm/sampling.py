"""Chooses the next token of one sequence from its logits, by its own parameters and generator.

Every sequence draws from a generator of its own, on the CPU, so the same seed gives the same answer
whatever else is running. The order is that of vLLM: bias and penalties, temperature, then the cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.contract.jobs import ChatInput


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token; with its log-probability and the likeliest ones if those were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of one sequence."""

    def __init__(self, chat: ChatInput, *, prompt: Sequence[int], seed: int) -> None:
        self._chat = chat
        self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        self._said: Counter[int] = Counter()
        self._read = frozenset(prompt) if chat.repetition_penalty != 1.0 else frozenset()

    def choose(self, logits: torch.Tensor) -> Chosen:
        """Choose from ``(vocabulary,)`` logits of any type and device."""
        raw = logits.float().cpu()
        chat = self._chat
        adjusted = self._penalise(raw)
        if chat.temperature == 0:
            token = int(adjusted.argmax())
        else:
            probabilities = torch.softmax(self._cut(adjusted / chat.temperature), dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        self._said[token] += 1
        if not chat.logprobs:
            return Chosen(token)
        logprobs = torch.log_softmax(raw, dim=-1)
        likeliest = torch.topk(logprobs, min(chat.top_logprobs, len(logprobs)))
        top = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        return Chosen(token, float(logprobs[token]), tuple(top))

    def _penalise(self, logits: torch.Tensor) -> torch.Tensor:
        chat = self._chat
        penal = chat.frequency_penalty or chat.presence_penalty or chat.repetition_penalty != 1.0
        if not (penal or chat.logit_bias):
            return logits
        logits = logits.clone()
        for token, bias in chat.logit_bias.items():
            if 0 <= token < len(logits):
                logits[token] += bias
        if chat.repetition_penalty != 1.0 and (seen := sorted(self._read | self._said.keys())):
            index = torch.tensor(seen)
            value = logits[index]
            scale = chat.repetition_penalty
            logits[index] = torch.where(value > 0, value / scale, value * scale)
        for token, count in self._said.items():
            logits[token] -= chat.frequency_penalty * count + chat.presence_penalty
        return logits

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Rule out what is beyond top-k, below min-p or outside top-p; never the likeliest."""
        chat = self._chat
        if 0 < chat.top_k < len(logits):
            bound = torch.topk(logits, chat.top_k).values[-1]
            logits = logits.masked_fill(logits < bound, -torch.inf)
        if chat.min_p > 0:
            probabilities = torch.softmax(logits, dim=-1)
            bound = chat.min_p * probabilities.max()
            logits = logits.masked_fill(probabilities < bound, -torch.inf)
        if chat.top_p < 1:
            ordered, order = torch.sort(logits, descending=True, stable=True)
            probabilities = torch.softmax(ordered, dim=-1)
            beyond = probabilities.cumsum(-1) - probabilities >= chat.top_p
            logits = logits.scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))
        return logits
