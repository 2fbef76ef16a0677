"""Amounts are exact, and moments are those of the page's zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.console.views.formats import (
    Clock,
    ago,
    amount,
    count,
    duration,
    places,
    precisely,
    usd,
    when,
)
from gateway.pricing import NANOS_MAX, format_usd


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "$0"),
        (1, "$0.000000001"),
        (-3_200, "−$0.0000032"),  # noqa: RUF001
        (41_207_316_204, "$41.207316204"),
        (12_345_000_000_000, "$12\N{NARROW NO-BREAK SPACE}345"),
        (NANOS_MAX, "$9 223 372 036.854775807".replace(" ", "\N{NARROW NO-BREAK SPACE}")),
    ],
)
def test_single_figures(nanos: int, text: str) -> None:
    assert usd(nanos) == text


@given(st.integers(-NANOS_MAX, NANOS_MAX))
def test_cells_of_money_are_the_exact_decimal(nanos: int) -> None:
    found = amount(nanos)

    integer = "".join(piece.text for piece in found.integer)
    fraction = "".join(piece.text for piece in found.fraction)
    text = f"{integer}.{fraction}" if fraction else integer
    assert text.replace("−", "-") == found.plain == format_usd(nanos)  # noqa: RUF001


def test_first_two_digits_that_count_stand_out() -> None:
    def ink(nanos: int) -> str:
        found = amount(nanos)
        return "".join(piece.text for piece in (*found.integer, *found.fraction) if piece.ink)

    assert ink(3_200) == "32"
    assert ink(1_720_000_000) == "17"
    assert ink(41_207_316_204) == "41"
    assert ink(123_000_000_000) == "123"


def test_decimals_of_a_column() -> None:
    assert places([3_200, None, 5_000_000_000]) == 7
    assert places([]) == 0


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "–"),  # noqa: RUF001
        (0, "0 µs"),
        (704, "704 µs"),
        (12_400, "12.4 ms"),
        (1_610_000, "1.61 s"),
        (124_000_000, "2 min 04 s"),
        (3_700_000_000, "1 h 01 min"),
    ],
)
def test_durations(us: int | None, text: str) -> None:
    assert duration(us) == text


def test_moments_follow_the_zone_also_when_clocks_change() -> None:
    now = datetime(2026, 10, 25, 12, tzinfo=UTC)
    berlin = Clock("Europe/Berlin", now)

    # The clocks went back an hour at 01:00 UTC.
    assert when(datetime(2026, 10, 25, 0, 30, 7, tzinfo=UTC), berlin) == "02:30:07.000"
    assert when(datetime(2026, 10, 25, 1, 30, 7, tzinfo=UTC), berlin) == "02:30:07.000"
    assert when(datetime(2026, 10, 24, 21, 59, tzinfo=UTC), berlin) == "24 Oct 23:59"
    assert when(datetime(2025, 10, 24, tzinfo=UTC), berlin) == "24 Oct 2025"


def test_whole_minutes_have_no_seconds() -> None:
    berlin = Clock("Europe/Berlin", datetime(2026, 10, 25, 12, tzinfo=UTC))
    midnight = datetime(2026, 10, 24, 22, tzinfo=UTC)

    assert precisely(midnight, berlin) == "25 Oct 2026 00:00 Europe/Berlin"
    assert when(midnight, berlin) == "00:00"
    later = precisely(midnight + timedelta(milliseconds=412), berlin)
    assert later == "25 Oct 2026 00:00:00.412 Europe/Berlin"


def test_distances_from_now() -> None:
    clock = Clock("UTC", datetime(2026, 10, 25, 12, tzinfo=UTC))

    assert ago(clock.now - timedelta(seconds=3), clock) == "3 s ago"
    assert ago(clock.now + timedelta(hours=5), clock) == "in 5 h"


def test_long_numbers_are_grouped() -> None:
    assert count(9_999) == "9999"
    assert count(1_204_331) == "1\N{NARROW NO-BREAK SPACE}204\N{NARROW NO-BREAK SPACE}331"
