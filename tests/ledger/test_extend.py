"""Incremental holds: extended while their request runs."""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.accounts.budgets import create_budget, end_budget
from gateway.ledger.bounds import BudgetExceeded
from gateway.ledger.extend import Ended, Extended, Extension, extend, mark_cut
from gateway.ledger.holds import CreditInUse, HoldRequest, KeySpendLimit, hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Settlement
from gateway.sql.database import Database
from tests.ledger.books import HOLD, LIMITS, Books, done, open_books


def sliced(books: Books) -> HoldRequest:
    """A request for 10 + 10 tokens (20 and 80 nanos each) with a hold for 5 output tokens."""
    order = books.order(hold_nanos=600, held_tokens=5)
    with books.database.transaction() as connection:
        hold(connection, [order])
    return order


def ask(books: Books, order: HoldRequest, amount: int, tokens: int) -> object:
    with books.database.transaction() as connection:
        return extend(connection, [Extension(order.request_id, amount, tokens)])[0]


def agree(books: Books) -> bool:
    with books.database.transaction() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


def test_repeated_extension_changes_nothing(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = sliced(books)

    assert isinstance(ask(books, order, 800, 8), Extended)
    assert isinstance(ask(books, order, 800, 8), Extended)

    assert books.balance().held_nanos == 800
    books.settle(done(order.request_id, input_tokens=10, output_tokens=8))
    assert books.balance().posted_nanos == 10 * HOLD - 840 + 40
    assert isinstance(ask(books, order, 1000, 10), Ended)
    assert agree(books)


def test_stream_that_cannot_be_extended_is_charged_its_hold(database: Database) -> None:
    books = open_books(database, credit=700)
    order = sliced(books)

    assert isinstance(ask(books, order, 1000, 10), CreditInUse)
    with database.transaction() as connection:
        mark_cut(connection, order.request_id, "insufficient_credit")
    (settled,) = books.settle(
        Settlement(
            order.request_id,
            "cancelled",
            "client",
            billable=True,
            usage=done(order.request_id, input_tokens=10, output_tokens=7).usage,
        )
    )

    assert settled is not None
    assert settled.closed.reason == "insufficient_credit"
    assert settled.closed.usage.output_tokens == 5
    assert settled.closed.cost_nanos == 600
    assert settled.clipped
    assert agree(books)


def test_tokens_beyond_the_hold_are_held_for_at_settlement(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD, spend_limit=10 * HOLD)
    with database.transaction() as connection:
        create_budget(connection, books.account.id, 10 * HOLD, window="day")
    order = sliced(books)

    (settled,) = books.settle(done(order.request_id, input_tokens=10, output_tokens=10))

    assert settled is not None
    assert settled.closed.cost_nanos == settled.closed.hold_nanos == 1000
    assert settled.closed.usage.output_tokens == LIMITS.output_tokens
    assert agree(books)


def test_extension_is_limited_by_credit_key_and_budget(database: Database) -> None:
    books = open_books(database, credit=1500)
    first, _second = sliced(books), sliced(books)
    assert isinstance(ask(books, first, 1000, 10), CreditInUse)

    books = open_books(database, credit=10 * HOLD, spend_limit=700)
    assert isinstance(ask(books, sliced(books), 1000, 10), KeySpendLimit)

    books = open_books(database, credit=10 * HOLD)
    with database.transaction() as connection:
        create_budget(connection, books.account.id, 700, window="hour")
    assert isinstance(ask(books, sliced(books), 1000, 10), BudgetExceeded)
    assert agree(books)


def test_budget_that_ended_does_not_limit_an_extension(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, 700, window="day")
    order = sliced(books)
    with database.transaction() as connection:
        end_budget(connection, budget.id)

    assert isinstance(ask(books, order, 1000, 10), Extended)
    books.settle(done(order.request_id, input_tokens=10, output_tokens=10))

    assert books.balance().held_nanos == 0
    assert agree(books)
