"""Statements that run on the driver's cursor: their plans, values and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, bindparam, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from gateway.accounts import budgets, locks
from gateway.ledger import balances, concurrency, extend, holds, lots, settle
from gateway.ledger.holds import hold
from gateway.sql.database import Database
from gateway.sql.statements import CompiledStatement, any_of
from gateway.tables.core import accounts, budget_windows, idempotency
from gateway.tables.core import holds as holds_table
from tests.ledger.books import open_books

STATEMENTS: Mapping[str, tuple[CompiledStatement, dict[str, Any]]] = {
    "lock of balances": (
        balances._LOCK,
        {"new": ["a"], "new_first": "a", "new_last": "a", "keys": [1, 2], "open": ["b"]},
    ),
    "lock of accounts": (locks._LOCK_ACCOUNTS, {"ids": [1, 2]}),
    "known requests": (holds._KNOWN, {"ids": ["a", "b"]}),
    "idempotency key": (holds._EARLIER, {"account": 1, "name": "a"}),
    "holds to extend": (extend._FIND, {"ids": ["a", "b"]}),
    "holds to settle": (settle._TAKE, {"ids": ["a", "b"]}),
    "open lots": (lots._OPEN, {"accounts": [1, 2]}),
    "lock of organisations": (locks._LOCK_ORGANISATIONS, {"accounts": [1, 2]}),
    "budgets": (budgets._IN_FORCE, {"accounts": [1, 2], "organisations": [3]}),
    "window of a budget": (budgets._WINDOW, {"budget": 1, "starts": 2}),
    "concurrency limits": (concurrency._LIMITS, {"accounts": [1, 2]}),
    "open requests by model": (concurrency._OF_MODELS, {"accounts": [1, 2]}),
}
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001
TABLES = (
    *("accounts", "keys", "holds", "receipts", "lots", "idempotency"),
    *("budgets", "budget_windows", "rate_limits", "organisations", "organisation_accounts"),
)
_OF_NAMES = CompiledStatement(
    select(accounts.c.name).where(any_of(accounts.c.name, "names")).order_by(accounts.c.id)
)


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement_reads_no_whole_table(name: str, database: Database) -> None:
    statement, parameters = STATEMENTS[name]

    with database.transaction() as connection:
        plan = list(explain(connection, statement, parameters))

    assert plan
    assert [step for step in plan if step in {f"SCAN {table}" for table in TABLES}] == []


def explain(
    connection: Connection, statement: CompiledStatement, parameters: Mapping[str, Any]
) -> Iterator[str]:
    compiled, cursor = statement._start(connection)
    values = compiled.bind(parameters)
    if connection.dialect.name == "sqlite":
        for row in cursor.execute(f"EXPLAIN QUERY PLAN {compiled.sql}", values):
            yield row[3].split(" USING ")[0] if row[3].startswith("SCAN") else row[3]
        return
    # The tables are small: without this, the planner would prefer to read them whole.
    connection.execute(text("SET LOCAL enable_seqscan = off"))
    cursor.execute(f"EXPLAIN (FORMAT JSON) {compiled.sql}", values)
    found = cursor.fetchone()[0]
    yield from steps((found if isinstance(found, list) else json.loads(found))[0]["Plan"])


def steps(plan: dict[str, Any]) -> Iterator[str]:
    kind = plan["Node Type"]
    yield f"SCAN {plan['Relation Name']}" if kind == "Seq Scan" else kind
    for part in plan.get("Plans", ()):
        yield from steps(part)


def test_values_are_those_of_the_tables(database: Database) -> None:
    books = open_books(database, credit=10_000)
    order = books.order(metadata={"a": "ü\"'"}, held_tokens=7)
    with database.transaction() as connection:
        hold(connection, [order])
        (expected,) = connection.execute(select(holds_table)).mappings()

        (row,) = settle._TAKE.rows(connection, ids=[order.request_id])

    assert row == dict(expected)
    assert row["metadata"] == {"a": "ü\"'"}
    assert row["accepted_at"] == order.accepted_at
    assert row["accepted_at"].tzinfo is UTC


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], []),
        (["it's", 'a "name"'], ['a "name"', "it's"]),
        (["it's" + "x" * 300], []),
        (["ü", "none"], ["ü"]),
    ],
)
def test_list_is_one_parameter(names: list[str], found: list[str], database: Database) -> None:
    with database.transaction() as connection:
        connection.execute(
            insert(accounts),
            [
                {"name": name, "kind": "customer", "created_at": datetime.now(UTC)}
                for name in ('a "name"', "it's", "ü")
            ],
        )

        rows = _OF_NAMES.rows(connection, names=names)

    assert [row["name"] for row in rows] == found


def test_first_row_of_each_execution_or_none(database: Database) -> None:
    statement = CompiledStatement(select(accounts.c.name).where(accounts.c.id == bindparam("id")))

    with database.transaction() as connection:
        rows = statement.first_each(connection, [{"id": 2}, {"id": 77}, {"id": 1}])

    assert rows == [{"name": "system:revenue"}, None, {"name": "system:cash"}]


def test_violated_constraint_is_an_integrity_error(database: Database) -> None:
    statement = CompiledStatement(
        insert(budget_windows), columns=["budget_id", "starts_us", "limit_nanos", "hard"]
    )
    row = {"budget_id": 77, "starts_us": 1, "limit_nanos": 1, "hard": True}

    with pytest.raises(IntegrityError) as raised, database.transaction() as connection:
        statement.run(connection, [row, row])

    assert "budget_windows" in str(raised.value.statement)
    assert raised.value.params is None  # they can contain a client's prompt


def test_value_of_a_wrong_type_is_reported_before_it_is_sent(database: Database) -> None:
    statement = CompiledStatement(
        insert(idempotency),
        columns=["account_id", "key", "request_id", "body_sha256", "created_at"],
    )
    row = {"account_id": 1, "key": "k", "request_id": "r", "body_sha256": b"", "created_at": NAIVE}

    with pytest.raises(Exception, match="has no time zone"), database.transaction() as connection:
        statement.run(connection, [row])


def test_broken_connection_is_an_outage_and_leaves_the_pool(database: Database) -> None:
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that a server can close")

    def read_after_the_server_closed_it(connection: Connection) -> None:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with database.transaction() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        _OF_NAMES.rows(connection, names=["x"])

    with pytest.raises(OperationalError) as raised, database.transaction() as connection:
        read_after_the_server_closed_it(connection)

    assert isinstance(raised.value, DBAPIError)
    assert raised.value.connection_invalidated
    with database.transaction() as connection:
        assert _OF_NAMES.rows(connection, names=["system:cash"]) == [{"name": "system:cash"}]
