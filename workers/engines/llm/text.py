"""From token ids to text as it grows: whole characters only, and stop strings never shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_INCOMPLETE: Final = "\ufffd"
"""What a decoder shows for bytes that are not a whole character yet."""


class TextStream:
    """The text of one sequence. ``push`` gives what may be shown now, ``flush`` the rest.

    Text that may turn out to begin a stop string is held back until it is known.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0
        self._done = 0
        self._held = ""
        self.received = 0
        """Characters that the tokens came to so far, shown or not."""
        self.stopped = False

    @property
    def withholds(self) -> bool:
        """Whether there is text, or part of a character, that may still be shown."""
        return not self.stopped and (bool(self._held) or self._done < len(self._ids))

    def push(self, token: int) -> str:
        """Add a token; after a stop string was found nothing comes any more."""
        self._ids.append(token)
        # A few tokens of context are decoded again each time: some vocabularies put the blank
        # between two words into neither of them.
        before = self._decode(self._ids[self._start : self._done])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """Give what is still held at the end, an incomplete character included."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._start : self._done])
        rest = self._decode(self._ids[self._start :])[len(before) :]
        self._start = self._done = len(self._ids)
        text = self._release(rest)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _release(self, text: str) -> str:
        self.received += len(text)
        text = self._held + text
        self._held = ""
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        if keep:
            self._held = text[-keep:]
            text = text[:-keep]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
