"""The Redis client without redis-py's harmful defaults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from tests.contract.proxy import lossy_proxy
from workers.contract.redis import BLOCK_MAX_S, connect


async def test_a_write_whose_answer_was_lost_is_not_repeated(
    server_url: str, client: Redis, namespace: str
) -> None:
    async with lossy_proxy(server_url) as (proxy, url):
        remote = connect(url)
        await remote.ping()
        proxy.lose = 1

        with pytest.raises(ConnectionError):
            await remote.incr(namespace)

        assert await client.get(namespace) == b"1"
        assert await remote.incr(namespace) == 2
        await remote.aclose()
    await client.delete(namespace)


async def test_the_longest_blocking_read_ends_without_an_error(
    client: Redis, namespace: str
) -> None:
    assert await client.bzpopmin([namespace], BLOCK_MAX_S) is None


async def test_many_callers_share_one_connection(server_url: str, client: Redis) -> None:
    before = (await client.info("clients"))["connected_clients"]
    many = connect(server_url)

    answers = await asyncio.gather(*(many.ping() for _ in range(300)))

    assert all(answers)
    assert (await client.info("clients"))["connected_clients"] == before + 1
    await many.aclose()


async def test_unreachable_server_is_an_error_immediately(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/nobody")

    with pytest.raises(ConnectionError):
        await client.ping()

    await client.aclose()
