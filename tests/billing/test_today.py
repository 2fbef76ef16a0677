"""Sums of the present day that are kept as time passes equal those that are read anew."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from gateway.billing.usage.comparison import earlier_span
from gateway.billing.usage.coverage import midnight
from gateway.billing.usage.minutes import floor_minute
from gateway.billing.usage.report import Filters, Group, Span, regroup, usage
from gateway.billing.usage.today import ZONES_MAX, DaySums, TodayUsage
from gateway.sql.database import Database
from gateway.tables.usage import usage_hourly, usage_minutely
from tests.billing.test_minutes import book, build
from tests.databases import Databases
from tests.ledger.books import Books, open_books

START = datetime(2026, 10, 20, 22, tzinfo=UTC)
END = START + timedelta(days=9)
ZONES = ("UTC", "Asia/Kathmandu", "Pacific/Apia", "America/St_Johns")
DAY = timedelta(days=1)


def summed(groups: list[Group]) -> DaySums:
    def by(name: str) -> dict[str, Group]:
        return {group.labels[name]: group for group in regroup(groups, name)}

    return DaySums(by("account_id"), by("model"))


def anew(books: Books, zone: str, now: datetime) -> tuple[DaySums, DaySums]:
    """Sum the present day and the one a week before from receipts."""
    own, by = ZoneInfo(zone), ("account_id", "model")
    day = now.astimezone(own).date()
    whole = Span(midnight(day, own), midnight(day + DAY, own), own)
    today = Span(whole.starts_at, now, own)
    before = earlier_span(whole, "weekdays", now=floor_minute(now)).span
    with books.database.transaction() as connection:
        found = [
            usage(connection, span, by, Filters(), rolled=False, units=False)
            for span in (today, before)
        ]
    return summed(found[0]), summed(found[1])


def kept(books: Books, sums: TodayUsage, zone: str, now: datetime) -> tuple[DaySums, DaySums]:
    with books.database.transaction() as connection:
        return sums.read(connection, zone, now), sums.week_before(connection, zone, now)


def test_kept_sums_are_those_of_receipts_as_days_pass(databases: Databases) -> None:
    database = Database(databases.make())
    books = open_books(database, credit=10**10)
    r = random.Random(11)
    sums = TodayUsage()
    at, seen = START, 0
    while at < END:
        book(books, at, r)
        # A refund is booked 20 seconds after its receipt.
        at += timedelta(seconds=r.choice((21, 40, 70, 1000, 9000, 30000)))
        if r.random() < 0.7:
            build(database, at)
        zone = r.choice(ZONES)
        now = at - timedelta(seconds=r.choice((0, 0, 5)))
        assert kept(books, sums, zone, now) == anew(books, zone, now)
        seen += bool(anew(books, zone, now)[1].by_model)
    assert seen > 5
    database.dispose()


@pytest.fixture
def closed(database: Database) -> Books:
    """Two requests of an hour that is sealed, and one of a minute that is closed after it."""
    books = open_books(database, credit=10**9)
    r = random.Random(3)
    for minutes in (1, 2, 70):
        book(books, START + timedelta(minutes=minutes), r)
    build(database, START + timedelta(minutes=80))
    return books


def test_what_is_closed_is_not_read_again(closed: Books) -> None:
    sums, now = TodayUsage(), START + timedelta(minutes=81)
    before = kept(closed, sums, "UTC", now)[0]
    with closed.database.transaction() as connection:
        connection.execute(usage_hourly.delete())
        connection.execute(usage_minutely.delete())

    assert kept(closed, sums, "UTC", now + timedelta(seconds=5))[0] == before
    assert kept(closed, TodayUsage(), "UTC", now)[0].by_model == {}
    assert sum(group.requests for group in before.by_account.values()) == 3


def test_a_day_begins_with_nothing(closed: Books) -> None:
    sums = TodayUsage()
    assert kept(closed, sums, "UTC", START + timedelta(minutes=81))[0].by_model

    assert kept(closed, sums, "UTC", START + timedelta(hours=3))[0] == DaySums()


def test_what_is_booked_before_any_hour_is_sealed_counts(database: Database) -> None:
    books = open_books(database, credit=10**9)
    sums, r, now = TodayUsage(), random.Random(3), START + timedelta(minutes=50)
    book(books, START + timedelta(minutes=40), r)
    assert kept(books, sums, "UTC", now) == anew(books, "UTC", now)

    book(books, START + timedelta(minutes=10), r)

    assert kept(books, sums, "UTC", now) == anew(books, "UTC", now)


def test_sums_of_few_zones_are_kept(closed: Books) -> None:
    sums, now = TodayUsage(), START + timedelta(minutes=81)
    for hours in range(-9, ZONES_MAX):
        zone = f"Etc/GMT{hours:+d}"

        assert kept(closed, sums, zone, now) == anew(closed, zone, now)
    assert sums._zones.cache_info().currsize == ZONES_MAX
