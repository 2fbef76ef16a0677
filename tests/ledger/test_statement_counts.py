"""Holds and settlements send a fixed number of statements, whatever the size of the batch.

Counted at the driver's cursor; BEGIN and COMMIT come on top. One statement that is executed for
several rows counts once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from gateway.ledger.closed import Output
from gateway.ledger.concurrency import UNBOUNDED
from gateway.ledger.extend import Extension, extend
from gateway.ledger.holds import HoldRequest, hold
from gateway.ledger.settle import Settlement
from gateway.ledger.writer import book
from gateway.sql.database import Database
from tests.ledger.books import RETENTION, Books, done, open_books

HOLD = [
    "SELECT accounts and keys FOR UPDATE",
    "INSERT INTO holds",
    "UPDATE accounts",
    "UPDATE keys",
]
SETTLE = [
    "SELECT periods",
    "SELECT accounts and keys FOR UPDATE",
    "DELETE FROM holds",
    "SELECT lots",
    "UPDATE lots",
    "INSERT INTO transfers",
    "INSERT INTO receipts",
    "INSERT INTO outputs",
    "UPDATE accounts",
    "UPDATE keys",
]

sent: list[str] = []


class SqliteCursor(sqlite3.Cursor):
    def execute(self, sql: str, *rest: Any) -> sqlite3.Cursor:
        sent.append(sql)
        return super().execute(sql, *rest)

    def executemany(self, sql: str, *rest: Any) -> sqlite3.Cursor:
        sent.append(sql)
        return super().executemany(sql, *rest)


class SqliteConnection(sqlite3.Connection):
    def cursor(self, *_: Any) -> sqlite3.Cursor:  # type: ignore[override]  # always ours
        return super().cursor(SqliteCursor)


class PostgresqlCursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, *rest: Any, **options: Any) -> psycopg.Cursor[Any]:
        sent.append(query)
        return super().execute(query, *rest, **options)

    def executemany(self, query: Any, *rest: Any, **options: Any) -> None:
        sent.append(query)
        super().executemany(query, *rest, **options)


@pytest.fixture
def counted(database: Database) -> Iterator[Database]:
    """A database whose connections record what they send."""
    sqlite = database.engine.dialect.name == "sqlite"
    name = "do_connect" if sqlite else "connect"
    listener: Any = _connect_to_sqlite if sqlite else _on_connect_to_postgresql
    event.listen(database.engine, name, listener)
    yield database
    event.remove(database.engine, name, listener)


def _connect_to_sqlite(_: Any, __: Any, ___: Any, options: dict[str, Any]) -> None:
    options["factory"] = SqliteConnection


def _on_connect_to_postgresql(connection: psycopg.Connection[Any], _: Any) -> None:
    connection.cursor_factory = PostgresqlCursor


def statements() -> list[str]:
    """What was sent since the last call, in short; repetitions of one statement count once."""
    found: list[str] = []
    for sql in sent:
        verb, *words = sql.split()
        if "AS wanted" in sql:
            name = "SELECT accounts and keys FOR UPDATE"
        elif verb == "SELECT" and "FROM" in words:
            name = f"SELECT {words[words.index('FROM') + 1]}"
        elif verb in ("INSERT", "DELETE"):
            name = f"{verb} {words[0]} {words[1]}"
        else:
            name = f"{verb} {words[0]}" if words else verb
        if verb not in ("BEGIN", ";") and found[-1:] != [name]:  # the latter is a ping
            found.append(name)
    sent.clear()
    return found


def with_output(request: HoldRequest) -> Settlement:
    end = done(request.request_id)
    return Settlement(
        end.request_id, "succeeded", "completed", billable=True, usage=end.usage, output=Output()
    )


def owners(database: Database, count: int) -> list[Books]:
    """Open accounts with some credit, and read the price once."""
    books = [open_books(database, credit=10**9) for _ in range(count)]
    order = books[0].order()
    with database.transaction() as connection:
        hold(connection, [order])
    books[0].settle(done(order.request_id))
    statements()
    return books


@pytest.mark.parametrize("size", [1, 2, 30])
def test_batch_of_any_size_sends_the_same_statements(counted: Database, size: int) -> None:
    books = owners(counted, min(size, 3))
    orders = [books[number % len(books)].order() for number in range(size)]
    statements()

    with counted.transaction() as connection:
        hold(connection, orders)
    of_hold = statements()
    books[0].settle(*(with_output(order) for order in orders))

    assert of_hold == HOLD
    assert statements() == SETTLE


def test_batch_of_both_kinds_locks_and_writes_each_balance_once(counted: Database) -> None:
    one, other = owners(counted, 2)
    ending, beginning = [one.order(), other.order()], [one.order(), other.order()]
    with counted.transaction() as connection:
        hold(connection, ending)
    statements()

    with counted.transaction() as connection:
        book(
            connection,
            [*beginning, *(with_output(order) for order in ending)],
            prices=one.prices,
            retention=RETENTION,
            concurrent=UNBOUNDED,
        )

    assert statements() == [*SETTLE[:8], "INSERT INTO holds", *SETTLE[8:]]


def test_idempotency_keys_cost_two_statements(counted: Database) -> None:
    (books,) = owners(counted, 1)
    orders = [books.order(idempotency_key=name, body_sha256=b"x" * 32) for name in "ab"]
    statements()

    with counted.transaction() as connection:
        hold(connection, orders)

    assert statements() == [
        HOLD[0],
        "SELECT idempotency",
        HOLD[1],
        "INSERT INTO idempotency",
        *HOLD[2:],
    ]


def test_batch_that_was_accepted_before_is_read_and_changes_nothing(counted: Database) -> None:
    (books,) = owners(counted, 1)
    order = books.order()
    with counted.transaction() as connection:
        hold(connection, [order])
    statements()

    with counted.transaction() as connection:
        hold(connection, [order])

    assert statements() == [HOLD[0], "SELECT holds"]


def test_settlement_of_closed_requests_sends_two_reads_and_a_delete(counted: Database) -> None:
    (books,) = owners(counted, 1)
    order = books.order()
    statements()

    books.settle(done(order.request_id))

    assert statements() == SETTLE[:3]


def test_extension_sends_five_statements(counted: Database) -> None:
    (books,) = owners(counted, 1)
    order = books.order(held_tokens=5)
    with counted.transaction() as connection:
        hold(connection, [order])
    statements()

    with counted.transaction() as connection:
        extend(connection, [Extension(order.request_id, order.hold_nanos + 100, 10)])

    assert statements() == [HOLD[0], "SELECT holds", "UPDATE holds", *HOLD[2:]]
