"""Writes tunes with the pocket music model: token by token, and given out bar by bar.

What an order says in so many words is kept exactly: key, tempo, metre, mood, instruments, length.
The plan of sections is made for the length; all else, down to every note, is the model's, and
whatever it says is a piece, because it may say only what the grammar lets through. The model itself
is run by whoever writes: a ``Writing`` says what it has to read, and is told what it makes of that.
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
from workers.engines.music.prompt import read

BAR_TOKENS_MAX: Final = 110
"""After so many a bar ends as soon as it may; none that was ever learnt has more."""
_ENDING_TOKENS: Final = 10
"""What it takes a bar to end at most: a chord of four notes, and its length."""
_PROMPT_WORDS_MAX: Final = 48
_MIN_P: Final = 0.03
"""What is less likely than this share of the likeliest is never said."""

_Asking: TypeAlias = Generator[tuple[str, ...], str, str]
"""Yields what may be said next, is sent what is said, and returns that."""


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """What shall be written. None leaves a choice to the prompt, and then to the model."""

    prompt: str = ""
    key: Key | None = None
    tempo: int | None = None
    """Beats a minute."""
    metre: str | None = None
    mood: str | None = None
    seconds: float = 30.0
    """With what rings on at the end."""
    seed: int = 0
    temperature: float = 0.85


class Writing:
    """One piece while it is written."""

    def __init__(self, order: PieceOrder, vocabulary: Mapping[str, int], *, context: int) -> None:
        """``context``: tokens that the model can look back on.

        Raise ``ValueError`` if there is no time for a bar of what is ordered.
        """
        told = read(order.prompt)
        tempo = order.tempo or told.tempo
        self._order = replace(
            order,
            key=order.key or told.key,
            tempo=tempo,
            metre=order.metre or told.metre,
            mood=order.mood or told.mood,
        )
        self._instruments = told.instruments
        if not any(self._has_time(metre, tempo or TEMPOS[-1]) for metre in self._metres()):
            raise ValueError(
                f"{order.seconds:g} seconds are too short for a bar"
                + (f" at {tempo} beats a minute" if tempo else "")
            )
        self._vocabulary = vocabulary
        self._context = context
        self._generator = torch.Generator().manual_seed(order.seed & (2**63 - 1))
        self._grammar = Grammar()
        self._said: list[str] = []
        """Since the context was begun."""
        self._read = 0
        """Of these, by the model."""
        self._say(PROMPT, *told.words[:_PROMPT_WORDS_MAX], TUNE)
        self.head: Piece | None = None
        """The piece without its bars, once that is chosen."""
        self.bars: list[Bar] = []
        """Those that are finished."""
        self.count = 0
        """How many there will be, once there is a head."""
        self.ended = False
        self._course = self._write()
        self._choices = next(self._course)

    def unread(self) -> tuple[int, list[int]]:
        """What the model has to read next: tokens, and the position of the first of them. At
        position 0 it begins anew."""
        unknown = self._vocabulary[UNKNOWN]
        ids = [self._vocabulary.get(said, unknown) for said in self._said[self._read :]]
        return self._read, ids

    def choose(self, logits: torch.Tensor) -> None:
        """Say what comes next, by the logits ``(vocabulary,)`` after what was unread."""
        self._read = len(self._said)
        said = self._sample(logits)
        try:
            self._choices = self._course.send(said)
        except StopIteration:
            self.ended = True

    def _sample(self, logits: torch.Tensor) -> str:
        mine = [self._vocabulary[said] for said in self._choices]
        weights = torch.softmax(logits[mine].float() / self._order.temperature, -1)
        weights[weights < _MIN_P * weights.max()] = 0
        return self._choices[int(torch.multinomial(weights, 1, generator=self._generator))]

    # --- What is written, in order ----------------------------------------------------------------

    def _write(self) -> Generator[tuple[str, ...], str, None]:
        self.head = yield from self._write_head()
        opening = tuple(self._said)
        self.count = bars_for(self._order.seconds, self.head.metre, self.head.tempo)
        places = [token(section, place) for section, place in plan(self.count)]
        written: list[list[str]] = []
        for place, following in zip(places, [*places[1:], END], strict=True):
            if len(self._said) + BAR_TOKENS_MAX + _ENDING_TOKENS > self._context:
                self._forget(opening, written)
            begin = len(self._said)
            self._push(place)
            while (said := (yield from self._next(following, begin))) != following:
                self._push(said)
            written.append(self._said[begin:])
            self.bars.append(decode_bar(written[-1], self.head.key))

    def _write_head(self) -> Generator[tuple[str, ...], str, Piece]:
        order, wanted = self._order, dict[str, str]()
        if order.mood is not None:
            wanted["mood"] = token("mood", order.mood)
        if order.key is not None:
            wanted["mode"] = token("mode", order.key.mode)
            wanted["tonic"] = token("tonic", TONICS[order.key.tonic])
        if order.tempo is not None:
            wanted["tempo"] = tempo_token(order.tempo)
        for part, name in self._instruments.items():
            wanted[f"{part}-by"] = token(f"{part}-by", name)
        header: list[str] = []
        for field in HEADER:
            said = wanted.get(field) or (yield from self._ask(self._possible(field, header)))
            header.append(said)
            self._push(said)
        head = decode_header(header)
        return head if order.tempo is None else replace(head, tempo=order.tempo)

    def _possible(self, field: str, header: list[str]) -> tuple[str, ...]:
        """What may be said of a field, where there is time for a bar of it."""
        said = self._grammar.allowed()
        if field == "metre":
            tempo = self._order.tempo or TEMPOS[-1]
            return tuple(token(field, m) for m in self._metres() if self._has_time(m, tempo))
        if field == "tempo":
            metre = parse(header[-1])[1]
            return tuple(one for one in said if self._has_time(metre, int(parse(one)[1])))
        return said

    def _metres(self) -> tuple[str, ...]:
        return (self._order.metre,) if self._order.metre else tuple(METRES)

    def _has_time(self, metre: str, tempo: int) -> bool:
        return bars_for(self._order.seconds, metre, tempo) > 0

    def _next(self, following: str, begin: int) -> _Asking:
        """The next token; that which begins the next bar ends this one. The last comes home."""
        allowed = self._grammar.allowed()
        if END in allowed:
            if len(self._said) - begin >= BAR_TOKENS_MAX:
                return following
            allowed = (*(said for said in allowed if said not in _BREAKS), following)
        if following == END:
            allowed = tuple(said for said in allowed if said not in _AWAY)
        return (yield from self._ask(allowed))

    def _ask(self, allowed: tuple[str, ...]) -> _Asking:
        return allowed[0] if len(allowed) == 1 else (yield allowed)

    def _push(self, said: str) -> None:
        self._grammar.push(said)
        self._say(said)

    def _say(self, *said: str) -> None:
        self._said += said

    def _forget(self, opening: tuple[str, ...], written: list[list[str]]) -> None:
        """Begin the context anew with the opening and the last bars that fill half of it."""
        kept: list[str] = []
        for bar in reversed(written):
            if len(kept) + len(bar) > self._context // 2:
                break
            kept = [*bar, *kept]
        self._said, self._read = [*opening, *kept], 0


_BREAKS: Final = frozenset(
    (END, *(token(name, place) for name, most in SECTIONS.items() for place in range(1, most + 1)))
)
"""What ends a bar."""
_AWAY: Final = frozenset(
    token("chord", f"{root}-{quality}") for root in range(1, 12) for quality in QUALITIES
)
"""Chords on which no piece ends."""
