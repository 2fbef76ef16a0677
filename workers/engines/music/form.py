"""The form of a tune: its sections at any length, and how many bars there is time for."""

from __future__ import annotations

from typing import Final

from workers.engines.music.notes import METRES

PHRASE: Final = 4
"""Bars."""
RING: Final = 1.0
"""Seconds that are left at the end of a piece for what rings on."""


def plan(bars: int) -> tuple[tuple[str, int], ...]:
    """Section and place of each bar of a tune, which is complete at any length from 1 on."""
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
    """How many bars there is time for before the last chord rings on; none if one is too long."""
    return max(0, int((seconds - RING) * tempo / 60 / METRES[metre].beats + 1e-9))
