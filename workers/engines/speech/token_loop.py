"""Generates codec tokens for many requests together: a step adds one frame to each of its rows.

A row is opened with what its prompt leaves: keys and values, and a hidden state. A step samples the
next frame from the hidden states, and runs it. So rows of different lengths join and leave between
two steps. The noise of a token is computed from the row's seed (``workers.engines.noise``), and
processors of the library adjust the scores: a row's tokens are those that the library's
``generate`` would sample with this noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from transformers import EncoderDecoderCache, LogitsProcessorList
from transformers.generation import logits_process

from workers.engines.noise import gumbel, key_of, token_range
from workers.engines.speech.codec import StreamingDecoder
from workers.engines.speech.row_cache import ROWS, RowCache, TextCache

Frame: TypeAlias = list[int]
"""One token of each codebook."""
Edit: TypeAlias = Callable[[int, Frame], Frame]
"""Returns the tokens to continue with, from the number of a step and its sampled frame."""

_PROCESSORS: Final = (
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
"""Those that look at the scores of a row only, not at its earlier tokens."""


@dataclass(slots=True, eq=False)
class Row:
    seed: int
    edit: Edit
    length: int
    """Number of positions in the cache."""
    step: int = 0


class TokenLoop(ABC):
    """The rows of one model. ``step`` is ``advance``, or a batch point of it."""

    def __init__(self, *, codebooks: int, lanes: int = 1, has_text: bool = False) -> None:
        self.codebooks = codebooks
        self._lanes = lanes
        self._own = RowCache(lanes)
        self._text = TextCache(lanes) if has_text else None
        self._rows: dict[int, Row] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        """Hidden states ``(lanes, H)`` from which the next frame of a row is sampled."""
        self.step: Callable[[torch.Tensor], torch.Tensor] = self.advance

    @property
    @abstractmethod
    def module(self) -> torch.nn.Module:
        """What a step computes with."""

    @property
    def cache_bytes(self) -> int:
        return self._own.bytes + (0 if self._text is None else self._text.bytes)

    @contextmanager
    def open(
        self, cache: Any, hidden: torch.Tensor, seed: int, edit: Edit = lambda _, frame: frame
    ) -> Iterator[int]:
        """Add a row after its prompt, and yield its number; ``hidden`` is ``(lanes, H)``."""
        own = getattr(cache, "self_attention_cache", cache)
        row = next(row for row in range(len(self._rows) + 1) if row not in self._rows)
        try:
            self._own.store(row, own)
            if self._text is not None:
                self._text.store(row, cache.cross_attention_cache)
            self._hidden[row] = hidden
            self._rows[row] = Row(seed, edit, own.layers[0].keys.shape[2])
            yield row
        finally:
            self._rows.pop(row, None)
            self._hidden.pop(row, None)
            if not self._rows:
                self._own.clear()
                if self._text is not None:
                    self._text.clear()

    def generate(self, row: int, stream: StreamingDecoder, *, steps: int) -> None:
        """Run a row until its end, or for ``steps``. Raise ``ValueError`` if a token cannot be
        sampled."""
        at = torch.tensor([row])
        for _ in range(steps):
            frame = self.step(at)[0]
            if int(frame.min()) < 0:
                raise ValueError("the model produced non-finite scores")
            stream.put(frame)
            if stream.ended:
                break

    def advance(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the next frames ``(rows, K)`` of some rows, -1 where scores are not finite.

        If it raises, no row has changed.
        """
        chosen = batch.tolist()
        count = -(-(max(chosen) + 1) // ROWS) * ROWS
        keys = [(0, 0)] * count
        for number in chosen:
            keys[number] = key_of(self._rows[number].seed, self._rows[number].step)
        device = self._hidden[chosen[0]].device
        idle = torch.zeros_like(self._hidden[chosen[0]])
        hidden = torch.cat([self._hidden.get(number, idle) for number in range(count)])
        noise = torch.tensor(keys, dtype=torch.int32, device=device)
        sampled = self.sample(hidden, noise).tolist()
        fed = [[0] * self.codebooks] * count
        places = [0] * count
        for number, row in self._rows.items():
            if number < count:
                # A row outside the batch writes where its next token will.
                places[number] = row.length
        for number in chosen:
            row = self._rows[number]
            fed[number] = row.edit(row.step, [max(token, 0) for token in sampled[number]])
        longest = max(places[number] for number in chosen) + 1
        at = torch.tensor(places)
        mask = self._own.begin(at, longest)
        text = None if self._text is None else self._text.read(count)
        frames = torch.tensor(fed, device=device).repeat_interleave(self._lanes, dim=0)
        after = self.run(
            frames, at.repeat_interleave(self._lanes).to(device), mask=mask, text=text
        ).view(count, self._lanes, -1)
        for number in chosen:
            # A copy: a view would keep the states of all rows.
            self._hidden[number] = after[number].clone()
            self._rows[number].length += 1
            self._rows[number].step += 1
        return torch.tensor([sampled[number] for number in chosen])

    @abstractmethod
    def sample(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Sample frames ``(rows, K)`` from hidden states ``(rows * lanes, H)``."""

    @abstractmethod
    def run(
        self,
        frames: torch.Tensor,
        places: torch.Tensor,
        *,
        mask: torch.Tensor,
        text: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run frames ``(rows * lanes, K)`` at their places; return the hidden states.

        ``mask`` and ``text`` are those of the attention to earlier frames, and to the text.
        """

    @property
    def caches(self) -> Any:
        """The caches of all rows, as a module of the library takes them."""
        if self._text is None:
            return self._own.cache
        return EncoderDecoderCache(self._own.cache, self._text.cache)


class Sampling:
    """Samples tokens as a model's ``generation_config`` says."""

    def __init__(self, model: Any) -> None:
        """Raise ``ValueError`` if another processor is wanted than those of single rows."""
        config, _ = model._prepare_generation_config(None)
        self.is_guided = config.guidance_scale is not None and config.guidance_scale > 1
        others: list[Any] = []
        if self.is_guided and model.config.model_type != "dia":  # which adds its own
            guidance: Any = logits_process.ClassifierFreeGuidanceLogitsProcessor
            others.append(guidance(config.guidance_scale))
            config.guidance_scale = None
        config.max_length = config.max_length or 1  # a row ends by its number of steps
        self._samples = bool(config.do_sample)
        found = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=1,
            encoder_input_ids=None,
            prefix_allowed_tokens_fn=None,
            logits_processor=LogitsProcessorList(others),
            device=model.device,
            model_kwargs={},
        )
        self._processors = [
            each
            for each in found
            # Applied by the row's own ``edit``.
            if not isinstance(each, logits_process.DiaEOSDelayPatternLogitsProcessor)
        ]
        for each in self._processors:
            if type(each).__name__ not in _PROCESSORS:
                kind = type(each).__name__
                raise ValueError(f"its generation_config.json needs {kind}, which is not supported")

    def choose(self, scores: torch.Tensor, keys: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Choose tokens ``(rows, K)`` by scores ``(lanes, rows, K, V)``, -1 where they are not
        finite. ``first``: number of the first of these codebooks."""
        _, rows, count, size = scores.shape
        flat = scores.float().reshape(-1, size)
        ids = torch.zeros(rows * count, 1, dtype=torch.long, device=flat.device)
        for each in self._processors:
            flat = each(ids, flat)
        found = flat.view(rows, count, size)
        if self._samples:
            tokens = token_range((first + count) * size, flat.device)[first * size :]
            found = found + gumbel(keys, tokens).view(rows, count, size)
        best, chosen = found.max(-1)
        return torch.where(best.isfinite(), chosen, -1)


def last_hidden(states: torch.Tensor) -> torch.Tensor:
    """Return the hidden states after the last position ``(lanes, H)``."""
    return states[:, -1].clone()
