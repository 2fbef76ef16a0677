"""Music as notes and as tokens: what the pocket music model generates. Knows nothing of audio.

A ``Piece`` has a key, a tempo, a metre, four parts, and bars of notes on a grid of sixteenths. Its
tokens are relative to the tonic, so a model learns only one major and one minor mode, and the key
of its output is right by construction. ``Grammar`` returns the tokens allowed next; every sequence
that it allows is a valid piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, NamedTuple, TypeAlias, cast

Mode: TypeAlias = Literal["major", "minor"]
Part: TypeAlias = Literal["lead", "chords", "bass", "drums"]

TONICS: Final = ("c", "db", "d", "eb", "e", "f", "gb", "g", "ab", "a", "bb", "b")
MODES: Final[tuple[Mode, ...]] = ("major", "minor")
SCALES: Final[dict[Mode, tuple[int, ...]]] = {
    "major": (0, 2, 4, 5, 7, 9, 11),
    "minor": (0, 2, 3, 5, 7, 8, 10),
}
"""Natural minor; its leading note, 11, occurs in the dominant."""
MOODS: Final = ("happy", "playful", "epic", "dreamy", "calm", "sad", "dark", "tense")
PARTS: Final[tuple[Part, ...]] = ("lead", "chords", "bass", "drums")
"""Parts, in the order of their tokens at one position."""
INSTRUMENTS: Final[dict[Part, tuple[str, ...]]] = {
    "lead": ("piano", "flute", "violin", "guitar", "bells", "synth", "organ", "marimba"),
    "chords": ("piano", "strings", "guitar", "pad", "organ", "harp"),
    "bass": ("upright", "electric", "synth-bass", "cello"),
    "drums": ("none", "kit", "electronic"),
}
DRUMS: Final = {
    "kick": 36,
    "snare": 38,
    "clap": 39,
    "hat": 42,
    "low-tom": 45,
    "open-hat": 46,
    "crash": 49,
    "high-tom": 50,
    "ride": 51,
    "shaker": 70,
}
"""General MIDI pitch of each drum."""
QUALITIES: Final = {
    "maj": (0, 4, 7),
    "min": (0, 3, 7),
    "dim": (0, 3, 6),
    "sus": (0, 5, 7),
    "7": (0, 4, 7, 10),
    "maj7": (0, 4, 7, 11),
    "min7": (0, 3, 7, 10),
}
SECTIONS: Final = {"intro": 4, "a": 8, "b": 8, "outro": 4}
"""Maximum bars of each section before it starts again."""
LOUDNESS: Final = (1, 2, 3, 4)
TEMPOS: Final = range(40, 202, 2)
"""Tempos with a token, in beats per minute; others are rounded to the nearest."""
LENGTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32)
"""Possible lengths of a note, in sixteenths."""
RANGES: Final[dict[Part, range]] = {
    "lead": range(55, 92),
    "chords": range(43, 77),
    "bass": range(26, 56),
    "drums": range(min(DRUMS.values()), max(DRUMS.values()) + 1),
}
"""MIDI pitches of a piece in C; in another key up to 6 lower or 5 higher."""


class Metre(NamedTuple):
    beats: int
    steps: int
    """Sixteenths in a beat."""

    @property
    def bar(self) -> int:
        return self.beats * self.steps


METRES: Final = {"4/4": Metre(4, 4), "3/4": Metre(3, 4), "6/8": Metre(2, 6)}
"""A beat is a quarter, or in 6/8 a dotted quarter; the tempo counts beats."""
_STEPS_MAX: Final = max(metre.bar for metre in METRES.values())


@dataclass(frozen=True, slots=True)
class Key:
    tonic: int
    """Semitones above C, 0 to 11."""
    mode: Mode

    @property
    def shift(self) -> int:
        """Semitones from C to the nearest tonic, -6 to 5."""
        return (self.tonic + 6) % 12 - 6

    def __str__(self) -> str:
        return f"{TONICS[self.tonic].capitalize()} {self.mode}"


class Chord(NamedTuple):
    root: int
    """Semitones above the tonic."""
    quality: str

    @property
    def pitches(self) -> tuple[int, ...]:
        """Pitch classes above the tonic, the root first."""
        return tuple((self.root + step) % 12 for step in QUALITIES[self.quality])


class Note(NamedTuple):
    start: int
    """Position in its bar, in sixteenths."""
    part: Part
    pitch: int
    """MIDI pitch: 60 is middle C; for drums, the drum."""
    steps: int
    """Length in sixteenths; may reach into later bars. Always 1 for drums."""


@dataclass(frozen=True, slots=True)
class Bar:
    section: str
    place: int
    """Number of the bar in its section, from 1."""
    loudness: int
    chords: tuple[tuple[int, Chord], ...]
    """Chords, each with the sixteenth at which it starts; the first starts at 0."""
    notes: tuple[Note, ...]
    """Sorted. Notes of a part that start together have one length; lead and bass have one each."""


@dataclass(frozen=True, slots=True)
class Piece:
    mood: str
    key: Key
    metre: str
    tempo: int
    """Beats per minute."""
    lead: str
    chords: str
    bass: str
    drums: str
    bars: tuple[Bar, ...]

    @property
    def step_seconds(self) -> float:
        return 60 / (self.tempo * METRES[self.metre].steps)

    @property
    def bar_seconds(self) -> float:
        return self.step_seconds * METRES[self.metre].bar

    def instrument(self, part: Part) -> str:
        return cast(str, getattr(self, part))


# --- Tokens --------------------------------------------------------------------------------------

PAD: Final = "<pad>"
UNKNOWN: Final = "<unk>"
PROMPT: Final = "<prompt>"
TUNE: Final = "<tune>"
END: Final = "<end>"
MARKS: Final = (PAD, UNKNOWN, PROMPT, TUNE, END)
HEADER: Final[dict[str, tuple[str, ...]]] = {
    "mood": MOODS,
    "mode": MODES,
    "tonic": TONICS,
    "metre": tuple(METRES),
    "tempo": tuple(str(tempo) for tempo in TEMPOS),
    **{f"{part}-by": names for part, names in INSTRUMENTS.items()},
}
"""Header fields of a tune, in order, with their values."""
_PITCHED: Final[tuple[Part, ...]] = ("lead", "chords", "bass")


def token(kind: str, value: object) -> str:
    return f"<{kind}:{value}>"


def _tokens() -> Iterable[str]:
    for field, values in HEADER.items():
        yield from (token(field, value) for value in values)
    for section, places in SECTIONS.items():
        yield from (token(section, place) for place in range(1, places + 1))
    yield from (token("loud", level) for level in LOUDNESS)
    yield from (token("at", step) for step in range(_STEPS_MAX))
    for root in range(12):
        yield from (token("chord", f"{root}-{quality}") for quality in QUALITIES)
    for part in _PITCHED:
        yield from (token(part, pitch) for pitch in RANGES[part])
    yield from (token("drum", name) for name in DRUMS)
    yield from (token("for", steps) for steps in LENGTHS)


TOKENS: Final = tuple(_tokens())
"""All music tokens, without the marks."""
_DRUM_NAMES: Final = {pitch: name for name, pitch in DRUMS.items()}


def tempo_token(tempo: float) -> str:
    nearest = min(TEMPOS, key=lambda known: abs(known - tempo))
    return token("tempo", nearest)


def fold(pitch: int, part: Part) -> int:
    """Transpose a pitch by octaves into a part's range, for a piece in C."""
    allowed = RANGES[part]
    while pitch < allowed.start:
        pitch += 12
    while pitch >= allowed.stop:
        pitch -= 12
    return pitch


