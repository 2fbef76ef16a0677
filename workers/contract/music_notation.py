"""Key, tempo and metre as prompts for music write them.

The engine replaces them by tokens, and the gateway does not report them as unknown words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

KEY: Final = re.compile(
    r"\b([a-g])(?:\s?(#|♯|b|♭)|[\s-](sharp|flat))?[\s-]?(major|minor|maj|min)\b"
)
TEMPO: Final = re.compile(r"\b(\d{2,3})\s*(?:bpm|beats per minute|beats a minute)\b")
METRE: Final = re.compile(r"\b(4/4|3/4|6/8)(?!\d)")
_NO_ARTICLE: Final = re.compile(r"(?:\bin|\bof|\bkey|\bkey is|[,:;(])\s*$")


def find_key(text: str) -> re.Match[str] | None:
    """Find the first key; a single ``a`` must not be an article."""
    for found in KEY.finditer(text):
        if found[1] != "a" or found[2] or found[3] or _NO_ARTICLE.search(text[: found.start()]):
            return found
    return None


NOTATION: Final[tuple[Callable[[str], re.Match[str] | None], ...]] = (
    find_key,
    TEMPO.search,
    METRE.search,
)
"""Each finds what is read first of its kind, in lower case; what follows is not understood."""
EXAMPLES: Final = ("C major", "F# minor", "90 bpm", "4/4", "3/4", "6/8")
