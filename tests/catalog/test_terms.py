"""A gateway reads the prices that have changed, and all of them only if it has fallen behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, insert, select, text

from gateway.accounts.accounts import create_account
from gateway.catalog.selling import terms
from gateway.catalog.selling.terms import (
    NO_TERMS,
    Terms,
    TermsReading,
    delete_old_changes,
    read_terms,
)
from gateway.ledger.discounts import put_discount_in_force
from gateway.ledger.prices import LIST, cancel_price, put_in_force, set_price
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.core import price_periods
from gateway.tables.prices import price_changes

NOW = datetime.now(UTC)
SOON = NOW + timedelta(hours=1)
MODELS = ("painter", "writer")


def price(amount: int) -> Price:
    return Price((Component("image", amount),))


@pytest.fixture
def account(database: Database) -> int:
    """An account, with two models on sale and a price of its own for one."""
    with database.transaction() as connection:
        account = create_account(connection, "acme").id
        for model in MODELS:
            put_in_force(connection, model, price(9), NOW)
            put_discount_in_force(connection, model, "0.5", NOW)
        set_price(
            connection, "painter", price(5),
            account_id=account, starts_at=NOW, actor="x", reason="x",
        )  # fmt: skip
    return account


def read(database: Database, known: Terms = NO_TERMS) -> TermsReading:
    with database.transaction() as connection:
        return read_terms(connection, known)


def same(found: Terms, other: Terms) -> bool:
    return (found.version, found.schedule, found.discounts, set(found.models)) == (
        other.version,
        other.schedule,
        other.discounts,
        set(other.models),
    )


@contextlib.contextmanager
def scans() -> Iterator[list[str]]:
    """Collect the queries that read price periods, except those of single places."""
    found: list[str] = []

    def collect(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if "FROM price_periods" in statement and "IN (" not in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", collect)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", collect)


def test_changed_price_is_read_alone(database: Database, account: int) -> None:
    known = read(database).terms
    with database.transaction() as connection:
        set_price(
            connection, "writer", price(7),
            account_id=account, starts_at=SOON, actor="x", reason="x",
        )  # fmt: skip

    with scans() as found:
        reading = read(database, known)

    assert found == []
    assert set(reading.changed) == {("writer", account)}
    assert same(reading.terms, read(database).terms)


def test_first_price_of_a_model_makes_it_known(database: Database, account: int) -> None:
    known = read(database).terms
    with database.transaction() as connection:
        put_in_force(connection, "singer", price(1), NOW)

    found = read(database, known)

    assert set(found.changed) == {("singer", LIST)}
    assert set(found.terms.models) == {*MODELS, "singer"}


def test_cancelled_price_is_forgotten(database: Database, account: int) -> None:
    with database.transaction() as connection:
        set_price(
            connection, "writer", price(7),
            account_id=account, starts_at=SOON, actor="x", reason="x",
        )  # fmt: skip
    known = read(database).terms
    with database.transaction() as connection:
        cancel_price(
            connection, "writer",
            account_id=account, starts_at=SOON, now=NOW, actor="x", reason="x",
        )  # fmt: skip

    found = read(database, known)

    assert ("writer", account) not in found.terms.schedule
    assert same(found.terms, read(database).terms)


def test_changed_discount_changes_every_price_of_its_model(
    database: Database, account: int
) -> None:
    known = read(database).terms
    with database.transaction() as connection:
        put_discount_in_force(connection, "painter", "0.9", SOON)

    with scans() as found:
        reading = read(database, known)

    assert found == []
    assert set(reading.changed) == {("painter", LIST), ("painter", account)}
    assert same(reading.terms, read(database).terms)


def test_statement_of_many_rows_notes_each_place_once(database: Database, account: int) -> None:
    known = read(database).terms
    with database.transaction() as connection:
        price_id = connection.execute(select(price_periods.c.price_id)).scalars().first()
        rows = [
            {
                "model": model,
                "account_id": account,
                "effective_from": SOON + timedelta(hours=hour),
                "price_id": price_id,
            }
            for model in MODELS
            for hour in range(3)
        ]
        connection.execute(insert(price_periods).values(rows))

    found = read(database, known)

    assert set(found.changed) == {(model, account) for model in MODELS}
    assert same(found.terms, read(database).terms)


def test_version_without_changes_reads_no_price(database: Database, account: int) -> None:
    known = read(database).terms
    with database.transaction() as connection:
        connection.execute(text("UPDATE price_version SET version = version + 1"))

    with scans() as found:
        reading = read(database, known)

    assert (found, reading.changed) == ([], {})
    assert reading.terms.version == known.version + 1


@pytest.mark.parametrize("many", [False, True], ids=["pruned", "many"])
def test_gateway_that_has_fallen_behind_reads_everything(
    database: Database, account: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = read(database).terms
    for hour in range(1, 4):
        with database.transaction() as connection:
            set_price(
                connection, "writer", price(hour),
                starts_at=NOW + timedelta(hours=hour), actor="x", reason="x",
            )  # fmt: skip
    if many:
        monkeypatch.setattr(terms, "CHANGES_MAX", 2)
    else:
        with database.transaction() as connection:
            latest = connection.execute(select(price_changes.c.version)).scalars().all()
            old = price_changes.c.version < max(latest)
            connection.execute(delete(price_changes).where(old))

    found = read(database, known)

    assert set(found.changed) == set(found.terms.schedule)
    assert same(found.terms, read(database).terms)


def test_journal_keeps_what_gateways_can_need(
    database: Database, account: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "VERSIONS_KEPT", 2)
    current = read(database).terms.version

    with database.transaction() as connection:
        deleted = [delete_old_changes(connection, limit=2) for _ in range(3)]
        left = connection.execute(select(price_changes.c.version)).scalars().all()

    assert deleted == [2, 0, 0]
    assert sorted(left) == [current - 2, current - 1, current]


def test_changed_places_are_found_by_the_primary_key(database: Database, account: int) -> None:
    if database.engine.dialect.name == "postgresql":
        return  # a table of a few rows is read in full, whatever its indexes
    known = read(database).terms
    plans: list[str] = []
    with database.transaction() as connection:
        for model in MODELS:
            put_in_force(connection, model, price(1), NOW)

        def explain(_: object, cursor: Any, statement: str, values: object, *__: object) -> None:
            if "FROM price_periods" in statement:
                beside = cursor.connection.cursor()
                plan = beside.execute(f"EXPLAIN QUERY PLAN {statement}", values)
                plans.extend(row[3] for row in plan)

        event.listen(Engine, "before_cursor_execute", explain)
        try:
            read_terms(connection, known)
        finally:
            event.remove(Engine, "before_cursor_execute", explain)

    assert any(line.startswith("SEARCH price_periods") for line in plans)
    assert not any(line.startswith("SCAN price_periods") for line in plans)
