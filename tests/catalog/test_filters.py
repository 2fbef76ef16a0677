"""The list of models by filters and in every order, and the values that filters accept."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.listing import from_price
from gateway.catalog.loader import load_catalog
from gateway.catalog.picking.filters import (
    CatalogFilters,
    Sort,
    choose,
    facets,
    known_value,
    read_words,
)
from gateway.catalog.picking.typical import typical_nanos
from gateway.catalog.schema import TIERS
from gateway.errors import InvalidRequest
from workers.contract.announcements import Announcement

CATALOG = load_catalog(Path(__file__).parents[2] / "catalog.yaml").models
ENTRIES = {entry.name: entry for entry in CATALOG}
LOCAL = Announcement("w1", models=("pocket-chat",), unavailable={"Veo3": "GMI_API_KEY is not set"})


def names(**filters: Any) -> list[str]:
    found = choose(CATALOG, [LOCAL], CatalogFilters(**filters), find=ENTRIES.get)
    return [entry.name for entry in found]


def test_entries_are_found_by_any_of_their_tasks() -> None:
    assert names(task="image-edit") == [
        "bria-fibo-edit",
        "pocket-image",
        "pocket-image-turbo",
        "reve-edit-fast-20251030",
        "seedream-4-0-250828",
    ]
    assert names(task="text-generation") == ["pocket-chat"]


def test_entries_are_found_by_good_for() -> None:
    assert names(good_for="voice-cloning") == [
        "minimax-audio-voice-clone-speech-2.6-hd",
        "minimax-audio-voice-clone-speech-2.6-turbo",
    ]
    assert names(good_for="world peace") == []


def test_maximum_price_filter_is_inclusive() -> None:
    assert names(task="text-to-speech", max_price=Fraction("0.06")) == [
        "inworld-tts-1.5-mini",
        "minimax-tts-speech-2.6-turbo",
        "pocket-speech",
    ]
    assert names(max_price=Fraction("0.000001")) == [
        "bria-fibo-image-blend",
        "bria-fibo-relight",
        "bria-fibo-restyle",
        "pocket-chat",
        "pocket-embed",
        "pocket-speech",
    ]


def test_entries_are_found_by_availability() -> None:
    assert names(available=True) == ["pocket-chat"]
    assert len(names(available=False)) == len(ENTRIES) - 1
    assert len(names()) == len(ENTRIES)


@pytest.mark.parametrize("sort", ["price", "-price"])
def test_entries_are_sorted_by_price_and_equal_prices_by_name(sort: Sort) -> None:
    found = choose(CATALOG, [], CatalogFilters(), find=ENTRIES.get, sort=sort)
    sign = -1 if sort == "-price" else 1

    priced = [entry for entry in CATALOG if entry.price]
    priced.sort(key=lambda entry: (sign * (from_price(entry) or 0), entry.name.lower()))
    assert found == [*priced, ENTRIES["pocket-talking-head"]], "what has no price of its own"


def test_typical_prices_compare_models_that_are_sold_in_different_units() -> None:
    found = names(task="text-to-speech", typical_max=Fraction("0.01"))

    assert found == ["inworld-tts-1.5-mini", "pocket-speech"]
    by_price = choose(
        CATALOG, [], CatalogFilters(task="text-to-video"), find=ENTRIES.get, sort="typical"
    )
    assert [entry.name for entry in by_price][:2] == ["pocket-video", "pixverse-v5.6-t2v"]


@pytest.mark.parametrize("sort", ["tier", "-tier", "speed", "-speed", "typical", "-typical"])
def test_models_without_the_value_that_they_are_sorted_by_come_last(sort: Sort) -> None:
    seconds = {"Veo3": 60.0, "pocket-chat": 0.1}
    found = choose(CATALOG, [], CatalogFilters(), find=ENTRIES.get, sort=sort, seconds=seconds)

    values: dict[str, Any] = {
        "tier": lambda entry: TIERS.index(entry.tier),
        "speed": lambda entry: seconds.get(entry.name),
        "typical": lambda entry: typical_nanos(entry, ENTRIES.get),
    }
    listed = [values[sort.removeprefix("-")](entry) for entry in found]
    known = [value for value in listed if value is not None]
    assert len(found) == len(CATALOG)
    assert listed[: len(known)] == sorted(known, reverse=sort.startswith("-"))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (
            {"role": "analyst", "task": "voice-clone"},
            ["minimax-audio-voice-clone-speech-2.6-turbo"],
        ),
        ({"vendor": "Kuaishou", "tier": "top"}, ["Kling-Image2Video-V2-Master"]),
        ({"family": "Seedream"}, ["seedream-4-0-250828", "seedream-5.0-lite"]),
        ({"words": read_words("edits pictures from licensed training")}, ["bria-fibo-edit"]),
        ({"words": read_words("a theremin")}, []),
    ],
)
def test_entries_are_found_by(filters: dict[str, Any], expected: list[str]) -> None:
    assert names(**filters) == expected


def test_facets_list_every_value_that_a_filter_accepts() -> None:
    found = facets(CATALOG)

    assert list(found["tier"]) == list(TIERS)
    assert sum(found["tier"].values()) == len(CATALOG)
    for name, counts in found.items():
        assert isinstance(counts, dict)
        for value, count in counts.items():
            known = known_value(name, value.upper(), CATALOG)
            assert len(names(**{name: known})) == count


def test_unknown_value_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidRequest, match="vendor is 'Brai'; did you mean Bria") as caught:
        known_value("vendor", "Brai", CATALOG)
    assert caught.value.param == "vendor"
