"""Samples the next tokens of all sequences of a step together, on the device.

The order is that of vLLM: bias and penalties, temperature, then top-k, min-p and top-p. Log
probabilities are those of the model, before all of these. Parameters are vectors over the rows;
only penalised and constrained rows carry anything of the size of the vocabulary, and only tokens
and log probabilities leave the device.

A token is sampled by adding noise to every logit and taking the highest (Gumbel, 1954). The noise
is a hash of seed, position and token (``gumbel``), without state: the same seed gives the same
answer whatever else is running, and a draft model that proposes tokens with the same noise tends to
agree. A draft token is accepted only if it is the token that would have been sampled anyway:
speculation is exact for every seed, not only in distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from workers.contract.jobs import ChatInput
from workers.engines.devices import Fetch, stage
from workers.engines.llm.grammar import Constraint, GrammarError
from workers.engines.memory import is_out_of_memory
from workers.engines.noise import gumbel, key_of, token_range

GREEDY_BELOW: Final = 1e-5
"""Temperature below which sampling is greedy; dividing by it could overflow."""

HEAD: Final = 1024
"""Number of likeliest tokens to which top-k and top-p look first; sorting all takes far longer."""
_GROWTH: Final = 16
_CACHED: Final = 1 << 18
"""Numbers of a tensor that the caches of a processor hold; rows are sampled in parts on a CPU."""
_BITS: Final = 8

_Kind: TypeAlias = Literal["greedy", "open", "cut"]
_KINDS: Final[tuple[_Kind, ...]] = ("greedy", "open", "cut")
"""Rows of one kind are computed together."""

NOT_FINITE: Final = "The model produced non-finite logits."
NO_MEMORY: Final = "The device had too little memory to sample a token."


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, with its log probability and the likeliest tokens if the request wants them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ends: bool = False
    """Whether the grammar allows no further token."""


class Sampler:
    """The sampling state of one sequence: its parameters, position and edits of its logits."""

    def __init__(
        self,
        chat: ChatInput,
        *,
        prompt: Sequence[int],
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.chat = chat
        self.greedy = chat.temperature < GREEDY_BELOW
        self.constraint = constraint
        self._seed = seed
        self._position = 0
        self._penalised = bool(chat.frequency_penalty or chat.presence_penalty)
        self._scaled = chat.repetition_penalty != 1.0
        self._accepted: set[int] = set()
        """Tokens of the answer, if they are penalised."""
        self._slots: dict[int, int] = {}
        """Index in ``edited`` of each token whose logit is edited."""
        self.edited = np.empty(0, dtype=np.int64)
        self.edits = np.empty((3, 0), dtype=np.float32)
        """For each of them what is added, what it is then divided or multiplied by, and what is
        subtracted at last."""
        self._extend(list(chat.logit_bias))
        self.edits[0] = list(chat.logit_bias.values())
        if self._scaled:
            self._extend([token for token in dict.fromkeys(prompt) if token not in self._slots])
            self.edits[1, [self._slots[token] for token in set(prompt)]] = chat.repetition_penalty

    @property
    def is_stateful(self) -> bool:
        """Whether a token's logits depend on the tokens before it also outside the model."""
        return self._penalised or self._scaled or self.constraint is not None

    @property
    def is_edited(self) -> bool:
        return bool(len(self.edited)) or self.constraint is not None

    def key(self, offset: int) -> tuple[int, int]:
        """Return the key of the noise ``offset`` positions after the next token."""
        return key_of(self._seed, self._position + offset)

    def accept(self, sampled: SampledToken) -> SampledToken:
        """Advance by a token. Raise ``GrammarError`` if the grammar cannot be followed."""
        self._position += 1
        token = sampled.token
        if self._penalised or self._scaled:
            if token not in self._slots:
                self._extend([token])
            slot = self._slots[token]
            if self._scaled:
                self.edits[1, slot] = self.chat.repetition_penalty
            if self._penalised:
                first = 0.0 if token in self._accepted else self.chat.presence_penalty
                self._accepted.add(token)
                self.edits[2, slot] += self.chat.frequency_penalty + first
        if self.constraint is None:
            return sampled
        self.constraint.accept(token)
        return replace(sampled, ends=True) if self.constraint.ended else sampled

    def _extend(self, tokens: Sequence[int]) -> None:
        self._slots |= {token: len(self._slots) + index for index, token in enumerate(tokens)}
        new = np.zeros((3, len(tokens)), dtype=np.float32)
        new[1] = 1.0
        self.edited = np.append(self.edited, np.array(tokens, dtype=np.int64))
        self.edits = np.append(self.edits, new, axis=1)


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to sample from row ``row`` of the logits, ``offset`` positions after the next one.

    ``plain`` ignores bias, penalties, constraint and log probabilities, as a proposal does.
    """

    sampler: Sampler
    row: int
    offset: int = 0
    plain: bool = False

    @property
    def is_edited(self) -> bool:
        return not self.plain and self.sampler.is_edited

    @property
    def is_argmax(self) -> bool:
        return self.sampler.greedy and not self.is_edited

    @property
    def kind(self) -> _Kind:
        """``cut``: only the likeliest tokens can be sampled, which the head may contain."""
        if self.sampler.greedy:
            return "greedy"
        return "cut" if self.sampler.chat.top_k > 0 or self.sampler.chat.top_p < 1 else "open"


class Drawing:
    """Tokens that are being sampled from float32 logits ``(rows, vocabulary)``.

    Everything is enqueued at the beginning, with the copy to the host, and nothing is waited for
    before ``read``. The logits are not modified, and no sampler changes.
    """

    def __init__(self, logits: torch.Tensor, draws: Sequence[Draw]) -> None:
        self._logits, self._draws = logits, draws
        self._errors, masks = _masks(draws)
        self._wide: list[_Wide] = []
        self.revised = False
        """Whether ``read`` changed ``tokens``."""
        highest, tokens = logits.max(dim=-1)
        self._rows = stage([one.row for one in draws], logits.device)
        finite, self.tokens = highest.isfinite()[self._rows], tokens[self._rows]
        is_wide = torch.zeros_like(finite)
        others = [number for number, one in enumerate(draws) if not one.is_argmax]
        width = len(others)
        if logits.device.type == "cpu":
            width = max(1, _CACHED // logits.shape[1])
        for kind in _KINDS:
            group = [number for number in others if draws[number].kind == kind]
            for start in range(0, len(group), width):
                part = group[start : start + width]
                at = stage(part, logits.device)
                own = [draws[number] for number in part]
                scores = _edit(logits[self._rows[at]], own, [masks.get(number) for number in part])
                self.tokens[at], fine, wide = _pick(scores, own, kind, at)
                finite[at] &= fine
                if wide is not None:
                    is_wide[at] = wide.rows
                    self._wide.append(wide)
        self._sampled = Fetch(torch.stack([self.tokens, finite.long(), is_wide.long()]))
        self._logprobs = _Logprobs(logits, self._rows, self.tokens, draws)

    def read(self) -> list[SampledToken | str]:
        """Return the tokens, and an error message instead of one for a draw that failed: its logits
        are not finite, before or after the parameters are applied, or its grammar cannot be
        continued."""
        sampled, fine, is_wide = self._sampled.read().tolist()
        if any(is_wide):
            try:
                self._widen()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                # The state of the step has changed: it cannot be repeated without a request.
                self._errors |= {row: NO_MEMORY for row, wide in enumerate(is_wide) if wide}
            sampled = self.tokens.tolist()
        logprobs = self._logprobs.read()
        return [
            self._errors.get(number)
            or (logprobs.get(number) or SampledToken(token) if is_fine else NOT_FINITE)
            for number, (token, is_fine) in enumerate(zip(sampled, fine, strict=True))
        ]

    def _widen(self) -> None:
        """Sample rows again of which as much as the head, or more, must be kept."""
        self.revised = True
        for wide in self._wide:
            wide.widen(self.tokens)
        self._wide.clear()
        self._logprobs = _Logprobs(self._logits, self._rows, self.tokens, self._draws)


def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | str]:
    """Sample, and wait for the result."""
    return Drawing(logits, draws).read() if draws else []


def propose(logits: torch.Tensor, samplers: Sequence[Sampler], offset: int) -> list[int]:
    """Return the token that each row of logits would yield ``offset`` positions after the next one.

    Ignores bias, penalties and constraints.
    """
    draws = [Draw(sampler, row, offset, plain=True) for row, sampler in enumerate(samplers)]
    sampled = draw(logits, draws)
    # A draft of nonsense is only rejected.
    return [one.token if isinstance(one, SampledToken) else 0 for one in sampled]


def _masks(draws: Sequence[Draw]) -> tuple[dict[int, str], dict[int, Any]]:
    """Return the errors of grammars, and the packed masks of allowed tokens, by draw."""
    errors, masks = {}, {}
    for number, one in enumerate(draws):
        if one.plain or one.sampler.constraint is None:
            continue
        try:
            masks[number] = one.sampler.constraint.packed()
        except GrammarError as error:
            errors[number] = f"The answer could not be constrained to its schema: {error}."
    return errors, masks


def _edit(scores: torch.Tensor, draws: Sequence[Draw], masks: Sequence[Any]) -> torch.Tensor:
    """Apply bias, penalties and masks in place. The repetition penalty includes the prompt's."""
    device, size = scores.device, scores.shape[1]
    edited = [(row, one.sampler) for row, one in enumerate(draws) if one.is_edited]
    if any(len(sampler.edited) for _, sampler in edited):
        at = np.concatenate([row * size + sampler.edited for row, sampler in edited])
        edits = np.concatenate([sampler.edits for _, sampler in edited], axis=1)
        added, scale, subtracted = stage(edits, device)
        flat, index = scores.view(-1), stage(at, device)
        values = flat[index] + added
        flat[index] = torch.where(values > 0, values / scale, values * scale) - subtracted
    if masked := [row for row, mask in enumerate(masks) if mask is not None]:
        packed = stage(np.stack([masks[row] for row in masked]), device)
        bits = (packed[:, :, None] >> torch.arange(_BITS, dtype=torch.uint8, device=device)) & 1
        allowed = bits.flatten(1).bool()
        allowed = torch.nn.functional.pad(allowed, (0, max(0, size - allowed.shape[1])))[:, :size]
        index = stage(masked, device)
        scores[index] = scores[index].masked_fill_(~allowed, -torch.inf)
    return scores


