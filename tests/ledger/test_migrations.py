"""The migrations create the schema of the tables in the code."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa
from alembic import command, op
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.exc import DBAPIError

import migrations
from gateway.accounts.budgets import create_budget, list_budgets
from gateway.ledger.holds import hold
from gateway.ledger.reconcile import reconcile
from gateway.sql.database import Database, UtcDateTime, migrate, open_engine, schema_is_current
from gateway.sql.partitions import is_described
from gateway.tables.core import SYSTEM_ACCOUNTS, accounts, lots, metadata, price_periods
from gateway.tables.settlement_time import month_bounds
from gateway.tables.users import sessions
from gateway.tables.webhooks import webhook_deliveries
from tests.databases import file_of_version, migration_config
from tests.ledger.books import done, open_books


def test_the_migrated_schema_is_that_of_the_tables(database: Database) -> None:
    with database.transaction() as connection:
        options = {"compare_type": False}
        if database.engine.dialect.name == "postgresql":
            options["include_object"] = is_described
        context = MigrationContext.configure(connection, opts=options)

        assert compare_metadata(context, metadata) == []


def test_migrating_again_changes_nothing(database_url: str, database: Database) -> None:
    migrate(database_url)

    assert schema_is_current(database.engine)
    with database.transaction() as connection:
        assert connection.execute(month_bounds.select()).all() == []


def test_the_accounts_of_the_system_are_there(database: Database) -> None:
    with database.transaction() as connection:
        found = connection.execute(accounts.select().order_by(accounts.c.id)).mappings().all()

    assert {row["name"]: row["id"] for row in found} == {
        f"system:{name}": id for name, id in SYSTEM_ACCOUNTS.items()
    }


def test_migration_keeps_bookings_and_turns_the_balance_into_a_lot(tmp_path: Path) -> None:
    url = file_of_version(tmp_path / "old.db", "0001")
    engine = open_engine(url)
    with engine.begin() as connection:
        for statement in (
            "INSERT INTO accounts (id, name, kind, posted_nanos, held_nanos, created_at) "
            "VALUES (4, 'old', 'customer', 900, 50, 0)",
            "INSERT INTO keys (id, account_id, prefix, secret_hash, scopes, created_at, held_nanos)"
            " VALUES (1, 4, 'tg_x', x'00', '[]', 0, 50)",
            "INSERT INTO transfers (key, kind, from_account, to_account, amount_nanos, "
            "posted_after, account_version, actor, booked_at) "
            "VALUES ('t', 'topup', 1, 4, 900, 900, 1, 'x', 0)",
            "INSERT INTO prices (id, model, components, minimum_nanos, content_sha256) "
            "VALUES (1, 'm', '[]', 0, 'x')",
            "INSERT INTO price_periods (model, account_id, effective_from, price_id) "
            "VALUES ('m', 0, 5, 1)",
            "INSERT INTO holds (request_id, account_id, key_id, model, task, price_id, hold_nanos,"
            " job, accepted_at, deadline_at) "
            "VALUES ('req_1', 4, 1, 'm', 't', 1, 50, x'00', 10, 99999999999999999)",
        ):
            connection.exec_driver_sql(statement)
    engine.dispose()

    migrate(url)

    database = Database(url)
    with database.transaction() as connection:
        (lot,) = connection.execute(lots.select()).all()
        (period,) = connection.execute(price_periods.select()).all()
        customer = accounts.select().where(accounts.c.id == 4)
        assert connection.execute(customer).one().open_requests == 1
        assert reconcile(connection, now=datetime.now(UTC)) == []
        with pytest.raises(DBAPIError, match="append-only"):
            connection.execute(price_periods.delete())
    assert (lot.account_id, lot.remaining_nanos) == (4, 900)
    assert (period.price_id, period.source) == (1, "catalog")
    database.dispose()


WAYS_BACK: Final = (
    "0012_lists",
    "0013_open_requests",
    "0022_archives",
    "0024_organisations",
    "0026_rewrites",
    "0028_proofs",
    "*_catalog_loads",
    "*_answers",
    "*_kept_inputs",
    "*_content_grants",
    "*_request_lists",
    "*_batch_quotes",
    "*_console_jobs",
    "*_usage_days",
    "*_month_bounds",
    "*_price_changes",
    "*_list_indexes",
    "*_columns",
)
"""Migrations that can be undone, besides 0019, which ``tests/sql/test_partitions.py`` undoes."""


def _name(pattern: str) -> str:
    """Return the name of a migration; the number of a new one can still change."""
    (path,) = Path(migrations.__path__[0], "versions").glob(f"{pattern}.py")
    return path.stem


def test_each_migration_with_a_way_back_is_undone_and_applied_again(database: Database) -> None:
    books = open_books(database, credit=10_000_000)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, 5, window="day")
    steps = [importlib.import_module(f"migrations.versions.{_name(each)}") for each in WAYS_BACK]
    moves = [step.downgrade for step in reversed(steps)] + [step.upgrade for step in steps]

    # In a transaction each, as they are applied: one of them builds indexes beside its own.
    for move in moves:
        with (
            database.transaction() as connection,
            Operations.context(MigrationContext.configure(connection)),
        ):
            move()

    with database.transaction() as connection:
        options = {"compare_type": False}
        if database.engine.dialect.name == "postgresql":
            options["include_object"] = is_described
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
        assert list_budgets(connection, books.account.id) == [budget]
        assert reconcile(connection, now=datetime.now(UTC)) == []


def test_sqlite_commits_survive_a_power_failure(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with engine.begin() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()


def test_open_webhook_deliveries_of_an_earlier_version_stay_due(database_url: str) -> None:
    """Written by the current code, then downgraded to the schema of 0006."""
    database = Database(database_url)
    books = open_books(database, credit=10_000_000)
    placed = books.order(webhook="https://example.com/hook")
    with database.transaction() as connection:
        hold(connection, [placed])
    books.settle(done(placed.request_id))
    with database.transaction() as connection:
        context = MigrationContext.configure(connection)
        with Operations.context(context):
            op.drop_column("rate_limits", "cancelled_seconds_per_hour")
            op.drop_table("webhook_attempts")
            (kept,) = connection.execute(webhook_deliveries.select()).mappings().all()
            op.drop_table("webhook_deliveries")
            op.create_table(
                "webhook_deliveries",
                sa.Column("request_id", sa.String(36), sa.ForeignKey("receipts.request_id")),
                sa.Column("account_id", sa.BigInteger(), sa.ForeignKey("accounts.id")),
                sa.Column("url", sa.String(2000), nullable=False),
                sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
                sa.Column("due_at", UtcDateTime(), nullable=False),
                sa.PrimaryKeyConstraint("request_id"),
            )
            op.create_index("ix_webhook_deliveries_due_at", "webhook_deliveries", ["due_at"])
        connection.execute(
            sa.text("INSERT INTO webhook_deliveries VALUES (:id, :account, :url, 3, :due)")
            .bindparams(sa.bindparam("due", type_=UtcDateTime()))
            .bindparams(
                id=kept["request_id"],
                account=kept["account_id"],
                url=kept["url"],
                due=kept["due_at"],
            )
        )
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0006'"))

    # Later migrations are already applied, because the schema was the current one.
    with database.transaction() as connection:
        config = migration_config(connection)
        command.upgrade(config, "0007")
        command.stamp(config, "head")

    with database.transaction() as connection:
        (found,) = connection.execute(webhook_deliveries.select()).mappings().all()
    assert (found["attempts"], found["tried"]) == (3, 3)
    assert found["due_at"] == found["queued_at"] == kept["due_at"]
    assert found["outcome"] is None
    assert found["ended_at"] is None
    database.dispose()


def test_columns_that_an_earlier_version_hid_stay_hidden(tmp_path: Path) -> None:
    url = file_of_version(tmp_path / "old.db", "0046")
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO users (id, name, created_at) VALUES (1, 'ann', 0)")
        for id, hidden in enumerate(("task,tags", "held,made", "")):
            connection.exec_driver_sql(
                "INSERT INTO sessions (id, token_hash, user_id, method, csrf, created_at, seen_at, "
                "proved_at, ends_at, network, agent, hidden) "
                f"VALUES ({id + 1}, x'0{id}', 1, 'link', x'00', 0, 0, 0, 0, '', '', '{hidden}')"
            )
    engine.dispose()

    migrate(url)

    database = Database(url)
    with database.transaction() as connection:
        kept = connection.scalars(sa.select(sessions.c.columns).order_by(sessions.c.id)).all()
    assert kept == [None, {"requests": ["held", "made"]}, {"requests": []}]
    database.dispose()
