"""What each mood of tunes sounds like: keys, tempos, harmony, instruments, ways to accompany.

Tables only; ``tunes`` composes by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.engines.music.notes import Chord

ROMAN: Final = {
    "I": Chord(0, "maj"),
    "Imaj7": Chord(0, "maj7"),
    "ii": Chord(2, "min"),
    "ii7": Chord(2, "min7"),
    "iii": Chord(4, "min"),
    "IV": Chord(5, "maj"),
    "IVmaj7": Chord(5, "maj7"),
    "V": Chord(7, "maj"),
    "V7": Chord(7, "7"),
    "Vsus": Chord(7, "sus"),
    "vi": Chord(9, "min"),
    "vi7": Chord(9, "min7"),
    "i": Chord(0, "min"),
    "i7": Chord(0, "min7"),
    "iidim": Chord(2, "dim"),
    "III": Chord(3, "maj"),
    "iv": Chord(5, "min"),
    "iv7": Chord(5, "min7"),
    "v": Chord(7, "min"),
    "VI": Chord(8, "maj"),
    "VImaj7": Chord(8, "maj7"),
    "VII": Chord(10, "maj"),
}
"""Chords by their degree, of major and minor alike."""


@dataclass(frozen=True, slots=True)
class Harmony:
    """Phrases of four bars; a bar may have two chords, joined by a plus."""

    loops: tuple[str, ...]
    """Of the first section; none ends on the tonic."""
    closes: tuple[str, ...]
    """The last two bars of a phrase that comes home."""
    others: tuple[str, ...]
    """Of the second section; its last bar is replaced by the dominant before the first returns."""
    dominant: str


@dataclass(frozen=True, slots=True)
class Style:
    minor: float
    """How often it is in minor."""
    tempos: tuple[int, int]
    metres: tuple[str, ...]
    major_harmony: Harmony
    minor_harmony: Harmony
    leads: tuple[str, ...]
    chords: tuple[str, ...]
    basses: tuple[str, ...]
    drums: tuple[str, ...]
    beats: tuple[str, ...]
    accompaniments: tuple[str, ...]
    bass_lines: tuple[str, ...]
    liveliness: int
    """Of the melody's rhythm: 0, 1 or 2."""
    loudness: int
    height: int
    """Where the melody lies, in steps of the scale above the tonic over middle C."""
    short: bool = False
    """Whether notes of the melody are cut short."""


_BRIGHT: Final = Harmony(
    loops=("I V vi IV", "I vi IV V", "I IV I V", "I iii IV V", "I IV ii V"),
    closes=("IV+V I", "V I", "ii+V7 I", "IV I"),
    others=("vi IV I V", "IV V iii vi", "IV I ii V", "ii V I vi"),
    dominant="V",
)
_SOFT: Final = Harmony(
    loops=("Imaj7 IVmaj7 Imaj7 IV", "Imaj7 vi7 IVmaj7 V", "I iii vi7 IV", "Imaj7 ii7 IV Vsus"),
    closes=("IV I", "ii7+V I", "Vsus+V Imaj7", "IVmaj7 Imaj7"),
    others=("vi7 IV Imaj7 V", "IVmaj7 iii ii7 V", "ii7 IV vi7 Vsus"),
    dominant="V",
)
_GRAVE: Final = Harmony(
    loops=("i VI iv V", "i iv VI V", "i VII VI V", "i v VI iv", "i VI III VII"),
    closes=("iv+V i", "V i", "iv i", "VI+V7 i"),
    others=("VI III VII iv", "III VII iv VI", "iv VII III VI", "VI VII v iv"),
    dominant="V",
)
_WIDE: Final = Harmony(
    loops=("i VI III VII", "i VII VI VII", "i III VII iv", "i iv VI VII"),
    closes=("VI+VII i", "VII i", "iv+V i"),
    others=("VI VII i III", "VI III VII v", "iv VI III VII"),
    dominant="V",
)
_MISTY: Final = Harmony(
    loops=("i7 VImaj7 III VII", "i7 iv7 VImaj7 v", "i VImaj7 iv7 VII"),
    closes=("iv7 i7", "VII i7", "iv7+v i"),
    others=("VImaj7 VII v iv7", "III VII iv7 VImaj7"),
    dominant="v",
)
_UNEASY: Final = Harmony(
    loops=("i i VI V", "i iidim i V", "i VI iidim V", "i iv iidim V"),
    closes=("iidim+V i", "V7 i", "V i"),
    others=("iv iidim VI V", "VI iidim iv V", "VI v iv V"),
    dominant="V",
)

