"""Guesses what comes next from what was said before: prompt lookup, which costs no model.

Where an answer repeats what stands in its prompt or in itself (a quotation, a list, code), the
tokens that followed the same few tokens there are likely to follow here. Pure; a guess that is
wrong costs time and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LENGTHS: Final = (3, 2)
"""So many tokens must be the same; the longer is tried first."""


class PromptLookup:
    """The tokens of one sequence, with where each few of them were seen last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        for length in LENGTHS:
            if len(self._tokens) >= length:
                self._after[tuple(self._tokens[-length:])] = len(self._tokens)
        self._tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """At most ``count`` tokens that came the last time; none if this was never said before."""
        for length in LENGTHS:
            place = self._after.get(tuple(self._tokens[-length:]))
            if place is not None:
                return self._tokens[place : place + count]
        return []
