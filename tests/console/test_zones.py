"""Days and hours of the page's zone, on the days on which clocks change."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest

from gateway.billing.usage.report import Span
from gateway.console.views.formats import Clock
from gateway.console.views.histogram import histogram

INSTANT = timedelta(microseconds=1)
DAYS = (
    ("Asia/Kolkata", "2026-03-29", 24.0),
    ("Europe/Berlin", "2026-03-29", 23.0),
    ("Europe/Berlin", "2026-10-25", 25.0),
    # The other hemisphere: half an hour, and clocks that change at midnight.
    ("Australia/Lord_Howe", "2026-04-05", 24.5),
    ("Australia/Lord_Howe", "2026-10-04", 23.5),
    ("America/Santiago", "2026-04-04", 25.0),
    ("America/Santiago", "2026-09-06", 23.0),
)


def border(day: date, zone: str) -> datetime:
    """Return the first moment of a day, found without knowing how clocks change."""
    found = datetime.combine(day, time(), UTC) - timedelta(hours=16)
    while found.astimezone(ZoneInfo(zone)).date() < day:
        found += timedelta(minutes=15)
    return found


def hour_of(local: datetime) -> str:
    return local.replace(minute=0, second=0, microsecond=0).isoformat(timespec="minutes")


@pytest.mark.parametrize(("zone", "day", "hours"), DAYS)
def test_today_begins_at_the_first_midnight(zone: str, day: str, hours: float) -> None:
    chosen = date.fromisoformat(day)
    first, last = border(chosen, zone), border(chosen + timedelta(days=1), zone)

    for now in (first, first + timedelta(hours=1), first + timedelta(hours=12), last - INSTANT):
        assert Clock(zone, now).midnight == first


def test_today_begins_once_where_midnight_comes_twice() -> None:
    # In Havana the hour from midnight to one is repeated.
    first = border(date(2026, 11, 1), "America/Havana")

    assert Clock("America/Havana", first + timedelta(minutes=90)).midnight == first


@pytest.mark.parametrize(("zone", "day", "hours"), DAYS)
def test_bars_cover_their_span_without_a_gap(zone: str, day: str, hours: float) -> None:
    chosen, tz = date.fromisoformat(day), ZoneInfo(zone)
    first, last = border(chosen, zone), border(chosen + timedelta(days=1), zone)

    for late in (timedelta(0), timedelta(minutes=10), timedelta(minutes=50)):
        span = Span(first + timedelta(minutes=40), last + late, tz)
        wanted, at = set(), span.starts_at
        while at < span.ends_at:
            wanted.add(hour_of(at.astimezone(tz)))
            at += timedelta(minutes=5)
        labels = [bar.label for bar in histogram(span, "hour", [], None).bars]
        assert (len(labels), set(labels)) == (len(wanted), wanted)
    days = Span(first + timedelta(hours=20), last + timedelta(days=4, hours=2), tz)
    assert [bar.label for bar in histogram(days, "day", [], None).bars] == [
        str(chosen + timedelta(days=number)) for number in range(6)
    ]
