"""Spans to compare with, over changes of clocks, months and leap years."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from gateway.billing.usage.comparison import Comparison, aligned, earlier_span
from gateway.billing.usage.report import Group, Span, read_span

BERLIN = ZoneInfo("Europe/Berlin")
LATER = datetime(2030, 1, 1, tzinfo=UTC)


def span(first: str, last: str, zone: str = "Europe/Berlin") -> Span:
    return read_span(first, last, zone, now=LATER)


def days(found: Span) -> tuple[str, str]:
    return tuple(  # type: ignore[return-value]
        moment.astimezone(found.zone).isoformat(timespec="minutes")
        for moment in (found.starts_at, found.ends_at)
    )


@pytest.mark.parametrize(
    ("how", "starts", "ends"),
    [
        ("before", "2026-03-24T00:00+01:00", "2026-03-28T00:00+01:00"),
        ("weekdays", "2026-03-21T00:00+01:00", "2026-03-25T00:00+01:00"),
        ("year", "2025-03-28T00:00+01:00", "2025-04-01T00:00+02:00"),
    ],
)
def test_earlier_span_has_whole_days_over_a_change_of_clocks(
    how: Comparison, starts: str, ends: str
) -> None:
    # On 29 March 2026 the clocks of Berlin go forward; in 2025 on 30 March.
    found = earlier_span(span("2026-03-28", "2026-03-31"), how, now=LATER)

    assert days(found.span) == (starts, ends)


def test_span_that_has_not_ended_is_compared_up_to_the_same_time() -> None:
    now = datetime(2026, 11, 23, 12, 30, tzinfo=BERLIN)

    found = earlier_span(span("2026-11-22", "2026-11-28"), "before", now=now)

    assert days(found.span) == ("2026-11-15T00:00+01:00", "2026-11-16T12:30+01:00")


@pytest.mark.parametrize(
    ("how", "labels", "expected"),
    [
        ("before", {"day": "2026-03-24"}, {"day": "2026-03-28"}),
        ("before", {"hour": "2026-03-25T02:00+01:00"}, {"hour": "2026-03-29T03:00+02:00"}),
        ("year", {"month": "2025-03"}, {"month": "2026-03"}),
        ("year", {"day": "2025-03-30", "model": "m"}, {"day": "2026-03-30", "model": "m"}),
    ],
)
def test_labels_of_times_become_those_of_the_report(
    how: Comparison, labels: dict[str, str], expected: dict[str, str]
) -> None:
    earlier = earlier_span(span("2026-03-28", "2026-03-31"), how, now=LATER)

    (found,) = aligned([Group(labels, requests=3)], earlier)

    assert (found.labels, found.requests) == (expected, 3)


def test_leap_day_is_compared_with_the_day_before() -> None:
    found = earlier_span(span("2028-02-29", "2028-02-29"), "year", now=LATER)

    assert days(found.span)[0] == "2027-02-28T00:00+01:00"


def test_months_are_compared_with_as_many_months_before() -> None:
    earlier = earlier_span(span("2026-10-01", "2026-11-30", "UTC"), "before", now=LATER)

    (found,) = aligned([Group({"month": "2026-08"})], earlier)

    assert found.labels == {"month": "2026-10"}