def _pick(
    scores: torch.Tensor, draws: Sequence[Draw], kind: _Kind, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, _Wide | None]:
    """Return the token of each row, whether its highest score is finite, and what it takes to
    sample rows again. ``at``: their places among all tokens."""
    device, size = scores.device, scores.shape[1]
    highest, tokens = scores.max(-1, keepdim=True)
    finite = highest.isfinite().squeeze(1)
    if kind == "greedy":
        return tokens.squeeze(1), finite, None
    chats = [one.sampler.chat for one in draws]
    least = [math.log(chat.min_p) if chat.min_p > 0 else -math.inf for chat in chats]
    floats = [[chat.temperature for chat in chats], least, [chat.top_p for chat in chats]]
    temperature, lowest, top_p = stage(floats, device)[:, :, None]
    integers = [(*one.sampler.key(one.offset), one.sampler.chat.top_k) for one in draws]
    packed = stage(integers, device, torch.int32)
    keys, top_k = packed[:, :2], packed[:, 2:].long()
    scores = scores / temperature
    lowest = lowest + highest / temperature
    if kind == "open":
        noise = gumbel(keys, token_range(size, device))
        if any(chat.min_p > 0 for chat in chats):
            noise = torch.where(scores < lowest, -torch.inf, noise)
        return noise.add_(scores).argmax(-1), finite, None
    cuts = _Cuts(top_k, top_p, lowest)
    head = min(size, max(HEAD, *(chat.top_k + 1 for chat in chats)))
    tokens, is_wide = _pick_likely(scores, cuts, keys, head)
    return tokens, finite, _Wide(at, scores, cuts, keys, head, is_wide) if head < size else None


