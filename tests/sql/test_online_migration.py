"""An installation is migrated while it books: short locks, taking turns, and continuing."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import text

import migrations
from gateway.ledger.holds import hold
from gateway.sql.database import Database, migrate, schema_is_current
from gateway.sql.partitions import is_described
from gateway.tables.core import metadata, receipts
from gateway.tables.settlement_time import month_bounds
from tests.databases import Databases
from tests.ledger.books import done, open_books

OLD: Final = "0034"
INVALID: Final = text("SELECT count(*) FROM pg_index WHERE NOT indisvalid")
VERSION: Final = text("SELECT version_num FROM alembic_version")


def downgraded(url: str) -> Database:
    """Open a database that has been given the schema of an earlier version."""
    database = Database(url)
    names = sorted(each.stem for each in Path(migrations.__path__[0], "versions").glob("*.py"))
    for name in reversed([each for each in names if each[:4] > OLD and each[:4].isdigit()]):
        with (
            database.transaction() as connection,
            Operations.context(MigrationContext.configure(connection)),
        ):
            importlib.import_module(f"migrations.versions.{name}").downgrade()
    with database.transaction() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{OLD}'"))
    return database


def started(url: str) -> subprocess.Popen[bytes]:
    code = "import sys; from gateway.sql.database import migrate; migrate(sys.argv[1])"
    return subprocess.Popen([sys.executable, "-c", code, url])


@pytest.fixture
def postgresql_url(postgres: str, tmp_path: Path) -> str:
    return Databases("postgresql", tmp_path, postgres).make()


def is_as_described(database: Database) -> bool:
    assert month_bounds.metadata is metadata
    with database.transaction() as connection:
        options: dict[str, Any] = {"compare_type": False}
        if database.engine.dialect.name == "postgresql":
            options["include_object"] = is_described
        context = MigrationContext.configure(connection, opts=options)
        return not compare_metadata(context, metadata)


def wait_for(database: Database, query: object, value: object) -> None:
    ends_at = time.monotonic() + 60
    while True:
        with database.transaction() as connection:
            if connection.execute(query).scalar() == value:  # type: ignore[call-overload]  # text
                return
        assert time.monotonic() < ends_at
        time.sleep(0.1)


def test_migration_waits_for_a_report_and_is_continued_after_a_kill(postgresql_url: str) -> None:
    database = Database(postgresql_url)
    books = open_books(database, credit=10_000_000)

    def charge() -> None:
        placed = books.order()
        with database.transaction() as connection:
            hold(connection, [placed])
        assert books.settle(done(placed.request_id))[0] is not None

    charge()
    database.dispose()
    database = downgraded(postgresql_url)
    books = dataclasses.replace(books, database=database)

    # A report of months: it keeps its snapshot, and a lock on the table, until it ends.
    with database.snapshot() as report:
        report.execute(receipts.select().with_only_columns(receipts.c.request_id)).all()
        first = started(postgresql_url)
        try:
            wait_for(database, INVALID, 2)  # of the table, and of the partition that is built
            with database.transaction() as connection:
                assert connection.execute(VERSION).scalar() == "0038"
            charge()
        finally:
            first.kill()
            first.wait()
        wait_for(
            database,
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tollgate migrate' "
                "AND datname = current_database() AND query LIKE 'CREATE INDEX%' "
                "AND state = 'active' AND NOT pg_terminate_backend(pid)"
            ),
            0,
        )
    second = started(postgresql_url)

    assert second.wait(180) == 0
    assert schema_is_current(database.engine)
    assert is_as_described(database)
    with database.transaction() as connection:
        assert connection.execute(INVALID).scalar() == 0
    charge()
    database.dispose()


def test_two_processes_migrate_one_after_the_other(database_url: str) -> None:
    database = downgraded(database_url)

    both = [started(database_url) for _ in range(2)]

    assert [each.wait(180) for each in both] == [0, 0]
    assert schema_is_current(database.engine)
    assert is_as_described(database)
    database.dispose()


def test_new_database_is_migrated_by_two_processes(databases: Databases) -> None:
    url = databases.empty()

    both = [started(url) for _ in range(2)]

    assert [each.wait(180) for each in both] == [0, 0]


def test_author_of_a_migration_sees_the_schema_before_and_after_all_versions(
    database_url: str,
) -> None:
    database = downgraded(database_url)
    seen: list[tuple[str | None, str]] = []

    migrate(database_url, migrated=lambda _, old, new: seen.append((old, new)))
    migrate(database_url, migrated=lambda _, old, new: seen.append((old, new)))

    with database.transaction() as connection:
        assert seen == [(OLD, connection.execute(VERSION).scalar())]
    database.dispose()
