"""A month that is made once for each database, and copied for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.sql.database import Database
from tests.archive.months import Month, make_month
from tests.databases import Databases


@pytest.fixture(scope="session")
def month_on_both(databases: Databases) -> Month:
    return make_month(databases.make())


@pytest.fixture
def march(month_on_both: Month, databases: Databases, tmp_path: Path) -> Iterator[Month]:
    """March on SQLite and on PostgreSQL."""
    yield from _copied(month_on_both, databases, tmp_path)


@pytest.fixture(scope="session")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return Databases("sqlite", tmp_path_factory.mktemp("sqlite"), "postgresql://unused")


@pytest.fixture(scope="session")
def month_on_sqlite(sqlite: Databases) -> Month:
    return make_month(sqlite.make())


@pytest.fixture
def one_march(month_on_sqlite: Month, sqlite: Databases, tmp_path: Path) -> Iterator[Month]:
    """March on SQLite, where nothing depends on the database."""
    yield from _copied(month_on_sqlite, sqlite, tmp_path)


def _copied(month: Month, databases: Databases, folder: Path) -> Iterator[Month]:
    url = databases.copy(month.url)
    database = Database(url)
    yield month.copied(url, database, folder / "blobs")
    database.dispose()
