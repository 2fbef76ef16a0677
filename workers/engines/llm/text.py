"""Converts token ids to text incrementally: whole characters only, never part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_INCOMPLETE: Final = "\ufffd"
"""What a decoder returns for bytes that are not a complete character yet."""


class TextStream:
    """The text of one sequence. ``push`` returns text that can be emitted, ``flush`` the rest.

    Text that could be the start of a stop string is withheld until that is known.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0
        self._done = 0
        self._withheld = ""
        self.decoded = 0
        """Characters decoded so far, withheld ones included."""
        self.stopped = False

    @property
    def withholds(self) -> bool:
        """Whether text, or part of a character, might still be emitted."""
        return not self.stopped and (bool(self._withheld) or self._done < len(self._ids))

    def push(self, token: int) -> str:
        """Add a token and return new text. Not to be called after a stop string was found."""
        self._ids.append(token)
        # The previous tokens are decoded again as context: in some vocabularies the space between
        # two words belongs to neither.
        before = self._decode(self._ids[self._start : self._done])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """Return the text still withheld at the end, including an incomplete character."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._start : self._done])
        rest = self._decode(self._ids[self._start :])[len(before) :]
        self._start = self._done = len(self._ids)
        text = self._release(rest)
        held, self._withheld = self._withheld, ""
        return text if self.stopped else text + held

    def _release(self, text: str) -> str:
        self.decoded += len(text)
        text = self._withheld + text
        self._withheld = ""
        found = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        if keep:
            self._withheld = text[-keep:]
            text = text[:-keep]
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
