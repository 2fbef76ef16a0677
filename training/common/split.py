"""Splits contents into those that training sees and those that only the scorer asks for.

A content is what an example is about: a pair of numbers, a word with a phrasing, a name, a caption.
Its hash decides, so the generator and the scorer agree without a list, whatever the seed. An
example about a held-out content is never in the training data, in whatever words it is asked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, TypeVar

Content: TypeAlias = tuple[str | int, ...]
"""Kind of the content, then the content itself."""

HELD_OUT_SHARE: Final = 1 / 8
"""Share of the contents of each kind that training never sees."""


class Example(Protocol):
    @property
    def content(self) -> Content | None:
        """Content by which the example is held out; None if it never is."""


E = TypeVar("E", bound=Example)


def is_held_out(content: Content | None) -> bool:
    if content is None:
        return False
    digest = hashlib.sha256("\x1f".join(map(str, content)).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def choose(make: Callable[[], E], *, held_out: bool = False) -> E:
    """Make examples until one is on the requested side of the split."""
    while is_held_out((made := make()).content) is not held_out:
        pass
    return made


def drawn(make: Callable[[random.Random], Example], count: int) -> frozenset[Content]:
    """Return the contents of ``count`` samples, to estimate what older weights were trained on.

    Weights that are older than the split were trained on random contents, so some of what is scored
    is among them.
    """
    r = random.Random(1)
    found = (make(r).content for _ in range(count))
    return frozenset(content for content in found if content is not None)
