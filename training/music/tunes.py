"""Composes tunes by rule from a seed, to train the pocket music model.

A tune has an introduction, sections A, B and A, and an ending. Its harmony follows the mood and
ends in a cadence; chords are voiced with the smallest movement; the melody repeats and varies its
motifs. Key, tempo and everything else are known exactly. No third-party music is used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from training.music.styles import BEATS, RHYTHMS, ROMAN, STYLES, Harmony, Style
from workers.engines.music.form import PHRASE, plan
from workers.engines.music.notes import (
    DRUMS,
    LENGTHS,
    METRES,
    MOODS,
    RANGES,
    SCALES,
    SECTIONS,
    TEMPOS,
    Bar,
    Chord,
    Key,
    Note,
    Piece,
    fold,
)

_MIDDLE: Final = 60
_STEPS: Final = (-1, -1, -1, 1, 1, 1, -2, 2, 0, 3, -3)
"""Steps of a motif in scale degrees: mostly to a neighbour."""
_ARCH: Final = (0, 1, 2, 0)
"""Rise of a phrase, bar by bar."""


def outline(r: random.Random, *, mood: str | None = None) -> Piece:
    """Choose everything of a piece except its bars."""
    mood = mood or r.choice(MOODS)
    style = STYLES[mood]
    return Piece(
        mood=mood,
        key=Key(r.randrange(12), "minor" if r.random() < style.minor else "major"),
        metre=r.choice(style.metres),
        tempo=r.choice(range(style.tempos[0], style.tempos[1] + 1, TEMPOS.step)),
        lead=r.choice(style.leads),
        chords=r.choice(style.chords),
        bass=r.choice(style.basses),
        drums=r.choice(style.drums),
        bars=(),
    )


def tune(r: random.Random, *, bars: int | None = None, mood: str | None = None) -> Piece:
    """Compose a tune, by default of 6 to 30 bars."""
    head = outline(r, mood=mood)
    return compose(head, bars or r.choice((6, 8, 9, 10, 12, 14, 16, 18, 20, 22, 26, 30)), r)


def compose(head: Piece, bars: int, r: random.Random) -> Piece:
    """Compose the bars of a piece."""
    return replace(head, bars=_Composer(head, r).bars(plan(bars)))


@dataclass(slots=True)
class _Motif:
    rhythm: tuple[int, ...]
    """Lengths of the notes, which fill a bar."""
    moves: tuple[int, ...]
    """Steps from each note to the next, in degrees."""


@dataclass(slots=True)
class _Composer:
    head: Piece
    r: random.Random
    voicing: tuple[int, ...] = (52, 55, 60)
    bass: int = 36
    degree: int = 0
    """Degree of the melody's last note; 0 is the tonic over middle C."""
    style: Style = field(init=False)
    harmony: dict[str, list[str]] = field(init=False)
    motifs: dict[str, tuple[_Motif, _Motif]] = field(init=False)
    melodies: dict[tuple[str, int], list[Note]] = field(init=False)
    accompaniments: dict[str, str] = field(init=False)
    line: str = field(init=False)
    beat: str = field(init=False)
    order: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        r, style = self.r, STYLES[self.head.mood]
        self.style = style
        minor = self.head.key.mode == "minor"
        self.harmony = self._harmony(style.minor_harmony if minor else style.major_harmony)
        self.motifs = {section: (self._motif(), self._motif()) for section in "ab"}
        self.melodies = {}
        ways = style.accompaniments
        if self.head.chords in ("pad", "strings") and "hold" in ways:
            ways = (*ways, "hold", "hold")
        first = r.choice(ways)
        second = first if r.random() < 0.5 else r.choice(ways)
        self.accompaniments = {"intro": first, "a": first, "b": second, "outro": "hold"}
        self.line = r.choice(style.bass_lines)
        self.beat = r.choice(style.beats)
        self.order = r.choice(((0, 1, 2, 1), (0, 2, 1, 2), (0, 1, 2, 3), (2, 1, 0, 1)))
        self.degree = style.height

    @property
    def bar_steps(self) -> int:
        return METRES[self.head.metre].bar

    def bars(self, places: Sequence[tuple[str, int]]) -> tuple[Bar, ...]:
        chords = [
            self._chords(section, place, last=index == len(places) - 1)
            for index, (section, place) in enumerate(places)
        ]
        made = []
        seen: set[tuple[str, int]] = set()
        for index, (section, place) in enumerate(places):
            after = chords[index + 1][0][1] if index + 1 < len(chords) else chords[index][-1][1]
            last = index == len(places) - 1
            notes = [
                *self._lead(section, place, chords[index], again=(section, place) in seen),
                *self._accompany(section, chords[index]),
                *self._bass(chords[index], after, plain=section in ("intro", "outro")),
                *self._drums(section, place, last=last),
            ]
            seen.add((section, place))
            loudness = self.style.loudness + {"intro": -1, "b": 1, "outro": -1}.get(section, 0)
            level = min(4, max(1, loudness))
            shifted = sorted(self._in_key(note) for note in notes)
            made.append(Bar(section, place, level, chords[index], tuple(shifted)))
        return tuple(made)

    def _in_key(self, note: Note) -> Note:
        if note.part == "drums":
            return note
        return note._replace(pitch=fold(note.pitch, note.part) + self.head.key.shift)

    # --- Harmony ---------------------------------------------------------------------------------

    def _harmony(self, known: Harmony) -> dict[str, list[str]]:
        loop = self.r.choice(known.loops).split()
        close = self.r.choice(known.closes).split()
        other = self.r.choice(known.others).split()
        return {
            "a": [*loop, *loop[:2], *close],
            "b": [*other, *other[:3], known.dominant],
            "home": [close[0], close[1]],
        }

    def _chords(self, section: str, place: int, *, last: bool) -> tuple[tuple[int, Chord], ...]:
        if section == "outro":
            said = self.harmony["home"][1 if last else 0]
        else:
            said = self.harmony["b" if section == "b" else "a"][(place - 1) % SECTIONS["a"]]
        names = said.split("+")
        half = self.bar_steps // 2 if self.head.metre != "3/4" else 8
        return tuple(zip((0, half), (ROMAN[name] for name in names), strict=False))

    # --- Melody ----------------------------------------------------------------------------------

    def _motif(self) -> _Motif:
        cells = RHYTHMS[self.head.metre][self.style.liveliness]
        halves = 1 if self.head.metre == "3/4" else 2
        rhythm = tuple(length for _ in range(halves) for length in self.r.choice(cells))
        moves: list[int] = []
        for _ in rhythm[1:]:
            move = self.r.choice(_STEPS)
            if moves and abs(moves[-1]) > 2:
                # After a leap, a step back.
                move = -1 if moves[-1] > 0 else 1
            moves.append(move)
        return _Motif(rhythm, tuple(moves))

    def _lead(
        self, section: str, place: int, chords: Sequence[tuple[int, Chord]], *, again: bool
    ) -> list[Note]:
        if section == "intro":
            return []
        if section == "outro":
            return self._last_note(chords)
        if again:
            return self._varied(self.melodies[section, place], chords)
        within = (place - 1) % PHRASE
        repeated = (section, place - PHRASE)
        if place > PHRASE and within < 2 and repeated in self.melodies:
            notes = self.melodies[repeated]
        elif within == PHRASE - 1:
            notes = self._cadence(section, place, chords)
        else:
            notes = self._sing(section, within, chords)
        self.melodies[section, place] = notes
        return notes

    def _sing(self, section: str, within: int, chords: Sequence[tuple[int, Chord]]) -> list[Note]:
        """Place a motif over a bar's chords: chord tones on strong beats, neighbours between."""
        motif = self.motifs[section][within % 2]
        height = self.style.height + _ARCH[within] + (2 if section == "b" else 0)
        target = (self.degree + 2 * height) // 3
        degree = self._snap(target, chords[0][1])
        notes, start = [], 0
        for number, length in enumerate(motif.rhythm):
            chord = _chord_at(chords, start)
            if number:
                degree = self._within(degree + motif.moves[number - 1])
            if start % METRES[self.head.metre].steps == 0 or length >= 4:
                degree = self._snap(degree, chord)
            notes.append(self._note(start, degree, length, chord))
            start += length
        self.degree = degree
        return notes

    def _cadence(self, section: str, place: int, chords: Sequence[tuple[int, Chord]]) -> list[Note]:
        """End a phrase on a chord tone or, to close it, on the tonic."""
        chord = chords[0][1]
        closes = section == "a" and place == SECTIONS["a"]
        degree = 7 * round(self.degree / 7) if closes else self._snap(self.degree, chord)
        bar = self.bar_steps
        if closes or self.style.liveliness == 0 or self.r.random() < 0.4:
            self.degree = degree
            return [self._note(0, degree, bar - 4, chord)]
        half = METRES[self.head.metre].steps * (1 if self.head.metre != "4/4" else 2)
        first = self._snap(degree + self.r.choice((2, -2)), chord)
        end = _chord_at(chords, half)
        degree = self._snap(degree, end)
        self.degree = degree
        return [self._note(0, first, half, chord), self._note(half, degree, bar - half - 2, end)]

    def _last_note(self, chords: Sequence[tuple[int, Chord]]) -> list[Note]:
        self.degree = self._snap(self.degree, chords[0][1])
        if chords[0][1].root == 0:
            self.degree = 7 * round(self.degree / 7)
        return [self._note(0, self.degree, self.bar_steps, chords[0][1])]

    def _varied(self, notes: list[Note], chords: Sequence[tuple[int, Chord]]) -> list[Note]:
        """Repeat an earlier melody, with occasional ornaments."""
        scale = self._scale(chords[0][1])
        made: list[Note] = []
        for note in notes:
            if note.steps < 4 or note.steps > 6 or self.r.random() < 0.7:
                made.append(note)
                continue
            upper = next(
                (p for p in range(note.pitch + 1, note.pitch + 4) if (p - _MIDDLE) % 12 in scale),
                note.pitch,
            )
            cut = note.steps - 2
            made += [note._replace(steps=cut), Note(note.start + cut, "lead", upper, 2)]
        return made

    def _note(self, start: int, degree: int, length: int, chord: Chord) -> Note:
        scale = self._scale(chord)
        pitch = fold(_MIDDLE + 12 * (degree // 7) + scale[degree % 7], "lead")
        if self.style.short and length in (2, 4):
            length //= 2
        return Note(start, "lead", pitch, max(known for known in LENGTHS if known <= length))

    def _scale(self, chord: Chord) -> tuple[int, ...]:
        """Return the key's scale, with a raised seventh if the chord has the leading note."""
        scale = SCALES[self.head.key.mode]
        return (*scale[:6], 11) if 11 in chord.pitches else scale

    def _snap(self, degree: int, chord: Chord) -> int:
        """Return the nearest degree that belongs to a chord."""
        scale, wanted = self._scale(chord), chord.pitches
        near = [d for d in range(degree - 3, degree + 4) if scale[d % 7] in wanted]
        return self._within(min(near, key=lambda d: (abs(d - degree), d)))

    def _within(self, degree: int) -> int:
        """Reflect a degree at the limits of the melody's range."""
        low = max(-3, self.style.height - 5)
        high = low + 12
        if degree < low:
            return 2 * low - degree
        return 2 * high - degree if degree > high else degree

    # --- Accompaniment ---------------------------------------------------------------------------

    def _voice(self, chord: Chord) -> tuple[int, ...]:
        """Voice a chord in close position, as near as possible to the previous one."""
        pitches = sorted(chord.pitches)
        nearest: tuple[float, tuple[int, ...]] | None = None
        for turn in range(len(pitches)):
            for octave in (36, 48, 60):
                voices = [*pitches[turn:], *(p + 12 for p in pitches[:turn])]
                voiced = tuple(octave + p for p in voices)
                if voiced[0] < 46 or voiced[-1] > 70:
                    continue
                moved = sum(min(abs(p - q) for q in self.voicing) for p in voiced)
                cost = moved + 0.3 * abs(sum(voiced) / len(voiced) - 57)
                cost += 4 * any(q - p == 1 for p, q in pairwise(voiced))
                if nearest is None or cost < nearest[0]:
                    nearest = cost, voiced
        assert nearest is not None, chord
        self.voicing = nearest[1]
        return nearest[1]

    def _accompany(self, section: str, chords: Sequence[tuple[int, Chord]]) -> list[Note]:
        way = self.accompaniments[section]
        ends = [*(start for start, _ in chords[1:]), self.bar_steps]
        notes: list[Note] = []
        for (begin, chord), end in zip(chords, ends, strict=True):
            voiced = self._voice(chord)
            for number, (start, length) in enumerate(self._strikes(way, begin, end)):
                if way == "arpeggio":
                    index = self.order[number % len(self.order)] % len(voiced)
                    notes.append(Note(start, "chords", voiced[index], length))
                else:
                    notes += [Note(start, "chords", pitch, length) for pitch in voiced]
        return notes

    def _strikes(self, way: str, begin: int, end: int) -> list[tuple[int, int]]:
        """Return starts and lengths of an accompaniment's notes between two steps."""
        beat = METRES[self.head.metre].steps
        if way == "hold":
            return [(begin, end - begin)]
        if way == "pulse":
            return [(start, beat) for start in range(begin, end, beat)]
        if way == "arpeggio":
            return [(start, 2) for start in range(begin, end, 2)]
        if way == "offbeat":
            if self.head.metre == "4/4":
                return [(start + 2, 2) for start in range(begin, end, 4)]
            off = (4, 8) if self.head.metre == "3/4" else (2, 4, 8, 10)
            return [(start, 2) for start in off if begin <= start < end]
        if way == "gallop":
            cell = ((0, 2), (2, 1), (3, 1)) if beat == 4 else ((0, 2), (2, 2), (4, 2))
            return [(start + at, n) for start in range(begin, end, beat) for at, n in cell]
        starts = [at for at in _STRUM[self.head.metre] if begin <= at < end]
        return [(at, after - at) for at, after in zip(starts, [*starts[1:], end], strict=True)]

    def _bass(
        self, chords: Sequence[tuple[int, Chord]], after: Chord, *, plain: bool
    ) -> list[Note]:
        line = "long" if plain else self.line
        ends = [*(start for start, _ in chords[1:]), self.bar_steps]
        followers = [*(chord for _, chord in chords[1:]), after]
        beat = METRES[self.head.metre].steps
        notes: list[Note] = []
        for (begin, chord), end, follower in zip(chords, ends, followers, strict=True):
            root = _near(chord.root, self.bass)
            fifth = _near(chord.pitches[2], root + 3)
            self.bass = root
            if line == "long":
                notes.append(Note(begin, "bass", root, end - begin))
            elif line == "fifths":
                middle = begin + (end - begin) // 2 // beat * beat
                notes.append(Note(begin, "bass", root, (middle or end) - begin or end - begin))
                if middle > begin:
                    notes.append(Note(middle, "bass", fifth, end - middle))
            elif line == "walk":
                way = (root, _near(chord.pitches[1], root + 2), fifth)
                beats = list(range(begin, end, beat))
                for number, start in enumerate(beats):
                    pitch = way[number % 3]
                    if number == len(beats) - 1 and number:
                        pitch = self._approach(_near(follower.root, root), pitch)
                    notes.append(Note(start, "bass", pitch, beat))
            else:
                every = beat if line == "beats" else 2
                for number, start in enumerate(range(begin, end, every)):
                    high = line == "octaves" and number % 2 == 1
                    notes.append(Note(start, "bass", root + 12 * high, every))
        return notes

    def _approach(self, goal: int, pitch: int) -> int:
        """Return the scale neighbour of the next root, on the side that the line comes from."""
        scale = SCALES[self.head.key.mode]
        ways = range(goal - 1, goal - 3, -1) if pitch < goal else range(goal + 1, goal + 3)
        return next((p for p in ways if p % 12 in scale), pitch)

    def _drums(self, section: str, place: int, *, last: bool) -> list[Note]:
        if self.head.drums == "none" or section == "intro":
            return []
        struck = {drum: set(at) for drum, at in BEATS[self.beat][self.head.metre].items()}
        if last:
            struck = {"kick": {0}, "crash": {0}}
        elif place == 1 and self.style.loudness > 2:
            struck.setdefault("crash", set()).add(0)
        elif place % PHRASE == 0 and self.beat != "soft":
            fill = self.bar_steps - METRES[self.head.metre].steps
            struck = {drum: {at for at in known if at < fill} for drum, known in struck.items()}
            struck.setdefault("snare", set()).update({fill, fill + 1})
            struck.setdefault("high-tom", set()).add(fill + 2)
            struck.setdefault("low-tom", set()).add(fill + 3)
        return [Note(at, "drums", DRUMS[drum], 1) for drum, known in struck.items() for at in known]


_STRUM: Final = {"4/4": (0, 4, 6, 10, 12), "3/4": (0, 4, 6, 8), "6/8": (0, 4, 6, 10)}


def _chord_at(chords: Sequence[tuple[int, Chord]], step: int) -> Chord:
    return [chord for start, chord in chords if start <= step][-1]


def _near(pitch_class: int, other: int) -> int:
    """Return the bass pitch of a pitch class that is nearest to another pitch."""
    allowed = [p for p in RANGES["bass"] if p % 12 == pitch_class % 12 and 28 <= p <= 50]
    return min(allowed, key=lambda p: (abs(p - other), p))
