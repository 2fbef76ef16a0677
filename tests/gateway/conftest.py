from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.databases import Databases
from tests.stack import Stack, running


@pytest.fixture(scope="session")
def shared_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """One gateway and one worker for the tests of a process; every test has its own account."""
    directory = tmp_path_factory.mktemp("stack")
    url = Databases("sqlite", directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    yield shared_stack
    shared_stack.close_clients()
