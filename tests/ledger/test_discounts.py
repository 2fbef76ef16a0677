"""Charges of requests in batches can be recomputed, repriced and corrected."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gateway.accounts.limits import Limit, set_limit
from gateway.billing.corrections import plan
from gateway.billing.usage.whatif import RepricedUsage, whatif
from gateway.ledger.concurrency import TooManyConcurrent
from gateway.ledger.discounts import put_discount_in_force
from gateway.ledger.holds import Held, HoldRequest, hold
from gateway.ledger.prices import put_in_force, store_price
from gateway.ledger.reconcile import reconcile
from gateway.performance import read_samples
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from tests.ledger.books import HOLD, PRICE, Books, done, open_books

HALF = Price((Component("input_token", 10), Component("output_token", 40)))
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def books(database: Database) -> Books:
    made = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        put_discount_in_force(connection, "m", "0.5", LONG_AGO)
    return made


def batch_order(books: Books, price: Price = HALF, **changes: object) -> HoldRequest:
    with books.database.transaction() as connection:
        price_id = store_price(connection, "m", price)
    return books.order(price_id=price_id, service_class="batch", **changes)


def run(books: Books, order: HoldRequest) -> int:
    """Hold and settle; return the charge."""
    with books.database.transaction() as connection:
        assert hold(connection, [order]) == [Held(order.request_id)]
    (settled,) = books.settle(done(order.request_id))
    assert settled is not None
    assert settled.closed.service_class == order.service_class
    return settled.closed.cost_nanos


def findings(books: Books) -> list[str]:
    with books.database.snapshot() as connection:
        return [found.rule for found in reconcile(connection, now=datetime.now(UTC))]


def test_batch_charge_is_recomputed_from_price_and_discount(books: Books) -> None:
    assert run(books, batch_order(books)) == 250
    assert run(books, books.order()) == 500

    assert findings(books) == []


def test_batch_charged_without_its_discount_is_found(books: Books) -> None:
    run(books, batch_order(books, PRICE))

    assert findings(books) == ["R7"]


def test_standard_request_charged_at_the_batch_price_is_found(books: Books) -> None:
    order = batch_order(books)
    run(books, books.order(price_id=order.price_id))

    assert findings(books) == ["R7"]


def test_batch_keeps_the_discount_at_acceptance(books: Books) -> None:
    now = datetime.now(UTC)
    run(books, batch_order(books))
    with books.database.transaction() as connection:
        put_discount_in_force(connection, "m", None, now + timedelta(minutes=1))
        put_discount_in_force(connection, "m", "0.9", now + timedelta(minutes=2))
    tenth = Price((Component("input_token", 2), Component("output_token", 8)))

    run(books, batch_order(books, tenth, accepted_at=now + timedelta(minutes=3)))
    assert findings(books) == []

    run(books, batch_order(books, tenth, accepted_at=now + timedelta(seconds=90)))
    assert findings(books) == ["R7"]


def test_repriced_batches_keep_their_discount(books: Books) -> None:
    run(books, batch_order(books))
    run(books, books.order())
    now = datetime.now(UTC)
    dear = Price((Component("input_token", 40), Component("output_token", 160)))

    with books.database.snapshot() as connection:
        found = whatif(
            connection,
            {"m": dear},
            starts_at=now - timedelta(hours=1),
            ends_at=now + timedelta(hours=1),
        )

    assert found == [RepricedUsage("m", requests=2, charged_nanos=750, repriced_nanos=1500)]


def test_corrected_batches_keep_their_discount(books: Books) -> None:
    run(books, batch_order(books))
    now = datetime.now(UTC)

    with books.database.snapshot() as connection:
        planned = [
            [
                (each.paid_nanos, each.due_nanos)
                for each in plan(
                    connection,
                    "m",
                    right,
                    starts_at=now - timedelta(hours=1),
                    ends_at=now + timedelta(hours=1),
                )
            ]
            for right in (PRICE, HALF)
        ]

    assert planned == [[], [(250, 125)]]


def test_speed_statistics_ignore_batches(books: Books) -> None:
    run(books, batch_order(books))
    run(books, books.order())

    with books.database.snapshot() as connection:
        assert len(read_samples(connection, "m", LONG_AGO)) == 1


def test_batch_lines_do_not_use_up_interactive_concurrency(books: Books) -> None:
    with books.database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, concurrent_max=1))
    of_batch = [batch_order(books) for _ in range(3)]

    with books.database.transaction() as connection:
        answers = hold(connection, [*of_batch, books.order()])
        assert [type(answer) for answer in answers] == [Held] * 4
    with books.database.transaction() as connection:
        (late, more) = hold(connection, [books.order(), batch_order_again(books, of_batch[0])])

    assert isinstance(late, TooManyConcurrent)
    assert isinstance(more, Held)


def batch_order_again(books: Books, like: HoldRequest) -> HoldRequest:
    return books.order(price_id=like.price_id, service_class="batch")


def test_first_discount_applies_immediately_and_changes_from_their_start(
    database: Database,
) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", PRICE, LONG_AGO)
        for _ in range(2):
            put_discount_in_force(connection, "m", "0.5", LONG_AGO)
        rows = connection.exec_driver_sql("SELECT COUNT(*) FROM batch_discounts").scalar()

    assert rows == 1
