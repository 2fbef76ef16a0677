"""Days and hours of the page's zone, on the days on which clocks change."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
import time_machine

from gateway.billing.usage.report import Span
from gateway.checks.moments import timestamp
from gateway.console.views.formats import Clock
from gateway.console.views.histogram import histogram
from gateway.sql.database import Database
from tests.console.reading import figures, plain
from tests.console.seeding import Seeder
from tests.console.test_money import seal_hours
from tests.console.visiting import Browser, Installation, installed
from tests.databases import Databases
from tests.stack import CATALOG

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


# --- The same bookings under several zones, over HTTP ---------------------------------------------

VISITED = ("UTC", "Asia/Kolkata", "America/New_York")
CHANGES = (date(2026, 3, 8), date(2026, 11, 1))
"""Days on which the clocks of New York change: they have 23 and 25 hours."""


@dataclass(frozen=True)
class Booked:
    installation: Installation
    changed: date
    moments: dict[str, datetime]
    """When each request was charged, by its id."""


@pytest.fixture(scope="module", params=CHANGES, ids=str)
def booked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: str,
    valkey: str,
) -> Iterator[Booked]:  # fmt: skip
    """Requests that were charged around each midnight and change of clocks, as of days later."""
    changed: date = request.param
    now = datetime.combine(changed + timedelta(days=4), time(12), UTC)
    with time_machine.travel(now):
        yield from _booked(tmp_path_factory, postgres, valkey, changed)


def _booked(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str, changed: date
) -> Iterator[Booked]:
    directory = tmp_path_factory.mktemp("zones")
    url = Databases("sqlite", directory, postgres).make()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    database = Database(url)
    moments: dict[str, datetime] = {}
    with database.transaction() as connection:
        seeder = Seeder(connection, catalog, since=datetime(2026, 2, 1, tzinfo=UTC))
        account, key = seeder.account("zoned", "9", name="zoned")
        for at in sorted(set(_moments(changed))):
            moments[seeder.charge(seeder.order(account, key, at), at)] = at
    seal_hours(database)
    database.dispose()
    with installed(directory / "home", url, valkey) as made:
        yield Booked(made, changed, moments)


def _moments(day: date) -> Iterator[datetime]:
    for zone in VISITED:
        for midnight in (border(day, zone), border(day + timedelta(days=1), zone)):
            yield from (midnight - INSTANT, midnight, midnight + timedelta(minutes=20))
    # In November, both of these are 01:30 in New York.
    for hour in (5, 6):
        yield datetime.combine(day, time(hour, 30), UTC)


def _visit(booked: Installation, zone: str) -> Browser:
    browser = booked.visitor("operator")
    assert browser.post("/console/preferences", {"zone": zone}).status_code == 303
    return browser


def _file(browser: Browser, path: str) -> list[dict[str, str]]:
    answer = browser.get(path)
    assert answer.status_code == 200, path
    return list(csv.DictReader(io.StringIO(answer.text)))


@pytest.mark.parametrize("zone", VISITED)
def test_days_are_half_open_and_sum_to_their_month(booked: Booked, zone: str) -> None:
    browser = _visit(booked.installation, zone)
    local = {id: at.astimezone(ZoneInfo(zone)).date() for id, at in booked.moments.items()}
    # The clocks of November change on its first day, some of which is October elsewhere.
    months = sorted({f"{day:%Y-%m}" for day in local.values()})
    assert f"{booked.changed:%Y-%m}" in months
    for month in months:
        first = date.fromisoformat(f"{month}-01")
        last = min(
            (first + timedelta(days=31)).replace(day=1) - timedelta(days=1),
            datetime.now(UTC).date(),
        )
        span = f"from={first}&to={last}"
        by_day = _file(browser, f"/console/usage?by=day&{span}&format=csv")
        by_month = _file(browser, f"/console/usage?by=month&{span}&format=csv")

        wanted = {
            str(day): n for day, n in Counter(local.values()).items() if f"{day:%Y-%m}" == month
        }
        assert {row["day"]: int(row["requests"]) for row in by_day} == wanted
        assert [row["month"] for row in by_month] == [month]
        for name in ("requests", "cost", "net_cost"):
            assert sum(Decimal(row[name]) for row in by_day) == Decimal(by_month[0][name])
        alone = 0
        for day in wanted:
            page = browser.get(f"/console/usage/bookings?account=zoned&from={day}&to={day}").text
            assert figures(page)["Requests"] == str(wanted[day]), day
            hours = _file(browser, f"/console/usage?by=hour&from={day}&to={day}&format=csv")
            assert sum(int(row["requests"]) for row in hours) == wanted[day]
            listed = _file(browser, f"/console/requests/file?from={day}&to={day}")
            assert {row["id"] for row in listed} == {
                id for id, of in local.items() if str(of) == day
            }
            alone += wanted[day]
        assert alone == int(by_month[0]["requests"])


def test_request_is_at_the_same_moment_in_every_zone(booked: Booked) -> None:
    for zone in VISITED:
        browser = _visit(booked.installation, zone)
        for id, at in booked.moments.items():
            page = browser.get(f"/console/requests/{id}").text
            local = at.astimezone(ZoneInfo(zone))
            assert f'datetime="{timestamp(at)}"' in page
            wanted = f"{local.day} {local:%b %Y %H:%M}"
            assert plain(page).partition("Settled ")[2].startswith(wanted), (zone, id)
            assert f'data-zone="{zone}"' in page
