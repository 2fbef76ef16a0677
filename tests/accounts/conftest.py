"""Both queue servers; each test has a separate namespace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import queue_server


@pytest.fixture(scope="session")
def redis_6_url() -> Iterator[str]:
    with queue_server("redis") as url:
        yield url


@pytest.fixture(params=["valkey", "redis_6_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url
