"""Usage reports equal receipts and refunds for any span, zone, grouping and filter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from gateway.accounts.keys import create_key
from gateway.billing.usage.days import ALL_ACCOUNTS
from gateway.billing.usage.report import (
    Filters,
    Group,
    Span,
    read_dimensions,
    read_span,
    total,
    usage,
)
from gateway.billing.usage.rollups import (
    build_due,
    build_due_days,
    build_hour,
    rebuild_day,
    rebuild_hours,
    seals,
)
from gateway.errors import InvalidRequest
from gateway.ledger.holds import hold
from gateway.ledger.refunds import refund
from gateway.ledger.settle import settle
from gateway.sql.database import Database
from gateway.tables.usage import usage_daily, usage_hourly
from tests.databases import Databases
from tests.ledger.books import PEPPER, Books, done, open_books

ZONES = ("UTC", "Asia/Kathmandu", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia")
# The clocks of New York went back in this span, so one of its days has 25 hours.
START = datetime(2026, 10, 30, tzinfo=UTC)
HOURS = 96
SEALED = START + timedelta(hours=70, minutes=20)


@dataclass(frozen=True)
class Booked:
    """Bookings as a list, to be summed without the database."""

    moment: datetime
    key: str
    model: str
    tag: str
    cost: int
    refunded: int
    request: int


@pytest.fixture(scope="module")
def past(databases: Databases) -> Iterator[tuple[Books, list[Booked]]]:
    """An account with requests and refunds at random times; most hours are sealed."""
    database = Database(databases.make())
    made = open_books(database, credit=10**9)
    with database.transaction() as connection:
        _, other = create_key(connection, made.account.id, pepper=PEPPER)
    r = random.Random(11)
    booked: list[Booked] = []
    for moment in sorted(START + timedelta(seconds=r.randrange(HOURS * 3600)) for _ in range(60)):
        if booked and booked[-1].moment < SEALED < moment:
            with database.transaction() as connection:
                build_due(connection, SEALED)
                while build_due_days(connection):
                    pass
        key = r.choice((made.key, other))
        model, tag = r.choice(("m", "n")), r.choice(("red", "blue"))
        order = made.order(
            accepted_at=moment,
            deadline_at=moment + timedelta(minutes=1),
            key_id=key.id,
            model=model,
            metadata={"colour": tag},
        )
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
        cost = closing.closed.cost_nanos
        booked.append(Booked(moment, key.prefix, model, tag, cost, 0, 1))
        if r.random() < 0.3:
            back = moment + timedelta(seconds=1)
            with database.transaction() as connection:
                refund(
                    connection,
                    order.request_id,
                    cost // 2,
                    key=f"refund:{order.request_id}",
                    actor="test",
                    reason="test",
                    clock=lambda back=back: back,  # type: ignore[misc]
                )
            booked.append(Booked(back, key.prefix, model, tag, 0, cost // 2, 0))
    yield made, booked
    database.dispose()


def ask(
    books: Books,
    span: Span,
    *by: str,
    rolled: bool = True,
    units: bool = True,
    **filters: object,
) -> list[Group]:
    with books.database.transaction() as connection:
        return usage(
            connection,
            span,
            by,
            Filters((books.account.id,), **filters),  # type: ignore[arg-type]
            rolled=rolled,
            units=units,
        )


def whole(zone: str = "UTC") -> Span:
    return Span(START - timedelta(days=1), START + timedelta(days=5), ZoneInfo(zone))


@pytest.mark.parametrize("name", ZONES)
@pytest.mark.parametrize("unit", ["hour", "day", "month"])
def test_times_follow_the_time_zone(name: str, unit: str, past: tuple[Books, list[Booked]]) -> None:
    books, booked = past
    zone = ZoneInfo(name)
    expected: Counter[str] = Counter()
    for each in booked:
        local = each.moment.astimezone(zone)
        label = {
            "hour": local.replace(minute=0, second=0, microsecond=0).isoformat(timespec="minutes"),
            "day": local.date().isoformat(),
            "month": local.strftime("%Y-%m"),
        }[unit]
        expected[label] += each.cost - each.refunded

    groups = ask(books, whole(name), unit)

    assert {g.labels[unit]: g.cost_nanos - g.refund_nanos for g in groups} == dict(expected)
    assert groups == ask(books, whole(name), unit, rolled=False)


@pytest.mark.parametrize("by", [(), ("model",), ("key", "day"), ("task",), ("tag:colour",)])
def test_any_grouping_has_the_same_total(
    by: tuple[str, ...], past: tuple[Books, list[Booked]]
) -> None:
    books, booked = past

    summed = total(ask(books, whole(), *by))

    assert summed.requests == sum(each.request for each in booked)
    assert summed.cost_nanos == sum(each.cost for each in booked)
    assert summed.refund_nanos == sum(each.refunded for each in booked)
    assert summed.units == total(ask(books, whole(), rolled=False)).units


@pytest.mark.parametrize("by", [(), ("day", "model"), ("account",)])
def test_report_without_units_has_the_same_requests_and_money(
    by: tuple[str, ...], past: tuple[Books, list[Booked]]
) -> None:
    books, _ = past
    span = whole("Asia/Kathmandu")

    groups = ask(books, span, *by)

    assert any(group.units for group in groups)
    assert ask(books, span, *by, units=False) == [replace(group, units={}) for group in groups]


def test_any_span_sums_what_was_booked_in_it(past: tuple[Books, list[Booked]]) -> None:
    books, booked = past
    r = random.Random(3)
    for _ in range(25):
        first, last = sorted(START + timedelta(seconds=r.randrange(HOURS * 3600)) for _ in "ab")

        summed = total(ask(books, Span(first, last, ZoneInfo("UTC")), "model"))

        within = [each for each in booked if first <= each.moment < last]
        assert summed.requests == sum(each.request for each in within)
        assert summed.cost_nanos == sum(each.cost for each in within)
        assert summed.refund_nanos == sum(each.refunded for each in within)


@pytest.mark.parametrize("name", ZONES)
@pytest.mark.parametrize("by", [(), ("model",), ("account", "task"), ("day",), ("month",)])
def test_days_have_the_sums_of_their_receipts(
    by: tuple[str, ...], name: str, past: tuple[Books, list[Booked]]
) -> None:
    books, _ = past
    first = START + timedelta(minutes=17)
    with books.database.transaction() as connection:
        for days in (1, 3):
            span = Span(first, first + timedelta(days=days, hours=1), ZoneInfo(name))
            for filters in (Filters(), Filters((books.account.id,)), Filters(models=("m",))):
                rolled = usage(connection, span, by, filters)

                assert rolled == usage(connection, span, by, filters, rolled=False)


def test_a_report_of_all_accounts_reads_one_row_for_each_day_and_model(
    past: tuple[Books, list[Booked]],
) -> None:
    books, _ = past
    day = (START + timedelta(days=1)).replace(hour=0)
    with books.database.transaction() as connection:
        connection.execute(usage_hourly.delete().where(usage_hourly.c.hour >= day))
        connection.execute(usage_daily.delete().where(usage_daily.c.account_id != ALL_ACCOUNTS))
        span = Span(day, day + timedelta(days=1), ZoneInfo("UTC"))

        assert usage(connection, span, ("model",), Filters()) == usage(
            connection, span, ("model",), Filters(), rolled=False
        )
        connection.rollback()


def test_filters_select_rows(past: tuple[Books, list[Booked]]) -> None:
    books, booked = past

    red = total(ask(books, whole(), tags={"colour": "red"}, models=("m",)))
    own = total(ask(books, whole(), key_ids=(books.key.id,)))

    assert red.cost_nanos == sum(e.cost for e in booked if (e.tag, e.model) == ("red", "m"))
    assert own.cost_nanos == sum(e.cost for e in booked if e.key == books.key.prefix)


def test_building_hours_again_gives_the_same_bytes(past: tuple[Books, list[Booked]]) -> None:
    books, _ = past
    with books.database.transaction() as connection:
        before = connection.execute(usage_hourly.select()).all()
        assert len(seals(connection)) == 70 - (booked_hour(past) - START) // timedelta(hours=1)

        days = connection.execute(usage_daily.select()).all()

        for day in days_of(past):
            assert rebuild_hours(connection, day) == []
            assert rebuild_day(connection, day) == []

        assert sorted(connection.execute(usage_daily.select()).all()) == sorted(days)
        assert sorted(connection.execute(usage_hourly.select()).all()) == sorted(before)


def days_of(past: tuple[Books, list[Booked]]) -> list[datetime]:
    first = booked_hour(past).replace(hour=0)
    return [first + timedelta(days=number) for number in range(5)]


def booked_hour(past: tuple[Books, list[Booked]]) -> datetime:
    return past[1][0].moment.replace(minute=0, second=0, microsecond=0)


def test_a_changed_cell_is_found_by_its_seal(past: tuple[Books, list[Booked]]) -> None:
    books, _ = past
    with books.database.transaction() as connection:
        connection.execute(usage_hourly.update().values(requests=usage_hourly.c.requests + 1))
        for day in days_of(past):
            assert rebuild_hours(connection, day) == []
        hour = booked_hour(past)
        old = next(seal for seal in seals(connection) if seal.hour == hour)
        assert build_hour(connection, hour) == old


@pytest.mark.parametrize("name", ["Mars/Olympus", "", "../../etc/passwd"])
def test_an_unknown_zone_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="tz"):
        read_span(None, None, name, now=START)


def test_a_span_is_days_of_the_zone_or_exact_moments() -> None:
    days = read_span("2026-03-01", "2026-03-01", "Asia/Kolkata", now=START)
    exact = read_span("2026-03-01T00:00:00Z", "2026-03-01T06:00:00+02:00", "UTC", now=START)
    usual = read_span(None, None, "Europe/Berlin", now=START)

    assert days.starts_at == datetime(2026, 2, 28, 18, 30, tzinfo=UTC)
    assert days.ends_at - days.starts_at == timedelta(days=1)
    assert exact.ends_at - exact.starts_at == timedelta(hours=4)
    assert usual.starts_at.astimezone(usual.zone).date() == date(2026, 10, 1)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ("2026-03-02", "2026-03-01", "is not before"),
        ("2020-01-01", "2026-03-01", "at most 800 days"),
        ("yesterday", None, "send a day"),
        ("2026-03-01T00:00:00", None, "with its offset"),
        ("0001-01-01", "0001-01-01", "send a day"),
    ],
)
def test_invalid_span_is_refused(first: str, last: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_span(first, last, "Asia/Kolkata", now=START)


def test_unknown_dimension_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tag:<name>"):
        read_dimensions("day,moon")
    assert read_dimensions("day, tag:project,day") == ("day", "tag:project")
