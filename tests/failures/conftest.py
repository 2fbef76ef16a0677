from __future__ import annotations

import contextlib
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
    with own_stack(tmp_path, postgres) as made:
        yield made


@contextlib.contextmanager
def own_stack(tmp_path: Path, postgres: str, *, more_models: str = "") -> Iterator[Stack]:
    """A stack with a queue server and a SQLite database of its own."""
    url = Databases("sqlite", tmp_path, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    with (
        queue_server("valkey") as queue,
        running(tmp_path / "home", url, queue, namespace=name, more_models=more_models) as made,
    ):
        yield made


def mended(shared: Stack) -> Iterator[Stack]:
    """A stack of several tests: with a gateway and a worker, whatever the last one broke."""
    if "worker" not in shared.processes:
        shared.start_worker()
    if "gateway" not in shared.processes:
        shared.start_gateway()
    yield shared
    shared.close_clients()