class _Cuts(NamedTuple):
    """Limits of each row ``(rows, 1)``; ``lowest`` is the score below which min-p excludes."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    lowest: torch.Tensor


def _pick_likely(
    scores: torch.Tensor, cuts: _Cuts, keys: torch.Tensor, head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from the ``head`` likeliest tokens of each row, cut by top-k, min-p and top-p.

    The likeliest is always kept, and so is whatever is as likely as the last one kept. Also return
    whether that could be beyond the head.
    """
    top_k, top_p, lowest = cuts
    values, ids = torch.topk(scores, head)
    last = values.gather(1, (top_k - 1).clamp_(0, head - 1))
    lowest = torch.maximum(lowest, last.masked_fill_(top_k <= 0, -torch.inf))
    weights = torch.softmax(torch.where(scores < lowest, -torch.inf, scores), dim=-1).gather(1, ids)
    kept = weights.cumsum(-1) - weights < top_p
    last = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_min_(0))
    lowest = torch.maximum(lowest, last.masked_fill_(top_p >= 1, -torch.inf))
    noised = torch.where(values < lowest, -torch.inf, values + gumbel(keys, ids.int()))
    tokens = ids.gather(1, noised.argmax(-1, keepdim=True)).squeeze(1)
    return tokens, (lowest <= values[:, -1:]).squeeze(1)


