"""Generates tunes with the pocket music model, token by token; bars are returned when complete.

What a request states explicitly is kept exactly: key, tempo, metre, mood, instruments, length. The
sections are planned for the length. The model chooses everything else, and the grammar masks its
choices, so that any result is a valid piece. The caller runs the model: a ``PieceWriter`` returns
the next input and samples from the logits that it is given.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import torch

from workers.engines.music.form import bars_for, plan
from workers.engines.music.notes import (
    END,
    HEADER,
    METRES,
    PROMPT,
    QUALITIES,
    SECTIONS,
    TEMPOS,
    TONICS,
    TUNE,
    UNKNOWN,
    Bar,
    Grammar,
    Key,
    Piece,
    decode_bar,
    decode_header,
    parse,
    tempo_token,
    token,
)
from workers.engines.music.prompt import parse_prompt

BAR_TOKENS_MAX: Final = 110
"""Tokens after which a bar ends as soon as possible; no bar in the training data has more."""
_ENDING_TOKENS: Final = 10
"""Maximum tokens until a bar can end: a chord of four notes, and its length."""
_PROMPT_WORDS_MAX: Final = 48
_MIN_P: Final = 0.03
"""Tokens less likely than this fraction of the likeliest are excluded (min-p sampling)."""

_Choice: TypeAlias = Generator[tuple[str, ...], str, str]
"""Yields the allowed tokens, is sent the sampled one, and returns it."""


@dataclass(frozen=True, slots=True)
class PieceSpec:
    """Requested properties of a piece. None: taken from the prompt, otherwise by the model."""

    prompt: str = ""
    key: Key | None = None
    tempo: int | None = None
    """Beats per minute."""
    metre: str | None = None
    mood: str | None = None
    seconds: float = 30.0
    """Length, including what rings on at the end."""
    seed: int = 0
    temperature: float = 0.85


class PieceWriter:
    """State of one piece being generated."""

    def __init__(self, spec: PieceSpec, vocabulary: Mapping[str, int], *, context: int) -> None:
        """``context``: tokens in the model's context.

        Raise ``ValueError`` if the length is too short for a single bar.
        """
        prompt = parse_prompt(spec.prompt)
        tempo = spec.tempo or prompt.tempo
        self._spec = replace(
            spec,
            key=spec.key or prompt.key,
            tempo=tempo,
            metre=spec.metre or prompt.metre,
            mood=spec.mood or prompt.mood,
        )
        self._instruments = prompt.instruments
        if not any(self._has_time(metre, tempo or TEMPOS[-1]) for metre in self._metres()):
            raise ValueError(
                f"{spec.seconds:g} seconds are too short for a bar"
                + (f" at {tempo} beats a minute" if tempo else "")
            )
        self._vocabulary = vocabulary
        self._context = context
        self._generator = torch.Generator().manual_seed(spec.seed & (2**63 - 1))
        self._grammar = Grammar()
        self._tokens: list[str] = []
        """Tokens in the current context."""
        self._prefilled = 0
        """Number of these that the model has processed."""
        self._append(PROMPT, *prompt.words[:_PROMPT_WORDS_MAX], TUNE)
        self.head: Piece | None = None
        """The piece without its bars; None until its header is complete."""
        self.bars: list[Bar] = []
        """Completed bars."""
        self.count = 0
        """Total number of bars; 0 until there is a head."""
        self.ended = False
        self._steps = self._write()
        self._choices = next(self._steps)

    def next_input(self) -> tuple[int, list[int]]:
        """Return the next input: the position of its first token, and the tokens.

        Position 0 starts a new context.
        """
        unknown = self._vocabulary[UNKNOWN]
        ids = [self._vocabulary.get(symbol, unknown) for symbol in self._tokens[self._prefilled :]]
        return self._prefilled, ids

    def sample(self, logits: torch.Tensor) -> None:
        """Sample the next token from the logits ``(vocabulary,)`` after the last input."""
        self._prefilled = len(self._tokens)
        symbol = self._sample(logits)
        try:
            self._choices = self._steps.send(symbol)
        except StopIteration:
            self.ended = True

    def _sample(self, logits: torch.Tensor) -> str:
        ids = [self._vocabulary[symbol] for symbol in self._choices]
        weights = torch.softmax(logits[ids].float() / self._spec.temperature, -1)
        weights[weights < _MIN_P * weights.max()] = 0
        return self._choices[int(torch.multinomial(weights, 1, generator=self._generator))]

    # --- Order of tokens --------------------------------------------------------------------------

    def _write(self) -> Generator[tuple[str, ...], str, None]:
        self.head = yield from self._write_head()
        header = tuple(self._tokens)
        self.count = bars_for(self._spec.seconds, self.head.metre, self.head.tempo)
        places = [token(section, place) for section, place in plan(self.count)]
        written: list[list[str]] = []
        for place, next_bar in zip(places, [*places[1:], END], strict=True):
            if len(self._tokens) + BAR_TOKENS_MAX + _ENDING_TOKENS > self._context:
                self._restart_context(header, written)
            start = len(self._tokens)
            self._push(place)
            while (symbol := (yield from self._next(next_bar, start))) != next_bar:
                self._push(symbol)
            written.append(self._tokens[start:])
            self.bars.append(decode_bar(written[-1], self.head.key))

    def _write_head(self) -> Generator[tuple[str, ...], str, Piece]:
        spec, fixed = self._spec, dict[str, str]()
        if spec.mood is not None:
            fixed["mood"] = token("mood", spec.mood)
        if spec.key is not None:
            fixed["mode"] = token("mode", spec.key.mode)
            fixed["tonic"] = token("tonic", TONICS[spec.key.tonic])
        if spec.tempo is not None:
            fixed["tempo"] = tempo_token(spec.tempo)
        for part, name in self._instruments.items():
            fixed[f"{part}-by"] = token(f"{part}-by", name)
        header: list[str] = []
        for field in HEADER:
            symbol = fixed.get(field) or (yield from self._choose(self._possible(field, header)))
            header.append(symbol)
            self._push(symbol)
        head = decode_header(header)
        return head if spec.tempo is None else replace(head, tempo=spec.tempo)

    def _possible(self, field: str, header: list[str]) -> tuple[str, ...]:
        """Return the allowed values of a header field: those for which a bar fits the length."""
        allowed = self._grammar.allowed()
        if field == "metre":
            tempo = self._spec.tempo or TEMPOS[-1]
            return tuple(token(field, m) for m in self._metres() if self._has_time(m, tempo))
        if field == "tempo":
            metre = parse(header[-1])[1]
            return tuple(one for one in allowed if self._has_time(metre, int(parse(one)[1])))
        return allowed

    def _metres(self) -> tuple[str, ...]:
        return (self._spec.metre,) if self._spec.metre else tuple(METRES)

    def _has_time(self, metre: str, tempo: int) -> bool:
        return bars_for(self._spec.seconds, metre, tempo) > 0

    def _next(self, next_bar: str, start: int) -> _Choice:
        """Choose the next token; the first token of the next bar ends this one.

        The last bar has no chords but those on the tonic.
        """
        allowed = self._grammar.allowed()
        if END in allowed:
            if len(self._tokens) - start >= BAR_TOKENS_MAX:
                return next_bar
            allowed = (*(symbol for symbol in allowed if symbol not in _BREAKS), next_bar)
        if next_bar == END:
            allowed = tuple(symbol for symbol in allowed if symbol not in _NOT_FINAL_CHORDS)
        return (yield from self._choose(allowed))

    def _choose(self, allowed: tuple[str, ...]) -> _Choice:
        return allowed[0] if len(allowed) == 1 else (yield allowed)

    def _push(self, symbol: str) -> None:
        self._grammar.push(symbol)
        self._append(symbol)

    def _append(self, *symbols: str) -> None:
        self._tokens += symbols

    def _restart_context(self, header: tuple[str, ...], written: list[list[str]]) -> None:
        """Start a new context with the header and the most recent bars, which fill half of it."""
        recent: list[str] = []
        for bar in reversed(written):
            if len(recent) + len(bar) > self._context // 2:
                break
            recent = [*bar, *recent]
        self._tokens, self._prefilled = [*header, *recent], 0


_BREAKS: Final = frozenset(
    (END, *(token(name, place) for name, most in SECTIONS.items() for place in range(1, most + 1)))
)
"""Tokens that end a bar."""
_NOT_FINAL_CHORDS: Final = frozenset(
    token("chord", f"{root}-{quality}") for root in range(1, 12) for quality in QUALITIES
)
"""Chords excluded from the last bar: those not on the tonic."""
