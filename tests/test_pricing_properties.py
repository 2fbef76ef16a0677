"""Properties of all prices and usages: covered by the quote, exact, rounded up once.

Prices here have every unit, conditions, non-terminating fractions and minimums. The expected sums
are computed here, from the definition of a price alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pricing import (
    UNBOUNDED_UNITS,
    UNITS,
    Component,
    Price,
    Unit,
    UnpricedUsage,
    charge,
    charge_nanos,
    clip,
    discounted,
    format_usd,
    parse_usd,
    quote,
)
from workers.contract.jobs import Usage

PARTS: Final[Mapping[Unit, tuple[str, int]]] = {
    # The quantity that a unit counts, and how many of it make one unit.
    "request": ("requests", 1),
    "input_token": ("input_tokens", 1),
    "cached_input_token": ("cached_input_tokens", 1),
    "output_token": ("output_tokens", 1),
    "image": ("images", 1),
    "video_second": ("video_ms", 1000),
    "audio_second": ("audio_ms", 1000),
    "character": ("characters", 1),
    "step": ("steps", 1),
    "gpu_second": ("gpu_us", 1_000_000),
}
QUANTITIES: Final = tuple(name for name, _ in PARTS.values())
COUNT_MAX: Final = 10**6

amounts = st.integers(1, 10**10)
pers = st.sampled_from([1, 3, 7, 1000, 10**6, 999_983, 10**9])
counts = st.integers(0, COUNT_MAX)
attributes = st.fixed_dictionaries(
    {}, optional={"size": st.sampled_from("ab"), "quality": st.sampled_from("ab")}
)


@st.composite
def components(draw: st.DrawFn, unit: Unit) -> list[Component]:
    """Prices with one unconditional component and one per condition: as the catalog requires,
    conditions that can apply together have a separate component."""
    sizes = draw(st.sets(st.sampled_from("ab")))
    qualities = draw(st.sets(st.sampled_from("ab")))
    conditions: list[dict[str, str]] = [
        {},
        *({"size": size} for size in sizes),
        *({"quality": quality} for quality in qualities),
        *({"size": size, "quality": quality} for size in sizes for quality in qualities),
    ]
    return [
        Component(unit, draw(amounts), draw(pers), when) for when in sorted(conditions, key=str)
    ]


@st.composite
def prices(draw: st.DrawFn, *, minimums: bool = True) -> Price:
    units = draw(st.sets(st.sampled_from(UNITS), min_size=1, max_size=4))
    lines = [line for unit in sorted(units) for line in draw(components(unit))]
    minimum = draw(st.sampled_from([0, 1, 10**9])) if minimums else 0
    return Price(tuple(draw(st.permutations(lines))), minimum)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    quantities = {name: draw(counts) for name in QUANTITIES if name != "requests"}
    return Usage(requests=1, **quantities, attributes=draw(attributes))


@st.composite
def limits(draw: st.DrawFn) -> Usage:
    """Limits of a request, including those of units that require one."""
    quantities = {name: draw(counts) for name in QUANTITIES if name != "requests"}
    for unit in UNBOUNDED_UNITS:
        quantities[PARTS[unit][0]] = draw(st.integers(1, COUNT_MAX))
    return Usage(requests=1, **quantities, attributes=draw(attributes))


@st.composite
def within(draw: st.DrawFn, bounds: Usage) -> Usage:
    """A usage within its limits; the worker decides how much of the input was cached."""
    most = {name: getattr(bounds, name) for name in QUANTITIES}
    prompt = draw(st.integers(0, most.pop("input_tokens") + most.pop("cached_input_tokens")))
    cached = draw(st.integers(0, prompt))
    quantities = {name: draw(st.integers(0, value)) for name, value in most.items()}
    quantities |= {"requests": 1, "input_tokens": prompt - cached, "cached_input_tokens": cached}
    return Usage(**quantities, attributes={**draw(attributes), **bounds.attributes})


def exactly(price: Price, usage: Usage) -> Fraction:
    """Compute the exact charge before rounding, directly from the definition."""
    total = Fraction(0)
    for unit, (name, parts) in PARTS.items():
        for priced in (unit, "input_token" if unit == "cached_input_token" else unit):
            lines = {
                frozenset(line.when.items()): Fraction(line.amount_nanos, line.per)
                for line in price.components
                if line.unit == priced and line.when.items() <= usage.attributes.items()
            }
            if lines:
                total += lines[max(lines, key=len)] * getattr(usage, name) / parts
                break
    return total


def due(price: Price, usage: Usage) -> int:
    """Return the charge, or 0 if nothing that was used has a price."""
    try:
        return charge(price, usage).total_nanos
    except UnpricedUsage:
        return 0


def up(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


# --- A quote covers -------------------------------------------------------------------------------


@given(st.data(), prices(), limits())
def test_a_quote_covers_every_usage_within_its_limits(
    data: st.DataObject, price: Price, bounds: Usage
) -> None:
    usage = data.draw(within(bounds))
    try:
        most = quote(price, bounds).total_nanos
    except UnpricedUsage:
        most = 0

    assert due(price, usage) <= most
    assert clip(usage, bounds) == (usage, False)


@given(prices(), limits(), st.sampled_from("ab"), st.sampled_from("ab"))
def test_quote_is_the_bill_once_every_attribute_of_a_condition_is_given(
    price: Price, bounds: Usage, size: str, quality: str
) -> None:
    # How much of a prompt is cached is the only thing that a request cannot specify.
    bounds = msgspec.structs.replace(
        bounds, cached_input_tokens=0, attributes={"size": size, "quality": quality}
    )
    lines = tuple(line for line in price.components if line.unit != "cached_input_token")

    assert quote_or_nothing(Price(lines, price.minimum_nanos), bounds) == due(
        Price(lines, price.minimum_nanos), bounds
    )


@given(prices(), limits(), usages())
def test_clipped_usage_is_always_covered_by_the_quote(
    price: Price, bounds: Usage, reported: Usage
) -> None:
    clipped, cut = clip(reported, bounds)
    try:
        most = quote(price, bounds).total_nanos
    except UnpricedUsage:
        most = 0

    assert due(price, clipped) <= most
    assert clip(clipped, bounds) == (clipped, False)
    assert cut or {**bounds.attributes, **reported.attributes} == clipped.attributes


@given(st.data(), prices(), limits(), st.sampled_from(QUANTITIES), counts)
def test_more_of_anything_never_costs_less(
    data: st.DataObject, price: Price, bounds: Usage, name: str, more: int
) -> None:
    usage = data.draw(within(bounds))
    most = msgspec.structs.replace(bounds, **{name: getattr(bounds, name) + more})
    used = msgspec.structs.replace(usage, **{name: getattr(usage, name) + more})

    assert due(price, usage) <= due(price, used)
    assert quote_or_nothing(price, bounds) <= quote_or_nothing(price, most)


@given(st.data(), prices(), limits())
def test_known_attributes_never_increase_the_quote(
    data: st.DataObject, price: Price, bounds: Usage
) -> None:
    known = msgspec.structs.replace(
        bounds, attributes={**data.draw(attributes), **bounds.attributes}
    )

    assert quote_or_nothing(price, known) <= quote_or_nothing(price, bounds)


def quote_or_nothing(price: Price, bounds: Usage) -> int:
    try:
        return quote(price, bounds).total_nanos
    except UnpricedUsage:
        return 0


# --- A charge is exact ----------------------------------------------------------------------------


@given(prices(), usages())
def test_a_charge_is_the_exact_sum_rounded_up_once(price: Price, usage: Usage) -> None:
    exact = exactly(price, usage)

    assert due(price, usage) == max(up(exact), price.minimum_nanos)


def reference(
    price: Price, chosen: list[tuple[Component, Fraction]]
) -> tuple[int, list[tuple[str, Fraction, int]]]:
    """Bill quantities in rational arithmetic: the total, and unit, quantity, amount of each line.

    Raise ``UnpricedUsage`` if nothing is billed.
    """
    if not chosen and not price.minimum_nanos:
        raise UnpricedUsage
    exact, total = Fraction(0), 0
    lines: list[tuple[str, Fraction, int]] = []
    for component, quantity in chosen:
        exact += quantity * Fraction(component.amount_nanos, component.per)
        lines.append((component.unit, quantity, up(exact) - total))
        total = up(exact)
    if total < price.minimum_nanos:
        lines.append(("minimum", Fraction(1), price.minimum_nanos - total))
        total = price.minimum_nanos
    return total, lines


def reference_charge(price: Price, usage: Usage) -> tuple[int, list[tuple[str, Fraction, int]]]:
    chosen = []
    for unit, (name, parts) in PARTS.items():
        quantity = Fraction(getattr(usage, name), parts)
        for priced in (unit, "input_token" if unit == "cached_input_token" else unit):
            applying = [
                line
                for line in price.components
                if line.unit == priced and line.when.items() <= usage.attributes.items()
            ]
            if applying and quantity:
                chosen.append((max(applying, key=lambda line: len(line.when)), quantity))
                break
    return reference(price, chosen)


def reference_quote(price: Price, bounds: Usage) -> tuple[int, list[tuple[str, Fraction, int]]]:
    """Bill the dearest component that can apply: the one that the given attributes select, or one
    that is at least as specific and depends on an open attribute."""
    chosen = []
    for unit, (name, parts) in PARTS.items():
        can_apply: list[Component] = []
        for priced in (unit, "cached_input_token") if unit == "input_token" else (unit,):
            lines = [line for line in price.components if line.unit == priced]
            applying = [line for line in lines if line.when.items() <= bounds.attributes.items()]
            sure = [max(applying, key=lambda line: len(line.when))] if applying else []
            can_apply += sure
            can_apply += [
                line
                for line in lines
                if line not in applying
                and all(len(line.when) >= len(one.when) for one in sure)
                and line.when.items() <= {**line.when, **bounds.attributes}.items()
            ]
        quantity = Fraction(getattr(bounds, name), parts)
        quantity += bounds.cached_input_tokens if unit == "input_token" else 0
        if can_apply and quantity and unit != "cached_input_token":
            rates = [Fraction(line.amount_nanos, line.per) for line in can_apply]
            chosen.append((can_apply[rates.index(max(rates))], quantity))
    return reference(price, chosen)


@given(prices(), usages(), limits())
def test_bills_equal_those_of_a_reference_in_rational_arithmetic(
    price: Price, usage: Usage, bounds: Usage
) -> None:
    for compute, expected, amounts in (
        (charge, reference_charge, usage),
        (quote, reference_quote, bounds),
    ):
        try:
            bill = compute(price, amounts)
        except UnpricedUsage:
            with pytest.raises(UnpricedUsage):
                expected(price, amounts)
            continue
        # A cached token without its own price is billed as an input token, which the unit shows.
        lines = [(line.unit, Fraction(line.quantity), line.amount_nanos) for line in bill.lines]
        assert (bill.total_nanos, lines) == expected(price, amounts)


@given(prices(), usages())
def test_the_lines_of_a_bill_sum_to_its_total(price: Price, usage: Usage) -> None:
    try:
        bill = charge(price, usage)
    except UnpricedUsage:
        with pytest.raises(UnpricedUsage):
            charge_nanos(price, usage)
        return

    assert sum(line.amount_nanos for line in bill.lines) == bill.total_nanos
    assert charge_nanos(price, usage) == bill.total_nanos
    assert all(line.amount_nanos >= 0 for line in bill.lines)
    running = Fraction(0)
    for line in bill.lines[: -1 if bill.lines[-1].unit == "minimum" else None]:
        running += Fraction(line.quantity) * Fraction(line.price_nanos, line.per)
    assert max(up(running), price.minimum_nanos) == bill.total_nanos


@given(prices(), usages())
def test_the_order_of_components_does_not_matter(price: Price, usage: Usage) -> None:
    turned = Price(price.components[::-1], price.minimum_nanos)

    assert due(price, usage) == due(turned, usage)


@given(prices(minimums=False), st.lists(st.integers(0, COUNT_MAX), min_size=1, max_size=8))
def test_splitting_a_usage_costs_at_most_a_nano_dollar_per_split(
    price: Price, cuts: list[int]
) -> None:
    places = [0, *sorted(cuts), COUNT_MAX]
    shares = [after - before for before, after in pairwise(places)]
    whole = Usage(**dict.fromkeys(QUANTITIES, COUNT_MAX))
    parts = [Usage(**dict.fromkeys(QUANTITIES, share)) for share in shares]

    surplus = sum(due(price, part) for part in parts) - due(price, whole)

    assert 0 <= surplus <= len(cuts)


# --- A discount is exact --------------------------------------------------------------------------

discounts = st.integers(1, 9_999).map(lambda parts: Fraction(parts, 10_000))


@given(prices(minimums=False), usages(), discounts)
def test_discounted_price_reduces_every_charge_exactly(
    price: Price, usage: Usage, discount: Fraction
) -> None:
    less = discounted(price, discount)

    assert exactly(less, usage) == exactly(price, usage) * (1 - discount)
    assert due(less, usage) == up(exactly(price, usage) * (1 - discount))
    assert all(isinstance(line.amount_nanos, int) and line.per >= 1 for line in less.components)


@given(prices(), limits(), discounts)
def test_discounted_quote_is_at_most_its_share_rounded_up(
    price: Price, bounds: Usage, discount: Fraction
) -> None:
    full = quote_or_nothing(price, bounds)

    part = quote_or_nothing(discounted(price, discount), bounds)

    # The full quote is rounded up before taking its share, the discounted one afterwards.
    assert full * (1 - discount) - 1 < part <= up(full * (1 - discount))


# --- Amounts are read as they are written ---------------------------------------------------------


@given(st.integers(-(10**18), 10**18))
def test_amounts_survive_being_written_and_read(nanos: int) -> None:
    text = format_usd(nanos)

    assert parse_usd(text) == nanos
    assert "e" not in text.lower()
    assert Fraction(text) * 10**9 == nanos


@given(st.integers(0, 10**9), st.text("0123456789", min_size=1, max_size=9))
def test_every_amount_of_nine_decimals_is_read_exactly(whole: int, decimals: str) -> None:
    text = f"{whole}.{decimals}"

    assert parse_usd(text) == Fraction(text) * 10**9


@given(st.integers(0, 10**9), st.text("0123456789", min_size=9, max_size=30), st.sampled_from("19"))
def test_more_than_nine_decimals_are_refused_and_never_rounded(
    whole: int, decimals: str, last: str
) -> None:
    with pytest.raises(ValueError, match="more than 9 decimals"):
        parse_usd(f"{whole}.{decimals}{last}")


def test_a_thousand_million_of_the_smallest_market_price_are_a_thousand_dollars() -> None:
    price = Price((Component("request", parse_usd("0.000001")),))

    once = charge(price, Usage(requests=1)).total_nanos
    together = charge(price, Usage(requests=10**9)).total_nanos

    assert format_usd(once * 10**9) == format_usd(together) == "1000"
