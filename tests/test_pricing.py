"""Prices are exact: a quote covers every usage within its limits, and rounding happens once."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pricing import (
    Component,
    Price,
    UnpricedUsage,
    charge,
    clip,
    format_usd,
    parse_usd,
    quote,
)
from workers.contract.jobs import Usage

TOKENS = ("input_token", "cached_input_token", "output_token")
amounts = st.integers(1, 10**12)
counts = st.integers(0, 10**6)
pers = st.sampled_from([1, 3, 7, 1000, 10**6, 999_983])


@st.composite
def token_prices(draw: st.DrawFn) -> Price:
    units = ["input_token", "output_token", *draw(st.sampled_from([[], ["cached_input_token"]]))]
    units += draw(st.sampled_from([[], ["request"]]))
    components = tuple(Component(unit, draw(amounts), draw(pers)) for unit in units)  # type: ignore[arg-type]  # units above
    return Price(components, draw(st.sampled_from([0, 0, 1, 10**9])))


@st.composite
def within(draw: st.DrawFn, limits: Usage) -> Usage:
    read = draw(st.integers(0, limits.input_tokens))
    cached = draw(st.integers(0, read))
    return Usage(
        requests=1,
        input_tokens=read - cached,
        cached_input_tokens=cached,
        output_tokens=draw(st.integers(0, limits.output_tokens)),
        gpu_us=draw(counts),
    )


@given(st.data(), token_prices(), counts, counts)
def test_a_quote_covers_every_usage_within_its_limits(
    data: st.DataObject, price: Price, input_tokens: int, output_tokens: int
) -> None:
    limits = Usage(requests=1, input_tokens=input_tokens + 1, output_tokens=output_tokens)
    usage = data.draw(within(limits))

    most = quote(price, limits).total_nanos

    if not usage.input_tokens and not usage.cached_input_tokens and not usage.output_tokens:
        return
    assert charge(price, usage).total_nanos <= most
    assert clip(usage, limits) == (usage, False)


@given(token_prices(), counts, counts)
def test_a_charge_is_the_exact_sum_rounded_up_once(price: Price, read: int, written: int) -> None:
    usage = Usage(requests=1, input_tokens=read + 1, output_tokens=written)
    rates = {c.unit: Fraction(c.amount_nanos, c.per) for c in price.components}

    bill = charge(price, usage)

    exact = (
        rates.get("request", Fraction(0))
        + rates["input_token"] * usage.input_tokens
        + rates["output_token"] * usage.output_tokens
    )
    assert bill.total_nanos == max(-(-exact.numerator // exact.denominator), price.minimum_nanos)
    assert sum(line.amount_nanos for line in bill.lines) == bill.total_nanos


@given(st.integers(-(10**18), 10**18))
def test_amounts_survive_being_written_and_read(nanos: int) -> None:
    text = format_usd(nanos)

    assert parse_usd(text) == nanos
    assert "e" not in text.lower()


def test_the_smallest_market_price_adds_up_exactly() -> None:
    price = Price((Component("request", parse_usd("0.000001")),))

    assert charge(price, Usage(requests=1)).total_nanos == 1000
    assert format_usd(1000 * 10**9) == "1000"


@pytest.mark.parametrize("text", ["0.0000000001", "x", "", "NaN", "1e400", "99999999999"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_usd(text)


def test_nothing_is_priced_at_nothing() -> None:
    price = Price((Component("image", 1000, when={"size": "large"}),))

    with pytest.raises(UnpricedUsage):
        charge(price, Usage(requests=1, images=1, attributes={"size": "small"}))
    with pytest.raises(UnpricedUsage):
        charge(price, Usage(requests=1))


def test_the_dearest_variant_is_quoted_and_the_right_one_charged() -> None:
    price = Price(
        (
            Component("image", 1000, when={"size": "small"}),
            Component("image", 5000, when={"size": "large"}),
        )
    )

    assert quote(price, Usage(requests=1, images=2)).total_nanos == 10_000
    assert quote(price, Usage(images=2, attributes={"size": "small"})).total_nanos == 2000
    assert charge(price, Usage(images=2, attributes={"size": "large"})).total_nanos == 10_000


def test_a_price_on_device_time_needs_a_limit() -> None:
    price = Price((Component("gpu_second", 10**6),))

    with pytest.raises(UnpricedUsage, match="no limit"):
        quote(price, Usage(requests=1))
    assert quote(price, Usage(requests=1, gpu_us=1_500_000)).total_nanos == 1_500_000


def test_usage_is_clipped_to_its_limits() -> None:
    limits = Usage(requests=1, input_tokens=10, output_tokens=5)

    clipped, cut = clip(
        Usage(requests=1, input_tokens=8, cached_input_tokens=8, output_tokens=9), limits
    )

    assert cut
    assert (clipped.input_tokens, clipped.cached_input_tokens, clipped.output_tokens) == (2, 8, 5)
