"""Settings of the worker tests, and a queue with the gateway's side for each test."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers import queue_server
from tests.workers.running import Gateway
from workers.contract.redis import connect

# No test asserts a duration, because the machine can be busy.
settings.register_profile("workers", deadline=None)
settings.load_profile("workers")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with queue_server("valkey") as url:
        yield url


@pytest.fixture
async def gateway(redis_url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """The gateway's side of a separate queue."""
    async with listening(redis_url, f"t{uuid.uuid4().hex}", tmp_path) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def listening(url: str, namespace: str, home: Path) -> AsyncIterator[Gateway]:
    redis = connect(url)
    gateway = Gateway(redis, namespace, home, url)
    await gateway.mailbox.open()
    task = asyncio.create_task(gateway.listen())
    try:
        yield gateway
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await redis.aclose()


@pytest.fixture
def whole_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls that are interrupted between layers end in the step in which they begin."""
    monkeypatch.setattr("workers.engines.interrupting.SLICE_S", 60.0)


@pytest.fixture
def single_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt such calls before each layer."""
    monkeypatch.setattr("workers.engines.interrupting.SLICE_S", 0.0)
