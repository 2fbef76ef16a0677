"""Fixtures that all tests may use: real databases, one server of each kind per test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.sql.database import Database
from tests.databases import Databases, postgres_server
from tests.servers import queue_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    with queue_server("valkey") as url:
        yield url


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def databases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: str
) -> Databases:
    return Databases(request.param, tmp_path_factory.mktemp("databases"), postgres)


@pytest.fixture
def database_url(databases: Databases) -> str:
    return databases.make()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = Database(database_url)
    yield made
    made.dispose()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
