"""Lists of operators read their rows in a fixed number of statements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, event

from gateway.accounts.limits import Limit, set_limit
from gateway.ledger.prices import set_price
from gateway.operations import limits, prices
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from tests.ledger.books import open_books


@contextmanager
def counted() -> Iterator[list[str]]:
    found: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT"):
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield found
    event.remove(Engine, "before_cursor_execute", note)


def test_prices_are_read_in_two_statements(database: Database) -> None:
    open_books(database, credit=0)
    start = datetime.now(UTC) + timedelta(days=1)
    with database.transaction() as connection:
        for number in range(1, 6):
            price = Price((Component("input_token", number),))
            starts_at = start + timedelta(days=number)
            set_price(connection, "m", price, starts_at=starts_at, actor="test", reason="test")

    with database.snapshot() as connection, counted() as statements:
        found = prices.list_all(connection, model=None, account=None, cache={})

    assert len(found) == 6
    assert len(statements) == 2


def test_limits_of_all_read_the_accounts_that_have_some(database: Database) -> None:
    books = open_books(database, credit=0)
    open_books(database, credit=0)
    with database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, None, None, requests_per_minute=5))

    with database.snapshot() as connection, counted() as statements:
        (found,) = limits.list_all(connection, None)

    assert found["account"] == books.account.name
    assert "accounts.id IN" in statements[-1]
