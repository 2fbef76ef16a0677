"""Usage adds up: the days of any time zone are its receipts, cut at that zone's midnights."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from gateway.billing.usage import Period, read_period, total, usage
from gateway.database import Database
from gateway.errors import InvalidRequest
from gateway.ledger.holds import hold
from gateway.ledger.settle import settle
from tests.ledger.books import Books, done, open_books

ZONES = ("UTC", "Asia/Kathmandu", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia")
# The clocks of New York went back in this span, so one of its days has 25 hours.
START = datetime(2026, 10, 30, tzinfo=UTC)
HOURS = 96


@pytest.fixture
def books(database: Database) -> tuple[Books, list[tuple[datetime, int]]]:
    """An account with requests at random times, and those times with what each cost."""
    made = open_books(database, credit=10**9)
    r = random.Random(11)
    booked = []
    for _ in range(40):
        moment = START + timedelta(seconds=r.randrange(HOURS * 3600))
        order = made.order(accepted_at=moment, deadline_at=moment + timedelta(minutes=1))
        with database.transaction() as connection:
            hold(connection, [order])
            [closing] = settle(
                connection,
                [done(order.request_id, input_tokens=r.randrange(11))],
                now=moment,
                prices=made.prices,
                retention=timedelta(hours=1),
            )
        assert closing is not None
        booked.append((moment, closing.closed.cost_nanos))
    return made, booked


@pytest.mark.parametrize("name", ZONES)
def test_days_are_cut_where_the_zone_has_midnight(
    name: str, books: tuple[Books, list[tuple[datetime, int]]]
) -> None:
    made, booked = books
    zone = ZoneInfo(name)
    period = Period(date(2026, 10, 29), date(2026, 11, 4), zone)
    expected: Counter[str] = Counter()
    for moment, cost in booked:
        expected[moment.astimezone(zone).date().isoformat()] += cost

    with made.database.transaction() as connection:
        groups = usage(connection, made.account.id, period, ("day",))
        by_model = usage(connection, made.account.id, period, ("model", "key", "task"))

    assert {group.labels["day"]: group.cost_nanos for group in groups} == dict(expected)
    assert total(groups).cost_nanos == total(by_model).cost_nanos == sum(expected.values())
    assert total(groups).requests == len(booked)


def test_a_period_ends_with_its_last_day(
    books: tuple[Books, list[tuple[datetime, int]]],
) -> None:
    made, booked = books
    zone = ZoneInfo("America/New_York")
    days = [date(2026, 10, 29) + timedelta(days=number) for number in range(7)]

    with made.database.transaction() as connection:
        single = [
            total(usage(connection, made.account.id, Period(day, day, zone), ())) for day in days
        ]

    assert sum(group.cost_nanos for group in single) == sum(cost for _, cost in booked)


@pytest.mark.parametrize(
    ("first", "last", "zone", "param"),
    [
        (None, None, "Mars/Base", "tz"),
        (None, None, "../../etc/passwd", "tz"),
        (date(2026, 2, 1), date(2026, 1, 1), "UTC", "from"),
        (date(2020, 1, 1), date(2026, 1, 1), "UTC", "from"),
    ],
)
def test_a_period_that_cannot_be_is_refused(
    first: date | None, last: date | None, zone: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_period(first, last, zone, now=START)

    assert caught.value.param == param
