"""Minutes since the last sealed hour: reports with them equal receipts, as do hours of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import func, select

from gateway.billing.usage.minutes import (
    BACKLOG_MAX,
    HOUR,
    MINUTE,
    MINUTES_MAX,
    build_due_minutes,
    wait_for_bookings,
)
from gateway.billing.usage.report import Filters, Span, usage
from gateway.billing.usage.rollups import build_due, built_range, rebuild_hours
from gateway.ledger.holds import hold
from gateway.ledger.periods import booking_time
from gateway.ledger.refunds import refund
from gateway.ledger.settle import settle
from gateway.sql.database import Database
from gateway.tables.usage import usage_hourly, usage_minutely, usage_minutes
from tests.databases import Databases
from tests.ledger.books import Books, done, open_books

START = datetime(2026, 10, 30, 9, tzinfo=UTC)
NOW = START + timedelta(hours=1, minutes=43, seconds=50)
CLOSED = START + timedelta(hours=1, minutes=43)


@pytest.fixture(scope="module")
def busy(databases: Databases) -> Iterator[Books]:
    """An account with requests and refunds of two hours; the first is sealed, then minutes are."""
    database = Database(databases.make())
    books = open_books(database, credit=10**9)
    r = random.Random(5)
    moments = sorted(START + timedelta(seconds=r.randrange(2, 103 * 60 + 50)) for _ in range(80))
    for moment in (START + timedelta(seconds=1), *moments):
        book(books, moment, r)
    build(database, NOW)
    yield books
    database.dispose()


def book(books: Books, moment: datetime, r: random.Random) -> None:
    order = books.order(
        accepted_at=moment,
        deadline_at=moment + timedelta(minutes=1),
        model=r.choice(("m", "n")),
    )
    with books.database.transaction() as connection:
        hold(connection, [order])
        [closing] = settle(
            connection,
            [done(order.request_id, input_tokens=r.randrange(1, 11))],
            now=moment,
            prices=books.prices,
            retention=timedelta(hours=1),
        )
        assert closing is not None
    if r.random() < 0.3:
        with books.database.transaction() as connection:
            refund(
                connection,
                order.request_id,
                closing.closed.cost_nanos // 2,
                key=f"refund:{order.request_id}",
                actor="test",
                reason="test",
                clock=lambda: moment + timedelta(seconds=20),
            )


def build(database: Database, now: datetime) -> int:
    """Build what is due, as a gateway does each minute; return the number of minutes."""
    built = [MINUTES_MAX]
    while built[-1] == MINUTES_MAX:
        with database.transaction() as connection:
            built.append(build_due_minutes(connection, now))
    with database.transaction() as connection:
        while build_due(connection, now):
            pass
    return sum(built[1:])


def test_minutes_follow_the_last_sealed_hour(busy: Books) -> None:
    with busy.database.transaction() as connection:
        minute = usage_minutes.c.minute
        first, last, count = connection.execute(
            select(func.min(minute), func.max(minute), func.count())
        ).one()

        assert built_range(connection) == (START, START + HOUR)
        assert (first, last + MINUTE, count) == (START + HOUR, CLOSED, 43)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "Pacific/Apia"])
@pytest.mark.parametrize("by", [(), ("model", "key"), ("hour",), ("day", "account"), ("minute",)])
def test_reports_have_the_sums_of_receipts(by: tuple[str, ...], zone: str, busy: Books) -> None:
    r = random.Random(7)
    with busy.database.transaction() as connection:
        for _ in range(8):
            first, last = sorted(START + timedelta(seconds=r.randrange(7000)) for _ in "ab")
            span = Span(first, last + MINUTE, ZoneInfo(zone))
            for filters in (Filters(), Filters((busy.account.id,), models=("m",))):
                rolled = usage(connection, span, by, filters)

                assert rolled == usage(connection, span, by, filters, rolled=False)


def test_a_report_reads_minutes_in_place_of_their_receipts(busy: Books) -> None:
    span = Span(START + HOUR, CLOSED, ZoneInfo("UTC"))
    with busy.database.transaction() as connection:
        connection.execute(usage_minutely.delete())

        assert usage(connection, span, ("model",), Filters()) == []
        connection.rollback()


def test_an_hour_of_minutes_is_the_hour_of_its_receipts(busy: Books) -> None:
    with busy.database.transaction() as connection:
        sums = connection.execute(
            select(func.sum(usage_hourly.c.requests), func.sum(usage_hourly.c.refund_nanos))
        ).one()

        assert sums[0] > 20
        assert sums[1] > 0
        assert rebuild_hours(connection, START.replace(hour=0)) == []
        connection.rollback()


def test_after_a_long_pause_hours_come_first(database: Database) -> None:
    books = open_books(database, credit=10**9)
    book(books, START + timedelta(minutes=5), random.Random(1))
    assert build(database, START + timedelta(minutes=20, seconds=31)) == 20

    assert build(database, later := START + BACKLOG_MAX + HOUR + MINUTE) == 0
    with database.transaction() as connection:
        assert built_range(connection) == (START, START + 3 * HOUR)
        assert connection.execute(select(func.count(usage_minutes.c.minute))).scalar() == 0
        assert rebuild_hours(connection, START.replace(hour=0)) == []
    assert build(database, later + MINUTE) == 1


def test_bookings_do_not_wait_while_minutes_are_built(database: Database) -> None:
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    books = open_books(database, credit=10**9)
    with database.transaction() as connection:
        closed_at = wait_for_bookings(connection)
    book(books, closed_at - timedelta(minutes=3), random.Random(1))
    with database.transaction() as building:
        assert build_due_minutes(building, closed_at) > 0

        with database.transaction() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '500ms'")
            booking_time(connection)
