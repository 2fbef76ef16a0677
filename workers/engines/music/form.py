"""The form of a tune: its sections for a number of bars, and the number of bars for a length."""

from __future__ import annotations

from typing import Final

from workers.engines.music.notes import METRES

PHRASE: Final = 4
"""Bars in a phrase."""
RING: Final = 1.0
"""Seconds reserved at the end of a piece for notes that ring on."""


def plan(bars: int) -> tuple[tuple[str, int], ...]:
    """Return the section and place of each bar; the tune is complete for any number from 1."""
    if bars <= PHRASE:
        return (*(("a", place) for place in range(1, bars)), ("outro", 1))
    edges_min = 1 if bars < 12 else 2
    phrases = (bars - edges_min) // PHRASE
    edges = bars - phrases * PHRASE
    outro = 1 if edges < 4 else 2
    kinds = ["ab"[index // 2 % 2] for index in range(phrases)]
    kinds[-1] = "a"
    if phrases == 3:
        kinds[1] = "b"
    made = [("intro", place) for place in range(1, edges - outro + 1)]
    for kind in kinds:
        first = PHRASE + 1 if made and made[-1] == (kind, PHRASE) else 1
        made += [(kind, place) for place in range(first, first + PHRASE)]
    return (*made, *(("outro", place) for place in range(1, outro + 1)))


def bars_for(seconds: float, metre: str, tempo: float) -> int:
    """Return the number of bars that fit before ``RING``; 0 if not even one does."""
    return max(0, int((seconds - RING) * tempo / 60 / METRES[metre].beats + 1e-9))
