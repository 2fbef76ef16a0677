"""The migrations make the schema that the code was written for."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gateway.database import Database, migrate, schema_is_current
from gateway.tables import SYSTEM_ACCOUNTS, accounts, metadata


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
