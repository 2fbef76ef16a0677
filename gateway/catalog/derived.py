"""Results that depend on nothing but a catalog entry, computed once for each entry object.

Entries are immutable, and ``LiveCatalog`` returns the same object until a price or the file
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Final, TypeVar

from gateway.catalog.schema import CatalogEntry

T = TypeVar("T")

KEPT_MAX: Final = 4096
"""Maximum entries of each function; the least recently used is dropped first."""


class _Same:
    """An entry, compared by identity: comparing by value would read all of its fields."""

    __slots__ = ("entry",)

    def __init__(self, entry: CatalogEntry) -> None:
        self.entry = entry

    def __hash__(self) -> int:
        return id(self.entry)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.entry is other.entry


def once_per_entry(function: Callable[[CatalogEntry], T]) -> Callable[[CatalogEntry], T]:
    """Keep the results of a pure function. Callers must not change them."""

    @lru_cache(maxsize=KEPT_MAX)
    def kept(same: _Same) -> T:
        return function(same.entry)

    @wraps(function)
    def call(entry: CatalogEntry) -> T:
        return kept(_Same(entry))

    return call