STYLES: Final = {
    "happy": Style(
        minor=0.04,
        tempos=(104, 144),
        metres=("4/4", "4/4", "4/4", "6/8"),
        major_harmony=_BRIGHT,
        minor_harmony=_WIDE,
        leads=("piano", "guitar", "flute", "synth", "marimba", "violin"),
        chords=("piano", "guitar", "organ", "strings"),
        basses=("electric", "upright", "synth-bass"),
        drums=("kit", "kit", "electronic", "none"),
        beats=("rock", "four"),
        accompaniments=("strum", "offbeat", "arpeggio", "pulse"),
        bass_lines=("fifths", "eighths", "walk"),
        liveliness=2,
        loudness=3,
        height=6,
    ),
    "playful": Style(
        minor=0.1,
        tempos=(112, 160),
        metres=("4/4", "4/4", "6/8", "3/4"),
        major_harmony=_BRIGHT,
        minor_harmony=_WIDE,
        leads=("marimba", "flute", "bells", "piano", "guitar"),
        chords=("piano", "guitar", "organ", "harp"),
        basses=("upright", "electric"),
        drums=("none", "kit", "kit"),
        beats=("light", "rock"),
        accompaniments=("offbeat", "offbeat", "arpeggio"),
        bass_lines=("fifths", "walk"),
        liveliness=2,
        loudness=2,
        height=7,
        short=True,
    ),
    "epic": Style(
        minor=0.75,
        tempos=(84, 132),
        metres=("4/4", "4/4", "4/4", "6/8"),
        major_harmony=_BRIGHT,
        minor_harmony=_WIDE,
        leads=("violin", "organ", "synth", "violin"),
        chords=("strings", "strings", "organ", "pad"),
        basses=("cello", "synth-bass", "electric"),
        drums=("kit", "kit", "electronic"),
        beats=("march", "four"),
        accompaniments=("pulse", "hold", "gallop"),
        bass_lines=("eighths", "beats", "fifths"),
        liveliness=1,
        loudness=4,
        height=5,
    ),
    "dreamy": Style(
        minor=0.3,
        tempos=(60, 96),
        metres=("4/4", "3/4", "6/8"),
        major_harmony=_SOFT,
        minor_harmony=_MISTY,
        leads=("bells", "flute", "piano", "synth"),
        chords=("pad", "harp", "strings", "guitar"),
        basses=("cello", "synth-bass", "upright"),
        drums=("none", "none", "electronic"),
        beats=("light", "soft"),
        accompaniments=("hold", "arpeggio"),
        bass_lines=("long",),
        liveliness=1,
        loudness=2,
        height=7,
    ),
    "calm": Style(
        minor=0.35,
        tempos=(58, 90),
        metres=("4/4", "4/4", "3/4", "6/8"),
        major_harmony=_SOFT,
        minor_harmony=_MISTY,
        leads=("piano", "flute", "guitar", "violin", "bells"),
        chords=("piano", "strings", "guitar", "harp", "pad"),
        basses=("upright", "cello"),
        drums=("none", "none", "none", "kit"),
        beats=("soft",),
        accompaniments=("arpeggio", "hold", "arpeggio"),
        bass_lines=("long", "fifths"),
        liveliness=0,
        loudness=2,
        height=5,
    ),
    "sad": Style(
        minor=0.95,
        tempos=(54, 84),
        metres=("4/4", "4/4", "3/4", "6/8"),
        major_harmony=_SOFT,
        minor_harmony=_GRAVE,
        leads=("violin", "piano", "flute", "guitar"),
        chords=("strings", "piano", "guitar", "harp"),
        basses=("cello", "upright"),
        drums=("none", "none", "none", "kit"),
        beats=("soft",),
        accompaniments=("arpeggio", "hold", "pulse"),
        bass_lines=("long", "fifths"),
        liveliness=0,
        loudness=2,
        height=4,
    ),
    "dark": Style(
        minor=1.0,
        tempos=(56, 100),
        metres=("4/4", "4/4", "3/4"),
        major_harmony=_BRIGHT,
        minor_harmony=_UNEASY,
        leads=("organ", "violin", "synth", "piano"),
        chords=("pad", "strings", "organ"),
        basses=("cello", "synth-bass"),
        drums=("none", "kit", "electronic"),
        beats=("march", "soft"),
        accompaniments=("hold", "pulse"),
        bass_lines=("long", "beats"),
        liveliness=0,
        loudness=3,
        height=1,
    ),
    "tense": Style(
        minor=1.0,
        tempos=(116, 168),
        metres=("4/4", "4/4", "6/8"),
        major_harmony=_BRIGHT,
        minor_harmony=_UNEASY,
        leads=("synth", "violin", "piano", "marimba"),
        chords=("strings", "pad", "piano"),
        basses=("synth-bass", "electric", "cello"),
        drums=("electronic", "kit", "none"),
        beats=("four", "march"),
        accompaniments=("gallop", "arpeggio", "pulse"),
        bass_lines=("eighths", "octaves"),
        liveliness=1,
        loudness=3,
        height=3,
        short=True,
    ),
}

