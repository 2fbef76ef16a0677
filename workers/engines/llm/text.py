"""Converts token ids to text incrementally: whole characters only, never part of a stop string.

Also separates the thoughts of a reasoning model from its answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Literal, TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_CONTEXT_MAX: Final = 8
"""Tokens decoded together, as context of the next one, before they are forgotten."""
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
        self._before = ""
        """Text of the tokens from ``_start`` to ``_done``."""
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
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(self._before) or after.endswith(_INCOMPLETE):
            return ""
        text = after[len(self._before) :]
        done, self._done, self._before = self._done, len(self._ids), after
        if self._done - self._start >= _CONTEXT_MAX:
            self._start = done
            self._before = self._decode(self._ids[done:])
        return self._release(text)

    def flush(self) -> str:
        """Return the text still withheld at the end, including an incomplete character."""
        if self.stopped:
            return ""
        rest = self._decode(self._ids[self._start :])[len(self._before) :]
        self._start, self._done, self._before = len(self._ids), len(self._ids), ""
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


MARKS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
)
"""What models write around their thoughts."""


def marks_of(template: str, tokens: Collection[str]) -> tuple[str, str] | None:
    """Return the marks in a chat template or among a tokenizer's own tokens, if there are any."""
    for begin, end in MARKS:
        if end in template or (begin in tokens and end in tokens):
            return begin, end
    return None


class ThoughtReader:
    """Separates thoughts at the beginning of an answer from the rest of it.

    ``inside``: whether the prompt has begun them already. Text that could be part of a mark is
    withheld until that is known. Line breaks around thoughts belong to the marks.
    """

    def __init__(self, marks: tuple[str, str], *, inside: bool) -> None:
        self._begin, self._end = marks
        self._held = ""
        self._state: Literal["before", "inside", "after", "done"] = "inside" if inside else "before"
        self._trims = inside

    @property
    def inside(self) -> bool:
        return self._state == "inside"

    def push(self, text: str) -> tuple[str, str]:
        """Return new thoughts, and new text of the answer."""
        thoughts, self._held, text = "", "", self._held + text
        if self._state == "before":
            ahead = text.lstrip()
            if ahead.startswith(self._begin):
                text, self._state, self._trims = ahead[len(self._begin) :], "inside", True
            elif self._begin.startswith(ahead):
                self._held = text
                return "", ""
            else:
                self._state = "done"
        if self._state == "inside":
            if self._trims:
                text = text.lstrip("\n")
                self._trims = not text
            thoughts, mark, text = text.partition(self._end)
            if mark:
                thoughts, self._state = thoughts.rstrip("\n"), "after"
            else:
                keep = max(overlap(thoughts, self._end), 0)
                kept = thoughts[: len(thoughts) - keep].rstrip("\n")
                self._held = thoughts[len(kept) :]
                return kept, ""
        if self._state == "after":
            text = text.lstrip("\n")
            if text:
                self._state = "done"
        return thoughts, text

    def flush(self) -> tuple[str, str]:
        """Return what was withheld at the end."""
        held, self._held = self._held, ""
        return (held, "") if self.inside else ("", held)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
