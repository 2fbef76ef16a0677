"""Writes tunes with the pocket music model: token by token, and given out bar by bar.

What an order says by number and letter is kept exactly: key, tempo, metre, mood, length. The plan
of sections is made for the length; the rest, from the instruments to every note, is the model's,
and whatever it says is a piece, because it may say only what the grammar lets through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, DynamicCache, Qwen3ForCausalLM

from workers.pocket.notes import (
    END,
    HEADER,
    MOODS,
    PROMPT,
    SECTIONS,
    TONICS,
    TUNE,
    Bar,
    Grammar,
    Key,
    Piece,
    decode_bar,
    decode_header,
    tempo_token,
    token,
)
from workers.pocket.tune_words import read
from workers.pocket.tunes import bars_for, plan

BAR_TOKENS_MAX: Final = 240
"""After so many a bar ends as soon as it may."""
_PROMPT_WORDS_MAX: Final = 48
_MIN_P: Final = 0.03
"""What is less likely than this share of the likeliest is never said."""


@dataclass(frozen=True, slots=True)
class Order:
    """What shall be written. None leaves a choice to the prompt, and then to the model."""

    prompt: str = ""
    key: Key | None = None
    tempo: int | None = None
    """Beats a minute."""
    metre: str | None = None
    mood: str | None = None
    seconds: float = 30.0
    seed: int = 0
    temperature: float = 0.85


class Writer:
    """A model directory that ``train_music`` wrote."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        loaded: Any = Qwen3ForCausalLM.from_pretrained(directory)
        self._model: Any = loaded.eval()
        self._context = int(self._model.config.max_position_embeddings)

    def begin(self, order: Order) -> Writing:
        """Read an order and choose all but the notes. Raise ``ValueError`` if its mood is none."""
        if order.mood is not None and order.mood not in MOODS:
            raise ValueError(f"the mood is {order.mood!r}; there are {', '.join(MOODS)}")
        return Writing(self._tokenizer, self._model, self._context, order)


class Writing:
    """One piece while it is written. ``head`` is the piece without its bars."""

    def __init__(self, tokenizer: Any, model: Any, context: int, order: Order) -> None:
        self._tokenizer, self._model, self._context = tokenizer, model, context
        self._temperature = order.temperature
        self._generator = torch.Generator().manual_seed(order.seed & (2**63 - 1))
        self._cache: Any = DynamicCache()
        self._grammar = Grammar()
        self._said: list[str] = []
        """Since the cache was begun."""
        self._unread: list[int] = []
        told = read(order.prompt)
        self._say(PROMPT, *told.words[:_PROMPT_WORDS_MAX], TUNE)
        key, tempo = order.key or told.key, order.tempo or told.tempo
        wanted = {"mood": order.mood and token("mood", order.mood)}
        if key is not None:
            wanted |= {"mode": token("mode", key.mode), "tonic": token("tonic", TONICS[key.tonic])}
        if tempo is not None:
            wanted["tempo"] = tempo_token(tempo)
        if metre := order.metre or told.metre:
            wanted["metre"] = token("metre", metre)
        header = []
        for field in HEADER:
            header.append(wanted.get(field) or self._choose(self._grammar.allowed()))
            self._push(header[-1])
        head = decode_header(header)
        self.head: Piece = head if tempo is None else replace(head, tempo=tempo)
        self._opening = tuple(self._said)
        bars = bars_for(order.seconds, head.metre, self.head.tempo)
        self._places = [token(section, place) for section, place in plan(bars)]
        self._bars: list[list[str]] = []

    @property
    def count(self) -> int:
        """How many bars there will be."""
        return len(self._places)

    def bars(self) -> Iterator[Bar]:
        """Write the bars, one after the other."""
        for place, following in zip(self._places, [*self._places[1:], END], strict=True):
            if len(self._said) + BAR_TOKENS_MAX + 40 > self._context:
                self._forget()
            begin = len(self._said)
            self._push(place)
            while (said := self._next(following, len(self._said) - begin)) != following:
                self._push(said)
            self._bars.append(self._said[begin:])
            yield decode_bar(self._bars[-1], self.head.key)

    def _next(self, following: str, written: int) -> str:
        """Choose the next token; that which begins the next bar ends this one."""
        allowed = self._grammar.allowed()
        if END in allowed:
            if written >= BAR_TOKENS_MAX:
                return following
            allowed = (*(said for said in allowed if said not in _BREAKS), following)
        return self._choose(allowed)

    def _push(self, said: str) -> None:
        self._grammar.push(said)
        self._say(said)

    def _say(self, *said: str) -> None:
        self._said += said
        self._unread += self._tokenizer.convert_tokens_to_ids(list(said))

    def _forget(self) -> None:
        """Begin the context anew with the opening and the last bars that fill half of it."""
        kept: list[str] = []
        for bar in reversed(self._bars):
            if len(kept) + len(bar) > self._context // 2:
                break
            kept = [*bar, *kept]
        self._said, self._unread, self._cache = [], [], DynamicCache()
        self._say(*self._opening, *kept)

    @torch.inference_mode()
    def _choose(self, allowed: tuple[str, ...]) -> str:
        """Choose one of some tokens as the model would, by the order's own generator."""
        if len(allowed) == 1:
            return allowed[0]
        ids = torch.tensor([self._unread])
        out = self._model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._unread = []
        mine = self._tokenizer.convert_tokens_to_ids(list(allowed))
        weights = torch.softmax(out.logits[0, -1, mine].float() / self._temperature, -1)
        weights[weights < _MIN_P * weights.max()] = 0
        return allowed[int(torch.multinomial(weights, 1, generator=self._generator))]


_BREAKS: Final = frozenset(
    (END, *(token(name, place) for name, most in SECTIONS.items() for place in range(1, most + 1)))
)
"""What ends a bar."""