def encode_header(piece: Piece) -> list[str]:
    return [
        token("mood", piece.mood),
        token("mode", piece.key.mode),
        token("tonic", TONICS[piece.key.tonic]),
        token("metre", piece.metre),
        tempo_token(piece.tempo),
        *(token(f"{part}-by", piece.instrument(part)) for part in PARTS),
    ]


def encode_bar(bar: Bar, key: Key) -> list[str]:
    """Encode a bar. Raise ``ValueError`` if something in it has no token."""
    symbols = [token(bar.section, bar.place), token("loud", bar.loudness)]
    chords = dict(bar.chords)
    played = {start: list(notes) for start, notes in groupby(sorted(bar.notes), lambda n: n.start)}
    for step in sorted({*chords, *played}):
        symbols.append(token("at", step))
        if step in chords:
            symbols.append(token("chord", f"{chords[step].root}-{chords[step].quality}"))
        notes_here = played.get(step, [])
        for part in _PITCHED:
            symbols += _encode_notes(part, [note for note in notes_here if note.part == part], key)
        symbols += [
            token("drum", _DRUM_NAMES[note.pitch]) for note in notes_here if note.part == "drums"
        ]
    if unknown := [one for one in symbols if one not in _KNOWN]:
        raise ValueError(f"there is no token {unknown[0]}, needed for {bar}")
    return symbols


