"""The Redis client of every process: one place that turns off what redis-py 8 does by default.

Its defaults were measured to break a queue in three ways. It repeats a command that timed out, so
a write may happen twice: here nothing is repeated; callers repeat what they know to be idempotent.
Its read timeout cuts off blocking reads: here the timeout is longer than the longest of them
(``BLOCK_MAX_S``) and short enough to notice a dead server. Its pool refuses the 101st caller: here
callers queue for a connection, with a bound. The protocol is pinned to RESP2, which every server
from Redis 6.2 on speaks and which needs no handshake.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis

BLOCK_MAX_S: Final = 2.0
"""No blocking command may wait longer: a longer wait cannot be told from a dead server."""

_READ_TIMEOUT_S: Final = 6.0
_CONNECT_TIMEOUT_S: Final = 5.0
_POOL_TIMEOUT_S: Final = 5.0


def connect(url: str, *, max_connections: int = 32) -> Redis:
    """Make a client for ``redis://``, ``rediss://`` or ``unix://``; it connects when first used.

    A blocking read holds a connection while it waits, so allow for one per waiting task. Close with
    ``aclose()``.
    """
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": _POOL_TIMEOUT_S,
        "protocol": 2,
        "retry": None,
        "socket_timeout": _READ_TIMEOUT_S,
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "decode_responses": False,
        "driver_info": None,
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
        options["socket_keepalive_options"] = _keepalive()
    return Redis.from_pool(BlockingConnectionPool.from_url(url, **options))


def _keepalive() -> dict[int, int]:
    """Notice a peer that vanished without a word after 30 s, where the platform can."""
    wanted = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    if hasattr(socket, "TCP_KEEPIDLE"):
        del wanted["TCP_KEEPALIVE"]
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
