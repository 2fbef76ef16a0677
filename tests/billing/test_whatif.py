"""Past usage under another price list."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from gateway.billing.usage.whatif import RepricedUsage, whatif
from gateway.ledger.holds import hold
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.core import metadata
from tests.ledger.books import HOLD, Books, done, open_books

DEAR = Price((Component("input_token", 40), Component("output_token", 160)))


@pytest.fixture
def books(database: Database) -> Books:
    made = open_books(database, credit=100 * HOLD)
    for model in ("m", "m", "n"):
        order = made.order(model=model)
        with database.transaction() as connection:
            hold(connection, [order])
        made.settle(done(order.request_id))
    return made


def ask(
    books: Books, prices: dict[str, Price], account_id: int | None = None
) -> list[RepricedUsage]:
    now = datetime.now(UTC)
    with books.database.snapshot() as connection:
        return whatif(
            connection,
            prices,
            starts_at=now - timedelta(hours=1),
            ends_at=now + timedelta(hours=1),
            account_id=account_id,
        )


def test_each_model_is_repriced_and_unpriced_requests_are_separate(books: Books) -> None:
    found = ask(books, {"m": DEAR})

    assert found == [
        RepricedUsage("m", requests=2, charged_nanos=1000, repriced_nanos=2000),
        RepricedUsage("n", unpriced_requests=1, unpriced_nanos=500),
    ]
    assert found[0].difference_nanos == 1000


def test_under_the_same_list_nothing_changes(books: Books) -> None:
    same = Price((Component("input_token", 20), Component("output_token", 80)))

    assert all(not row.difference_nanos for row in ask(books, {"m": same, "n": same}))


def test_a_price_that_does_not_cover_a_usage_is_reported(books: Books) -> None:
    (m, _) = ask(books, {"m": Price((Component("image", 5),))})

    assert (m.requests, m.unpriced_requests) == (0, 2)


def test_other_accounts_are_left_out_when_one_is_named(books: Books) -> None:
    assert ask(books, {"m": DEAR}, account_id=books.account.id + 1) == []


def test_nothing_is_written(books: Books) -> None:
    def content() -> list[object]:
        with books.database.transaction() as connection:
            return [
                sorted(map(str, connection.execute(text(f"SELECT * FROM {name}")).all()))
                for name in sorted(metadata.tables)
            ]

    before = content()
    ask(books, {"m": DEAR})

    assert content() == before