def _encode_notes(part: Part, notes: Sequence[Note], key: Key) -> list[str]:
    if not notes:
        return []
    (steps, *others) = {note.steps for note in notes}
    if others or (part != "chords" and len(notes) > 1):
        raise ValueError(
            f"notes of {part} at {notes[0].start} differ in length or are too many: {notes}"
        )
    return [
        *(token(part, pitch) for pitch in sorted(note.pitch - key.shift for note in notes)),
        token("for", steps),
    ]


def encode(piece: Piece) -> list[str]:
    """Encode a piece. Raise ``ValueError`` if something in it has no token."""
    bars = (symbol for bar in piece.bars for symbol in encode_bar(bar, piece.key))
    return [TUNE, *encode_header(piece), *bars, END]


def parse(symbol: str) -> tuple[str, str]:
    """Split a token into its kind and value; the value of a mark is empty."""
    kind, _, value = symbol[1:-1].partition(":")
    return kind, value


_KNOWN: Final = frozenset(TOKENS)
_PARSED: Final = {symbol: parse(symbol) for symbol in (*MARKS, *TOKENS)}


def decode_header(tokens: Sequence[str]) -> Piece:
    """Decode a header to a piece without bars. Raise ``ValueError`` if it is invalid."""
    fields = dict(_parsed(tokens))
    if list(fields) != list(HEADER) or len(tokens) != len(HEADER):
        raise ValueError(
            f"a header has the fields {', '.join(HEADER)}, in this order; not {list(fields)}"
        )
    return Piece(
        mood=fields["mood"],
        key=Key(TONICS.index(fields["tonic"]), cast(Mode, fields["mode"])),
        metre=fields["metre"],
        tempo=int(fields["tempo"]),
        lead=fields["lead-by"],
        chords=fields["chords-by"],
        bass=fields["bass-by"],
        drums=fields["drums-by"],
        bars=(),
    )


def decode_bar(tokens: Sequence[str], key: Key) -> Bar:
    """Decode a bar. Raise ``ValueError`` if it is invalid."""
    (section, place), (loud, loudness), *rest = _parsed(tokens)
    if section not in SECTIONS or loud != "loud":
        raise ValueError(f"a bar begins with its section and loudness, not {tokens[:2]}")
    step = 0
    chords: list[tuple[int, Chord]] = []
    notes: list[Note] = []
    pitched: list[tuple[Part, int]] = []
    for kind, value in rest:
        if kind == "at":
            step = int(value)
        elif kind == "chord":
            root, _, quality = value.partition("-")
            chords.append((step, Chord(int(root), quality)))
        elif kind == "drum":
            notes.append(Note(step, "drums", DRUMS[value], 1))
        elif kind == "for":
            notes += [Note(step, part, pitch + key.shift, int(value)) for part, pitch in pitched]
            pitched = []
        elif kind in _PITCHED:
            pitched.append((kind, int(value)))
        else:
            raise ValueError(f"{token(kind, value)} is not allowed in a bar")
    return Bar(section, int(place), int(loudness), tuple(chords), tuple(sorted(notes)))


def _parsed(tokens: Sequence[str]) -> list[tuple[str, str]]:
    try:
        return [_PARSED[symbol] for symbol in tokens]
    except KeyError as unknown:
        raise ValueError(f"{unknown} is not a music token") from None


def decode(tokens: Sequence[str]) -> Piece:
    """Decode a piece. Raise ``ValueError`` if it is invalid."""
    if len(tokens) < 2 or tokens[0] != TUNE or tokens[-1] != END:
        raise ValueError(f"a tune starts with {TUNE} and ends with {END}")
    head, rest = tokens[1 : 1 + len(HEADER)], tokens[1 + len(HEADER) : -1]
    piece = decode_header(head)
    begins = [
        place for place, symbol in enumerate(rest) if _PARSED.get(symbol, ("",))[0] in SECTIONS
    ]
    if rest and begins[:1] != [0]:
        raise ValueError(f"{rest[0]} precedes the first bar")
    ends = [*begins[1:], len(rest)]
    bars = tuple(
        decode_bar(rest[begin:end], piece.key) for begin, end in zip(begins, ends, strict=True)
    )
    return Piece(
        piece.mood,
        piece.key,
        piece.metre,
        piece.tempo,
        piece.lead,
        piece.chords,
        piece.bass,
        piece.drums,
        bars,
    )


