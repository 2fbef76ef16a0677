"""Checks that names and aliases of a catalog differ, and that aliases lead to entries. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gateway.catalog.rules import Conflict
from gateway.checks.suggestions import did_you_mean

if TYPE_CHECKING:
    from gateway.catalog.schema import CatalogEntry


def repeated_names(entries: Sequence[CatalogEntry]) -> Iterator[Conflict]:
    """Find names that are used twice. Case matters: ``Veo3`` and ``veo3`` differ."""
    return repeated([(entry.name, entry.aliases) for entry in entries])


def repeated(names: Sequence[tuple[object, object]]) -> Iterator[Conflict]:
    """Find repeated names and aliases. Values of other types, which the schema rejects, are
    skipped."""
    first: dict[str, int] = {}
    for index, (name, _) in enumerate(names):
        if not isinstance(name, str):
            continue
        if name in first:
            message = f"{name!r} is already used by models[{first[name]}]; names must differ"
            yield ("models", index, "name"), message
        first.setdefault(name, index)
    for index, (_, aliases) in enumerate(names):
        for place, alias in enumerate(aliases if isinstance(aliases, list | tuple) else ()):
            if not isinstance(alias, str):
                continue
            if alias in first:
                message = f"{alias!r} is already used by models[{first[alias]}]; names must differ"
                yield ("models", index, "aliases", place), message
            first.setdefault(alias, index)


def lost_aliases(aliases: Mapping[str, str], entries: Sequence[CatalogEntry]) -> Iterator[Conflict]:
    """Find aliases of the catalog that are names already, or that no entry serves."""
    names = [entry.name for entry in entries]
    taken = {*names, *(alias for entry in entries for alias in entry.aliases)}
    for alias, name in aliases.items():
        if alias in taken:
            yield ("aliases", alias), f"{alias!r} is already a name; names must differ"
        if name not in names:
            yield ("aliases", alias), f"no model {name!r} here; {did_you_mean(name, names)}"
