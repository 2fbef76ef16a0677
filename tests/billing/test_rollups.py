"""Hours and days are built in short transactions, and bookings do not wait for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gateway.audit_log import Author
from gateway.billing.usage.days import built_days, floor_day
from gateway.billing.usage.rollups import DAYS_MAX, build_due, build_due_days
from gateway.ledger.holds import hold
from gateway.ledger.periods import booking_time
from gateway.operations.periods import rebuild_rollups
from gateway.sql.database import Database
from gateway.tables.usage import usage_daily
from tests.ledger.books import Books, done, open_books

AUTHOR = Author("test", "system")


@pytest.fixture
def sealed(database: Database) -> Books:
    """An account with a request, whose hours and those of the next week are built."""
    books = open_books(database, credit=10_000_000)
    order = books.order()
    with database.transaction() as connection:
        hold(connection, [order])
    books.settle(done(order.request_id))
    now = floor_day(datetime.now(UTC)) + timedelta(days=7, hours=1)
    with database.transaction() as connection:
        while build_due(connection, now):
            pass
    return books


def test_days_are_built_five_at_a_time(sealed: Books) -> None:
    built = []
    while not built or built[-1] == DAYS_MAX:
        with sealed.database.transaction() as connection:
            built.append(build_due_days(connection))

    assert built == [5, 2]
    with sealed.database.transaction() as connection:
        span = built_days(connection)
    assert span is not None
    assert span[1] - span[0] == timedelta(days=7)


def test_open_booking_does_not_wait_for_days_nor_they_for_it(sealed: Books) -> None:
    if sealed.database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    with sealed.database.transaction() as booking:
        booking_time(booking)

        with sealed.database.transaction() as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '500ms'")
            assert build_due_days(connection) == DAYS_MAX
        assert rebuild_rollups(sealed.database, AUTHOR) == []


def test_rebuilding_names_what_differed_and_mends_it(sealed: Books) -> None:
    with sealed.database.transaction() as connection:
        while build_due_days(connection):
            pass
        connection.execute(usage_daily.delete())

    assert rebuild_rollups(sealed.database, AUTHOR) == []
    with sealed.database.transaction() as connection:
        assert connection.execute(usage_daily.select()).first() is not None