@dataclass(slots=True)
class _Wide:
    """Rows of scores, of which ``rows`` ``(rows,)`` may keep more tokens than ``head``."""

    at: torch.Tensor
    scores: torch.Tensor
    cuts: _Cuts
    keys: torch.Tensor
    head: int
    rows: torch.Tensor

    def widen(self, tokens: torch.Tensor) -> None:
        """Sample these rows from longer heads, until one contains all that is kept."""
        while self.head < self.scores.shape[1] and bool(self.rows.any()):
            self.head = min(self.scores.shape[1], self.head * _GROWTH)
            wide = self.rows.nonzero().squeeze(1)
            own = _Cuts(*(limit[wide] for limit in self.cuts))
            found, self.rows[wide] = _pick_likely(
                self.scores[wide], own, self.keys[wide], self.head
            )
            tokens[self.at[wide]] = found


class _Logprobs:
    """Log probabilities of the tokens of draws that want them, on their way to the host."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        draws: Sequence[Draw],
    ) -> None:
        self._draws = draws
        self._wanted = [
            n for n, one in enumerate(draws) if one.sampler.chat.logprobs and not one.plain
        ]
        if not self._wanted:
            return
        at = stage(self._wanted, logits.device)
        logprobs = torch.log_softmax(logits[rows[at]], dim=-1)
        own = tokens[at, None]
        most = max(draws[number].sampler.chat.top_logprobs for number in self._wanted)
        likeliest = torch.topk(logprobs, min(most, logits.shape[1]))
        self._ids = Fetch(torch.cat([own, likeliest.indices], dim=1))
        self._values = Fetch(torch.cat([logprobs.gather(1, own), likeliest.values], dim=1))

    def read(self) -> dict[int, SampledToken]:
        """Return the tokens by draw, of those that want them."""
        if not self._wanted:
            return {}
        found = {}
        ids, values = self._ids.read().tolist(), self._values.read().tolist()
        for number, (token, *top), (logprob, *likely) in zip(
            self._wanted, ids, values, strict=True
        ):
            count = self._draws[number].sampler.chat.top_logprobs
            likeliest = tuple(zip(top[:count], likely[:count], strict=True))
            found[number] = SampledToken(token, logprob, likeliest)
        return found
