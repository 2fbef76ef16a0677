"""How well the pocket music model keeps to what it is told, judged by a listener.

    python -m workers.pocket.score_music workers/pocket/music --count 40

Captions are of tunes from a seed that training never uses. Key and tempo are kept by construction
where they are told; what is measured is whether the notes are in that key, and the sound in time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from workers.pocket.hearing import (
    Features,
    features,
    fits,
    in_scale,
    is_near,
    keys_of,
    pitch_classes,
    tempo_of,
)
from workers.pocket.notes import MOODS, Piece
from workers.pocket.synth import render
from workers.pocket.tune_words import caption, read
from workers.pocket.tunes import tune
from workers.pocket.writer import Order, Writer

HELD_OUT: Final = 1_000_003
_RATE: Final = 44_100
_TUNES: Final = 40
"""Of each mood, to learn what is usual in it."""


def moods_of(piece: Piece) -> list[str]:
    """All moods, that first whose tunes a piece is most like."""
    r = random.Random(0)
    known = {mood: [features(tune(r, mood=mood, bars=10)) for _ in range(_TUNES)] for mood in MOODS}
    heard = features(piece)
    return sorted(MOODS, key=lambda mood: _distance(heard, known[mood]))


@cache
def _usual() -> dict[str, list[Features]]:
    r = random.Random(0)
    return {mood: [features(tune(r, mood=mood, bars=10)) for _ in range(_TUNES)] for mood in MOODS}


def _distance(heard: Features, known: list[Features]) -> float:
    far = 0.0
    for value, usual in zip(heard, zip(*known, strict=True), strict=True):
        spread = statistics.pstdev(usual) + 0.15 * max(1.0, abs(statistics.fmean(usual)))
        far += ((value - statistics.fmean(usual)) / spread) ** 2
    return far


def score(writer: Writer, count: int, *, seconds: float = 24) -> dict[str, float]:
    """Shares, of pieces that are written to held-out captions."""
    marks: dict[str, list[float]] = defaultdict(list)
    for number in range(count):
        r = random.Random(f"{HELD_OUT}/{number}")
        wanted = tune(r)
        said = caption(wanted, r)
        writing = writer.begin(Order(said, seconds=seconds, seed=number))
        head = writing.head
        piece = replace(head, bars=tuple(writing.bars()))
        told = read(said)
        if told.key is not None:
            marks["told its key"].append(head.key == told.key)
        marks["notes in the scale"].append(in_scale(piece))
        marks["key heard"].append(is_near(keys_of(pitch_classes(piece))[0], head.key))
        marks["lead as in the tune of the caption"].append(head.lead == wanted.lead)
        marks["mood as in the tune of the caption"].append(head.mood == wanted.mood)
        marks["mood heard among the two likeliest"].append(head.mood in moods_of(piece)[:2])
        marks["comes home"].append(piece.bars[-1].chords[-1][1].root == 0)
        tempo = tempo_of(render(piece, rate=_RATE), _RATE)
        marks["tempo heard"].append(fits(tempo, head.tempo))
    return {name: round(statistics.fmean(values), 3) for name, values in marks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    print(json.dumps(score(Writer(options.directory), options.count), indent=2))


if __name__ == "__main__":
    main()