# --- Grammar -------------------------------------------------------------------------------------

_AT: Final = tuple(token("at", step) for step in range(_STEPS_MAX))
_CHORDS: Final = tuple(symbol for symbol in TOKENS if _PARSED[symbol][0] == "chord")
_PITCHES: Final[dict[str, tuple[str, ...]]] = {
    part: tuple(token(part, pitch) for pitch in RANGES[part]) for part in _PITCHED
}
_DRUM: Final = tuple(token("drum", name) for name in sorted(DRUMS, key=lambda name: DRUMS[name]))
_FOR: Final = tuple(token("for", steps) for steps in LENGTHS)
_LOUD: Final = tuple(token("loud", level) for level in LOUDNESS)
_BAR: Final = tuple(symbol for symbol in TOKENS if _PARSED[symbol][0] in SECTIONS)
_VOICES_MAX: Final = 4
_ORDER: Final = ("chord", *_PITCHED, "drum")


class Grammar:
    """Tokens allowed after those that were pushed, from ``<tune>`` on."""

    def __init__(self) -> None:
        self._header = list(HEADER)
        self._bar = METRES["4/4"].bar
        self._drums = True
        self._step = -1
        self._last: tuple[str, str] = ("", "")
        self._group = 0
        """Number of pitches so far in the current chord of notes."""
        self._stage = 0
        """Index into ``_ORDER`` of what can follow at the current position."""

    def allowed(self) -> tuple[str, ...]:
        if self._header:
            field = self._header[0]
            return tuple(token(field, value) for value in HEADER[field])
        kind, value = self._last
        if kind in SECTIONS:
            return _LOUD
        if kind == "loud":
            return _AT[:1]
        if kind == "at" and self._step == 0:
            return _CHORDS
        if kind in _PITCHED:
            higher = _PITCHES["chords"][int(value) + 1 - RANGES["chords"].start :]
            more = kind == "chords" and self._group < _VOICES_MAX
            return (*_FOR, *higher) if more else _FOR
        if kind in ("end", "drums-by"):
            return _BAR if kind == "drums-by" else ()
        return self._next(kind, value)

    def _next(self, kind: str, value: str) -> tuple[str, ...]:
        symbols: list[str] = []
        for part in _ORDER[self._stage :]:
            if part == "chord":
                symbols += _CHORDS
            elif part in _PITCHED:
                symbols += _PITCHES[part]
            elif self._drums:
                symbols += _DRUM[_DRUM.index(token(kind, value)) + 1 :] if kind == "drum" else _DRUM
        if kind == "at":
            return tuple(symbols)
        return (*symbols, *_AT[self._step + 1 : self._bar], *_BAR, END)

    def push(self, symbol: str) -> None:
        kind, value = _PARSED[symbol]
        if self._header:
            assert kind == self._header.pop(0), symbol
            if kind == "metre":
                self._bar = METRES[value].bar
            elif kind == "drums-by":
                self._drums = value != "none"
        elif kind in SECTIONS:
            self._step = -1
        elif kind == "at":
            self._step, self._stage = int(value), 0
        elif kind in _PITCHED:
            self._group = self._group + 1 if kind == self._last[0] else 1
            self._stage = _ORDER.index(kind) + 1
        elif kind in ("chord", "drum"):
            self._stage = 1 if kind == "chord" else _ORDER.index("drum")
        self._last = kind, value


def trim(bars: Sequence[Bar], bar_steps: int) -> list[list[tuple[int, Note]]]:
    """Return the notes of each bar with their ends, in sixteenths from the start of the piece.

    A note ends where the same pitch is played again, in lead and bass where the next note starts,
    and at the latest at the end of the piece.
    """
    ends: dict[tuple[str, int], int] = {}
    total = len(bars) * bar_steps
    trimmed: list[list[tuple[int, Note]]] = []
    for index in range(len(bars) - 1, -1, -1):
        notes_here = []
        for note in sorted(bars[index].notes, reverse=True):
            start = index * bar_steps + note.start
            voice = (note.part, note.pitch if note.part in ("chords", "drums") else 0)
            notes_here.append((min(start + note.steps, ends.get(voice, total)), note))
            ends[voice] = start
        trimmed.append(notes_here[::-1])
    return trimmed[::-1]
