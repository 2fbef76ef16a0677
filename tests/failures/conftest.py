from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.databases import Databases
from tests.servers import queue_server
from tests.stack import Stack, running


@pytest.fixture
def stack(tmp_path: Path, postgres: str) -> Iterator[Stack]:
    """Everything of its own, since every test breaks something."""
    url = Databases("sqlite", tmp_path, postgres).make()
    with (
        queue_server("valkey") as queue,
        running(tmp_path / "home", url, queue, namespace=f"t{uuid.uuid4().hex[:8]}") as made,
    ):
        yield made
