"""Lists of operators read their rows in a fixed number of statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from sqlalchemy import Engine, event, insert

from gateway.accounts.limits import Limit, set_concurrent, set_limit
from gateway.errors import InvalidRequest
from gateway.ledger.prices import LIST, put_in_force, set_price
from gateway.operations import invoices as invoice_operations
from gateway.operations import limits, prices
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.invoices import invoices
from tests.ledger.books import open_books

T = TypeVar("T")


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
        found, more = prices.list_page(
            connection, model=None, account=None, limit=10, cursor=None, cache={}
        )

    assert (len(found), more) == (6, None)
    assert len(statements) == 2


def test_limits_of_all_read_the_accounts_that_have_some(database: Database) -> None:
    books = open_books(database, credit=0)
    open_books(database, credit=0)
    with database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, None, None, requests_per_minute=5))

    with database.snapshot() as connection, counted() as statements:
        (found,), _ = limits.list_page(connection, None, limit=10, cursor=None)

    assert found["account"] == books.account.name
    assert "accounts.id IN" in statements[-1]


Page = tuple[Sequence[T], str | None]


def pages(read: Callable[[str | None], Page[T]]) -> list[T]:
    """Read a list page by page, until the last one."""
    found, cursor = read(None)
    rows = list(found)
    while cursor is not None:
        found, cursor = read(cursor)
        assert found
        rows += found
    return rows


def test_pages_of_prices_have_each_price_once(database: Database) -> None:
    books = open_books(database, credit=0)
    start = datetime.now(UTC) + timedelta(days=1)
    with database.transaction() as connection:
        put_in_force(connection, "a:colon", Price((Component("image", 1),)), start)
        for number, account_id in enumerate((LIST, books.account.id, LIST, books.account.id)):
            set_price(
                connection, "m", Price((Component("input_token", number),)),
                account_id=account_id, starts_at=start + timedelta(days=number),
                actor="test", reason="test",
            )  # fmt: skip

    def read(size: int, **filters: str | None) -> list[tuple[object, ...]]:
        with database.snapshot() as connection:
            found = pages(
                lambda cursor: prices.list_page(
                    connection,
                    **{"model": None, "account": None, **filters},
                    limit=size,
                    cursor=cursor,
                    cache={},
                )
            )
        return [(each["model"], each["account_id"], each["from"]) for each in found]

    whole = read(100)
    assert len(whole) == len(set(whole)) == 6
    assert all(read(size) == whole for size in (1, 2, 3, 5, 6))
    assert len(read(1, account=books.account.name)) == 2
    assert len(read(2, model="a:colon")) == 1


def test_pages_of_limits_have_each_limit_once(database: Database) -> None:
    first, second = open_books(database, credit=0), open_books(database, credit=0)
    with database.transaction() as connection:
        for books in (first, second):
            for key_id in (None, books.key.id):
                for model in (None, "m", "Z", "a:b"):
                    made = Limit(books.account.id, key_id, model, requests_per_minute=7)
                    set_limit(connection, made)
            # Its two halves are in two tables.
            set_concurrent(connection, books.account.id, books.key.id, 3)

    def read(size: int, account: str | None = None) -> list[tuple[object, ...]]:
        with database.snapshot() as connection:
            found = pages(
                lambda cursor: limits.list_page(connection, account, limit=size, cursor=cursor)
            )
        return [(each["account"], each["key"], each["model"], each["concurrent"]) for each in found]

    whole = read(100)
    assert len(whole) == len(set(whole)) == 16
    assert [each[3] for each in whole].count(3) == 2
    assert all(read(size) == whole for size in (1, 3, 5, 15, 16))
    assert read(3, second.account.name) == whole[8:]


def test_pages_of_invoices_have_each_invoice_once(database: Database) -> None:
    books = open_books(database, credit=0)
    with database.transaction() as connection:
        for number in range(1, 6):
            connection.execute(
                insert(invoices).values(
                    number=f"2026-{number:06}", account_id=books.account.id, kind="invoice",
                    month=f"2026-0{number}", total_cents=1, carried_in_nanos=0,
                    carried_out_nanos=0, opening_nanos=0, closing_nanos=0, actor="test",
                    issued_at=datetime.now(UTC),
                )
            )  # fmt: skip

    def read(size: int, account: str | None = None) -> list[str]:
        with database.snapshot() as connection:
            found = pages(
                lambda cursor: invoice_operations.list_page(
                    connection, account, limit=size, cursor=cursor
                )
            )
        return [each["number"] for each in found]

    assert read(2) == [f"2026-{number:06}" for number in range(1, 6)]
    assert read(5, books.account.name) == read(1)


@pytest.mark.parametrize("cursor", ["", "x", "1", "1:x:m", "-1:0:m", "9223372036854775807:0:m"])
def test_cursor_that_no_page_had_is_refused(database: Database, cursor: str) -> None:
    with database.snapshot() as connection:
        with pytest.raises(InvalidRequest):
            prices.list_page(connection, model=None, account=None, limit=1, cursor=cursor, cache={})
        if not cursor.startswith("9"):
            with pytest.raises(InvalidRequest):
                limits.list_page(connection, None, limit=1, cursor=cursor)
        with pytest.raises(InvalidRequest):
            invoice_operations.list_page(connection, None, limit=1, cursor=cursor)


@pytest.mark.parametrize("whose", ["all", "account"])
def test_pages_are_found_by_indexes(database: Database, whose: str) -> None:
    books = open_books(database, credit=0)
    account = None if whose == "all" else books.account.name
    plans: list[str] = []
    with database.snapshot() as connection, planned(plans):
        prices.list_page(connection, model=None, account=account, limit=5, cursor="0:0:a", cache={})
        limits.list_page(connection, account, limit=5, cursor="0:0:a")
        if account is None:  # the few of one account are sorted
            invoice_operations.list_page(connection, None, limit=5, cursor=None)

    if database.engine.dialect.name == "sqlite":  # PostgreSQL scans tables of a few rows
        assert plans
        unread = [line for line in plans if line.startswith("SCAN") and " USING " not in line]
        assert unread == []
        assert not any("TEMP B-TREE FOR ORDER BY" in line for line in plans), plans


@contextmanager
def planned(plans: list[str]) -> Iterator[None]:
    """Collect SQLite's plans of the queries of lists."""

    def explain(_: Any, cursor: Any, statement: str, values: Any, *__: Any) -> None:
        if "LIMIT" in statement and cursor.__class__.__module__ == "sqlite3":
            beside = cursor.connection.cursor()
            plans.extend(
                row[3] for row in beside.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            )

    event.listen(Engine, "before_cursor_execute", explain)
    yield
    event.remove(Engine, "before_cursor_execute", explain)
