"""A SQLite database, for tests whose SQL is the same on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.sql.database import Database
from tests.databases import Databases


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return Databases("sqlite", tmp_path_factory.mktemp("sqlite"), "postgresql://")


@pytest.fixture
def sqlite(sqlite_databases: Databases) -> Iterator[Database]:
    made = Database(sqlite_databases.make())
    yield made
    made.dispose()
