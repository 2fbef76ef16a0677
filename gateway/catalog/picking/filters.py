"""CatalogFilters and order of the catalog's list, and the values that filters accept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast, get_args

from gateway.catalog.availability import availability
from gateway.catalog.listing import from_price
from gateway.catalog.picking.typical import Find, typical_nanos
from gateway.catalog.picking.words import TEXT_MAX, stems, weight
from gateway.catalog.schema import TIERS, CatalogEntry, Tier
from gateway.catalog.tasks import TASKS, Modality, Task
from gateway.checks.suggestions import did_you_mean
from gateway.errors import InvalidRequest
from gateway.pricing import NANOS_PER_USD
from workers.contract.announcements import Announcement

Sort: TypeAlias = Literal[
    "name", "price", "-price", "typical", "-typical", "speed", "-speed", "tier", "-tier"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFilters:
    """Conditions that an entry must meet; None is not a condition. Amounts are in USD."""

    task: Task | None = None
    role: str | None = None
    tier: Tier | None = None
    vendor: str | None = None
    family: str | None = None
    good_for: str | None = None
    available: bool | None = None
    max_price: Fraction | None = None
    """Maximum of ``from_price``, which is for one unit of the entry's price."""
    typical_max: Fraction | None = None
    """Maximum price of a typical order."""
    makes: Modality | None = None
    """What one of its tasks makes."""
    route: str | None = None
    """An engine, ``upstream`` or ``workflow``."""
    language: str | None = None
    voice: str | None = None
    words: tuple[str, ...] = ()
    """Stems, each of which must occur in the entry's texts."""


class FacetsView(TypedDict):
    """Accepted values of each filter, with the number of models."""

    task: dict[str, int]
    role: dict[str, int]
    tier: dict[str, int]
    good_for: dict[str, int]
    vendor: dict[str, int]
    family: dict[str, int]


_VALUES: Final[Mapping[str, Callable[[CatalogEntry], Iterable[str | None]]]] = {
    "task": lambda entry: (entry.task, *entry.also),
    "role": lambda entry: entry.roles,
    "tier": lambda entry: (entry.tier,),
    "good_for": lambda entry: entry.good_for,
    "vendor": lambda entry: (entry.vendor,),
    "family": lambda entry: (entry.family,),
}


def facets(entries: Sequence[CatalogEntry]) -> FacetsView:
    """Count the values that filters accept: tiers lowest first, all others by name."""
    found: dict[str, Any] = {}
    for name, values in _VALUES.items():
        counts = Counter(value for entry in entries for value in values(entry) if value is not None)
        order = TIERS if name == "tier" else sorted(counts, key=str.lower)
        found[name] = {value: counts[value] for value in order if value in counts}
    return cast("FacetsView", found)


def known_value(name: str, value: str, entries: Sequence[CatalogEntry]) -> str:
    """Return a filter's value as entries spell it; case does not matter.

    Raise ``InvalidRequest`` if no entry has it.
    """
    known = {each for entry in entries for each in _VALUES[name](entry) if each is not None}
    found = {each.lower(): each for each in known}.get(value.lower())
    if found is None:
        hint = did_you_mean(value, sorted(known, key=str.lower))
        raise InvalidRequest("invalid_value", f"{name} is {value!r}; {hint}.", param=name)
    return found


def read_sort(text: str) -> Sort:
    """Raise ``InvalidRequest`` if the order is unknown."""
    for known in get_args(Sort):
        if text == known:
            return cast("Sort", known)
    hint = did_you_mean(text, get_args(Sort))
    raise InvalidRequest("invalid_value", f"sort is {text!r}; {hint}.", param="sort")


def read_words(text: str | None) -> tuple[str, ...]:
    """Return the stems of a text to search for. Raise ``InvalidRequest`` if it is too long."""
    if text is not None and len(text) > TEXT_MAX:
        message = f"q has {len(text)} characters; at most {TEXT_MAX} are accepted."
        raise InvalidRequest("invalid_value", message, param="q")
    return tuple(stems(text or ""))


def choose(
    entries: Sequence[CatalogEntry],
    announcements: Sequence[Announcement],
    filters: CatalogFilters,
    *,
    find: Find,
    sort: Sort = "name",
    seconds: Mapping[str, float] | None = None,
) -> list[CatalogEntry]:
    """Filter and sort entries; ``seconds`` are measured durations by model, for the sort by speed.

    Entries that lack what they are sorted by come last in either direction. Equal ones stay sorted
    by name.
    """

    def typical(entry: CatalogEntry) -> int | None:
        return typical_nanos(entry, find, filters.task)

    chosen = [
        entry
        for entry in entries
        if _fits(entry, filters)
        and (filters.typical_max is None or _at_most(typical(entry), filters.typical_max))
        and (
            filters.available is None
            or filters.available == (availability(entry, announcements) is None)
        )
    ]
    chosen.sort(key=_by_name)
    if sort == "name":
        return chosen
    of: Mapping[str, Callable[[CatalogEntry], Fraction | float | None]] = {
        "price": from_price,
        "typical": typical,
        "speed": lambda entry: (seconds or {}).get(entry.name),
        "tier": lambda entry: TIERS.index(entry.tier) if entry.tier else None,
    }
    value = of[sort.removeprefix("-")]
    known = [(found, entry) for entry in chosen if (found := value(entry)) is not None]
    known.sort(key=lambda each: each[0], reverse=sort.startswith("-"))
    return [*(entry for _, entry in known), *(e for e in chosen if value(e) is None)]


def made_by(entry: CatalogEntry) -> set[Modality]:
    """Return what the tasks of an entry make."""
    return {TASKS[task].makes for task in (entry.task, *entry.also)}


def route_of(entry: CatalogEntry) -> str:
    """Return where an entry runs: its engine, ``upstream`` or ``workflow``."""
    return "workflow" if entry.workflow else entry.engine or "upstream"


def _at_most(nanos: int | None, most_usd: Fraction) -> bool:
    return nanos is not None and nanos <= most_usd * NANOS_PER_USD


def _fits(entry: CatalogEntry, filters: CatalogFilters) -> bool:
    least = from_price(entry) if filters.max_price is not None else None
    return (
        filters.task in (None, entry.task, *entry.also)
        and filters.tier in (None, entry.tier)
        and filters.vendor in (None, entry.vendor)
        and filters.family in (None, entry.family)
        and (filters.role is None or filters.role in entry.roles)
        and (filters.makes is None or filters.makes in made_by(entry))
        and filters.route in (None, route_of(entry))
        and (filters.language is None or filters.language in entry.known_languages)
        and (filters.voice is None or filters.voice in entry.known_voices)
        and (filters.good_for is None or filters.good_for in entry.good_for)
        and (filters.max_price is None or (least is not None and least <= filters.max_price))
        and all(weight(entry, word) for word in filters.words)
    )


def _by_name(entry: CatalogEntry) -> tuple[str, str]:
    return entry.name.lower(), entry.name
