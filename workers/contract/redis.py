"""Creates the Redis client of every process, without some defaults of redis-py 8.

Three of its defaults were measured to break a queue. It repeats a command that timed out, so that a
write can happen twice; here nothing is repeated, and callers retry idempotent operations. Its read
timeout interrupts blocking reads; here the timeout is longer than the longest of them
(``BLOCK_MAX_S``) and short enough to detect a dead server. Its pool refuses the 101st caller; here
callers wait for a connection, with a timeout. The protocol is pinned to RESP2, which every server
from Redis 6.2 on supports and which needs no handshake.

A fourth problem exists on Python 3.11: see ``_CancellableWrites``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, TimeoutError

BLOCK_MAX_S: Final = 2.0
"""Maximum wait of a blocking command; a longer one looks like a dead server."""

_READ_TIMEOUT_S: Final = 6.0
_CONNECT_TIMEOUT_S: Final = 5.0
_POOL_TIMEOUT_S: Final = 5.0


def connect(url: str, *, max_connections: int = 32) -> Redis:
    """Create a client for ``redis://``, ``rediss://`` or ``unix://``; it connects on first use.

    A blocking read occupies a connection, so allow for one per waiting task. Close with
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
    pool = BlockingConnectionPool.from_url(url, **options)
    kind = pool.connection_class
    pool.connection_class = type(kind.__name__, (_CancellableWrites, kind), {})
    return Redis.from_pool(pool)


class _CancellableWrites(AbstractConnection):
    """Times a write without ``asyncio.wait_for``, which redis-py uses for it.

    Before Python 3.12, ``wait_for`` swallows a cancellation that arrives as the write completes, so
    the cancelled task never ends. This was measured for a third of 300 tasks that were cancelled
    while sending commands continuously. ``wait_for`` also creates a task for every command, which
    takes a quarter of a command's CPU time.
    """

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        writer = self._writer
        assert writer is not None
        if isinstance(command, str):
            command = command.encode()
        try:
            async with asyncio.timeout(self.socket_timeout):
                writer.writelines([command] if isinstance(command, bytes) else command)
                await writer.drain()
        except OSError as error:
            await self.disconnect(nowait=True)
            kind = TimeoutError if isinstance(error, asyncio.TimeoutError) else ConnectionError
            raise kind(f"writing to the queue server: {error}") from error
        except BaseException:
            await self.disconnect(nowait=True)
            raise


def _keepalive() -> dict[int, int]:
    """Socket options that detect a vanished peer after 30 s, as far as the platform has them."""
    wanted = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    if hasattr(socket, "TCP_KEEPIDLE"):
        del wanted["TCP_KEEPALIVE"]
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
