"""Columns of lists, of which each visitor hides some. The first column of a list always stays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace


@dataclass(frozen=True, slots=True)
class ListColumns:
    """Columns of a list that can be hidden: their heads by name, in order.

    ``hidden`` are left out until the visitor chooses others.
    """

    name: str
    heads: Mapping[str, str]
    hidden: frozenset[str] = frozenset()

    def hidden_by(self, choices: Mapping[str, Collection[str]]) -> frozenset[str]:
        """Return the columns that a visitor with these choices leaves out."""
        chosen = choices.get(self.name)
        return self.hidden if chosen is None else frozenset(chosen) & self.heads.keys()

    def shown(self, hidden: Collection[str]) -> ShownColumns:
        shows = SimpleNamespace(**{name: name not in hidden for name in self.heads})
        return ShownColumns(self.name, self.heads, shows)


@dataclass(frozen=True, slots=True)
class ShownColumns:
    """Columns of a list for a template. ``shows`` has a bool for each."""

    name: str
    heads: Mapping[str, str]
    shows: SimpleNamespace


def shown_lists(
    lists: Iterable[ListColumns], choices: Mapping[str, Collection[str]]
) -> SimpleNamespace:
    """Return the columns of lists by the names of the lists, for a template."""
    return SimpleNamespace(**{each.name: each.shown(each.hidden_by(choices)) for each in lists})
