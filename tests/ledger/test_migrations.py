"""The migrations make the schema that the code was written for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy.exc import DBAPIError

import gateway.batches.tables
import gateway.media.tables
import gateway.voices.tables  # noqa: F401 -- their tables belong to the metadata
import migrations
from gateway.database import Database, migrate, open_engine, schema_is_current
from gateway.ledger.reconcile import reconcile
from gateway.tables import SYSTEM_ACCOUNTS, accounts, lots, metadata, price_periods


def test_the_migrated_schema_is_that_of_the_tables(database: Database) -> None:
    with database.transaction() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})

        assert compare_metadata(context, metadata) == []


def test_migrating_again_changes_nothing(database_url: str, database: Database) -> None:
    migrate(database_url)

    assert schema_is_current(database.engine)


def test_the_accounts_of_the_system_are_there(database: Database) -> None:
    with database.transaction() as connection:
        found = connection.execute(accounts.select().order_by(accounts.c.id)).mappings().all()

    assert {row["name"]: row["id"] for row in found} == {
        f"system:{name}": id for name, id in SYSTEM_ACCOUNTS.items()
    }


def test_what_was_booked_before_is_kept_and_its_balance_becomes_a_lot(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    engine = open_engine(url)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
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
        assert reconcile(connection, now=datetime.now(UTC)) == []
        with pytest.raises(DBAPIError, match="append-only"):
            connection.execute(price_periods.delete())
    assert (lot.account_id, lot.remaining_nanos) == (4, 900)
    assert (period.price_id, period.source) == (1, "catalog")
    database.engine.dispose()


def test_nothing_acknowledged_is_lost_with_the_power(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with engine.begin() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()
