"""Names that resemble a misspelt one. Used on the way to a refusal only."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

WORD_MAX: Final = 100
"""Maximum characters of a word that is compared; nobody misspells a longer one."""
OPTIONS_MAX: Final = 2000


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Return the option that a word most likely means, or None. Case does not matter.

    An option that begins with the word is nearest, the shortest first; then the most similar one.
    """
    folded = {option.lower(): option for option in islice(options, OPTIONS_MAX)}
    asked = word.lower()
    if not asked or len(asked) > WORD_MAX:
        return None
    begun = [option for option in folded if option.startswith(asked)]
    found = sorted(begun, key=len) or difflib.get_close_matches(asked, folded, n=1)
    return folded[found[0]] if found else None


def did_you_mean(word: str, options: Collection[str]) -> str:
    """Return the end of a message about an unknown word: a suggestion and what is accepted."""
    accepted = f"accepted: {', '.join(options)}" if options else "nothing is accepted"
    found = nearest(word, options)
    return f"did you mean {found}? ({accepted})" if found is not None else accepted
