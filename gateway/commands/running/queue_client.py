"""Runs what commands ask of the queue server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from gateway.commands.terminal import refuse
from gateway.doctor.services import queue_url
from gateway.operations.running.server import QueueServer
from gateway.settings import Settings
from workers.contract.redis import connect

T = TypeVar("T")


def ask(settings: Settings, work: Callable[[QueueServer], Awaitable[T]]) -> T:
    """Run ``work`` with the queue server of this installation. Exit if it does not answer."""
    url = queue_url(settings)
    if url is None:
        refuse("no queue server runs here; start `tollgate up`, or set REDIS_URL")

    async def run() -> T:
        redis = connect(url)
        try:
            return await work(QueueServer(redis, settings.namespace))
        finally:
            await redis.aclose()

    try:
        return asyncio.run(run())
    except (RedisError, OSError, TimeoutError) as error:
        refuse(f"the queue server does not answer: {error or type(error).__name__}")
