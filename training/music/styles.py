"""The style of each mood: keys, tempos, harmony, instruments and accompaniment.

The tables are in ``styles.yaml``; ``tunes`` composes by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec.yaml

from workers.engines.music.notes import Chord


@dataclass(frozen=True, slots=True)
class Harmony:
    """Phrases of four bars; a bar can have two chords, joined by a plus."""

    loops: tuple[str, ...]
    """Phrases of the first section; none ends on the tonic."""
    closes: tuple[str, ...]
    """Last two bars of a phrase that ends on the tonic."""
    others: tuple[str, ...]
    """Phrases of the second section; the dominant replaces the last bar before the first section
    returns."""
    dominant: str


@dataclass(frozen=True, slots=True)
class Style:
    minor: float
    """Probability of a minor key."""
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
    """Liveliness of the melody's rhythm: 0, 1 or 2."""
    loudness: int
    height: int
    """Height of the melody, in scale degrees above the tonic over middle C."""
    short: bool = False
    """Whether the melody is played staccato."""


@dataclass(frozen=True, slots=True)
class Tables:
    """``styles.yaml``."""

    roman: dict[str, Chord]
    """Chords by their degree, in major and minor."""
    harmonies: dict[str, Harmony]
    styles: dict[str, Style]
    """Styles by mood."""
    rhythms: dict[str, tuple[tuple[tuple[int, ...], ...], ...]]
    """Cells of a melody's rhythm by metre and liveliness, in sixteenths: half a bar each, in 3/4 a
    whole one."""
    beats: dict[str, dict[str, dict[str, tuple[int, ...]]]]
    """Strokes of each drum by beat and metre, in sixteenths of a bar."""


_TABLES: Final = msgspec.yaml.decode(
    Path(__file__).with_name("styles.yaml").read_bytes(), type=Tables
)
ROMAN: Final = _TABLES.roman
STYLES: Final = _TABLES.styles
RHYTHMS: Final = _TABLES.rhythms
BEATS: Final = _TABLES.beats