RHYTHMS: Final[dict[str, tuple[tuple[tuple[int, ...], ...], ...]]] = {
    "4/4": (
        ((8,), (6, 2), (4, 4), (4, 4), (8,)),
        ((4, 4), (6, 2), (4, 2, 2), (2, 2, 4), (8,)),
        ((2, 2, 2, 2), (4, 2, 2), (3, 3, 2), (2, 2, 4), (6, 2), (4, 4)),
    ),
    "3/4": (
        ((12,), (8, 4), (4, 8), (6, 2, 4)),
        ((8, 4), (4, 4, 4), (6, 2, 4), (4, 4, 2, 2)),
        ((4, 4, 4), (4, 2, 2, 4), (2, 2, 4, 4), (2, 2, 2, 2, 4)),
    ),
    "6/8": (
        ((6,), (4, 2), (6,)),
        ((4, 2), (6,), (2, 2, 2), (4, 2)),
        ((2, 2, 2), (4, 2), (3, 1, 2), (2, 4)),
    ),
}
"""Cells of a melody's rhythm by liveliness: halves of a bar, or in 3/4 all of it."""

BEATS: Final[dict[str, dict[str, dict[str, tuple[int, ...]]]]] = {
    "rock": {
        "4/4": {"kick": (0, 8, 10), "snare": (4, 12), "hat": (0, 2, 4, 6, 8, 10, 12, 14)},
        "3/4": {"kick": (0,), "snare": (4, 8), "hat": (0, 2, 4, 6, 8, 10)},
        "6/8": {"kick": (0,), "snare": (6,), "hat": (0, 2, 4, 6, 8, 10)},
    },
    "four": {
        "4/4": {"kick": (0, 4, 8, 12), "clap": (4, 12), "open-hat": (2, 6, 10, 14)},
        "3/4": {"kick": (0, 4, 8), "clap": (8,), "open-hat": (2, 6, 10)},
        "6/8": {"kick": (0, 6), "clap": (6,), "hat": (2, 4, 8, 10)},
    },
    "light": {
        "4/4": {"kick": (0, 8), "shaker": (2, 4, 6, 10, 12, 14)},
        "3/4": {"kick": (0,), "shaker": (4, 6, 8, 10)},
        "6/8": {"kick": (0,), "shaker": (2, 4, 6, 8, 10)},
    },
    "soft": {
        "4/4": {"kick": (0,), "ride": (0, 4, 8, 12), "snare": (8,)},
        "3/4": {"kick": (0,), "ride": (0, 4, 8)},
        "6/8": {"kick": (0,), "ride": (0, 4, 6, 10)},
    },
    "march": {
        "4/4": {"kick": (0, 8), "low-tom": (0, 6, 8, 14), "high-tom": (12,)},
        "3/4": {"kick": (0,), "low-tom": (0, 8), "high-tom": (4,)},
        "6/8": {"kick": (0, 6), "low-tom": (0, 4, 6), "high-tom": (10,)},
    },
}
"""What is struck when, in sixteenths of a bar."""
