"""Both queue servers, once per test process; each test has a separate namespace."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.servers import queue_server
from workers.contract.queue import Queue
from workers.contract.redis import connect


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with queue_server("valkey") as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with queue_server("redis") as url:
        yield url


@pytest.fixture(params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
async def client(server_url: str) -> AsyncIterator[Redis]:
    redis = connect(server_url)
    yield redis
    await redis.aclose()


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def queue(client: Redis, namespace: str) -> Queue:
    return Queue(client, "tiny/model", namespace=namespace)
