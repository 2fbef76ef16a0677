"""Prices by example: refusals, quoted and charged variants, clipping."""

from __future__ import annotations

import pytest

from gateway.pricing import (
    NANOS_MAX,
    Component,
    Price,
    Unbookable,
    UnpricedUsage,
    charge,
    clip,
    is_exact_quote,
    parse_usd,
    quote,
)
from workers.contract.jobs import Usage


@pytest.mark.parametrize("text", ["0.0000000001", "x", "", "NaN", "1e400", "99999999999"])
def test_invalid_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_usd(text)


def test_usage_without_a_price_is_refused() -> None:
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


def test_discount_on_a_condition_is_quoted_where_the_condition_is_given() -> None:
    price = Price(
        (
            Component("image", 4000),
            Component("image", 2000, when={"quality": "low"}),
            Component("image", 1000, when={"quality": "low", "size": "small"}),
        )
    )

    for attributes, most in (
        ({}, 4000),
        ({"quality": "low"}, 2000),
        ({"quality": "high"}, 4000),
        ({"size": "small"}, 4000),
        ({"quality": "low", "size": "small"}, 1000),
        ({"quality": "low", "size": "large"}, 2000),
    ):
        assert quote(price, Usage(images=1, attributes=attributes)).total_nanos == most
        assert charge(price, Usage(images=1, attributes=attributes)).total_nanos <= most


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


def test_clip_keeps_every_quantity_within_its_limit() -> None:
    # A quantity that it forgets would be charged as zero.
    usage = Usage(**{name: 3 for name in Usage.__struct_fields__ if name != "attributes"})

    assert clip(usage, usage) == (usage, False)


def test_attributes_of_the_request_override_the_workers() -> None:
    limits = Usage(requests=1, images=1, attributes={"size": "small"})

    larger = clip(Usage(requests=1, images=1, attributes={"size": "large"}), limits)
    unsaid = clip(Usage(requests=1, images=1), limits)
    measured = clip(Usage(requests=1, images=1, attributes={"quality": "high"}), limits)

    assert larger == (limits, True)
    assert unsaid == (limits, False)
    assert measured[0].attributes == {"size": "small", "quality": "high"}


def test_bill_beyond_64_bits_is_refused() -> None:
    price = Price((Component("image", NANOS_MAX),))

    assert charge(price, Usage(images=1)).total_nanos == NANOS_MAX
    with pytest.raises(Unbookable):
        quote(price, Usage(images=2))


def test_quote_of_a_sum_of_steps_is_not_the_charge() -> None:
    assert is_exact_quote(Price((Component("character", 1),)))
    assert not is_exact_quote(Price((Component("audio_second", 1),)))
    assert not is_exact_quote(Price(()))
