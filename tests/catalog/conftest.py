"""Databases of the kinds that a test asks for, opened as often as it has gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import settings

from gateway.catalog import store
from gateway.sql.database import Database
from tests.databases import Databases

# No test asserts a duration: the machine may be busy with other things.
settings.register_profile("catalog", deadline=None, max_examples=100)
settings.load_profile("catalog")


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return Databases("sqlite", tmp_path_factory.mktemp("sqlite"), "postgresql://")


@pytest.fixture(scope="session")
def postgresql_databases(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Databases:
    return Databases("postgresql", tmp_path_factory.mktemp("postgresql"), postgres)


@pytest.fixture
def sqlite_url(sqlite_databases: Databases) -> str:
    return sqlite_databases.make()


@pytest.fixture
def postgresql_url(postgresql_databases: Databases) -> str:
    return postgresql_databases.make()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Database]]:
    """Open a database as a gateway process does."""
    opened: list[Database] = []

    def open_database(url: str) -> Database:
        opened.append(Database(url))
        return opened[-1]

    yield open_database
    for database in opened:
        await database.close()


@pytest.fixture
def short_notice(monkeypatch: pytest.MonkeyPatch) -> float:
    """Less time between a price change and its start, where a test has many of them."""
    notice_s = 0.5
    monkeypatch.setattr(store, "NOTICE_S", notice_s)
    monkeypatch.setattr(store, "NOTICE_ALONE_S", notice_s)
    monkeypatch.setattr(store, "REFRESH_S", 0.02)
    return notice_s
