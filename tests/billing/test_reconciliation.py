"""Reconciliation finds rows that were tampered with, and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Table, text, update

from gateway.accounts.budgets import create_budget
from gateway.billing.reconciliation import check_books, last_reconciliation, run_reconciliation
from gateway.billing.usage.rollups import build_due, build_due_days
from gateway.ledger.holds import hold
from gateway.ledger.refunds import refund
from gateway.sql.database import Database
from gateway.tables.core import accounts, budget_windows, keys, lots
from gateway.tables.usage import usage_daily, usage_days, usage_hourly, usage_hours
from tests.ledger.books import HOLD, Books, done, open_books

LATER = timedelta(days=2)


@pytest.fixture
def books(database: Database) -> Books:
    """An account with rows for every rule: a budget, a hold, a refund, a sealed hour."""
    made = open_books(database, credit=10 * HOLD)
    with database.transaction() as connection:
        create_budget(connection, made.account.id, 9 * HOLD, window="total")
        order = made.order()
        hold(connection, [order, made.order()])
    made.settle(done(order.request_id))
    with database.transaction() as connection:
        refund(connection, order.request_id, 100, key="r", actor="test", reason="test")
        build_due(connection, datetime.now(UTC) + LATER)
        build_due_days(connection)
    return made


def rules(database: Database) -> set[str]:
    with database.snapshot() as connection:
        return {finding.rule for finding in check_books(connection, now=datetime.now(UTC))}


def test_books_that_agree_have_no_findings(books: Books) -> None:
    assert rules(books.database) == set()


@pytest.mark.parametrize(
    ("table", "column", "rule"),
    [
        (accounts, "posted_nanos", "R2"),
        (accounts, "held_nanos", "R3"),
        (keys, "held_nanos", "R3"),
        (accounts, "open_requests", "R3"),
        (keys, "open_requests", "R3"),
        (keys, "spent_nanos", "R4"),
        (lots, "remaining_nanos", "R8"),
        (budget_windows, "spent_nanos", "R9"),
        (budget_windows, "held_nanos", "R9"),
        (usage_hourly, "charge_nanos", "R10"),
        (usage_hourly, "output_tokens", "R10"),
        (usage_hours, "refund_nanos", "R10"),
        (usage_daily, "refund_nanos", "R10"),
        (usage_daily, "expensed", "R10"),
        (usage_days, "rows", "R10"),
    ],
)
def test_each_tampering_is_found(table: Table, column: str, rule: str, books: Books) -> None:
    with books.database.transaction() as connection:
        statement = update(table).values({column: table.c[column] - 1})
        if "kind" in table.c and table is accounts:
            statement = statement.where(table.c.kind == "customer")
        connection.execute(statement)

    assert rule in rules(books.database)


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE transfers SET amount_nanos = amount_nanos + 1 WHERE kind = 'charge'", "R4"),
        ("UPDATE transfers SET posted_after = posted_after + 1 WHERE kind = 'refund'", "R11"),
        ("UPDATE refunds SET amount_nanos = amount_nanos + 1", "R4"),
        ("UPDATE receipts SET charge_nanos = charge_nanos - 1", "R7"),
        ("UPDATE receipts SET output_tokens = output_tokens + 1", "R7"),
    ],
)
def test_changes_that_bypass_the_triggers_are_found(
    statement: str, rule: str, books: Books
) -> None:
    with books.database.transaction() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        else:
            table = statement.split()[1]
            connection.execute(text(f"DROP TRIGGER {table}_no_update"))
        connection.execute(text(statement))

    assert rule in rules(books.database)


async def test_findings_are_stored_for_every_gateway(books: Books) -> None:
    with books.database.transaction() as connection:
        assert last_reconciliation(connection) is None
        connection.execute(update(lots).values(remaining_nanos=lots.c.remaining_nanos - 1))

    found = await run_reconciliation(books.database)

    with books.database.transaction() as connection:
        assert last_reconciliation(connection) == found
    assert [finding.rule for finding in found.findings] == ["R8"]
