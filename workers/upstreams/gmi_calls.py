"""Calls of GMI Cloud's request queue: one request and its complete response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from workers.upstreams.endpoints import Endpoint
from workers.upstreams.sse import read_whole

CALL_TIMEOUT_S: Final = 30.0
"""Timeout of calls other than submissions and file transfers."""
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of a response: a result can contain its files in base64."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


async def call(endpoint: Endpoint, method: str, path: str, body: Any = None) -> Reply:
    """Make a call that is answered soon. Raise as ``send``, or ``TimeoutError``."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await send(endpoint, method, path, body)


async def send(endpoint: Endpoint, method: str, path: str, body: Any = None) -> Reply:
    """Make a call. Raise ``ExchangeError``, or ``TooLong`` if the response is too large."""
    content = None if body is None else msgspec.json.encode(body)
    response = await endpoint.connections.open(method, path, content)
    with closing(response):
        read = await read_whole(response.chunks(), BODY_BYTES_MAX)
        return Reply(response.status, response.headers, read)
