"""Creates the Redis client of every process: redis-py's, with connections of our own.

redis-py's client builds commands and decodes answers. Its connections are replaced, because a pool,
a task and several timers for each command took a seventh of a request's processor time. Commands
share one connection, see ``connection.py``; each blocking read has one to itself while it waits.

Nothing is repeated, because a write could happen twice: callers retry idempotent operations. The
protocol is pinned to RESP2, which every server from Redis 6.2 on supports and which needs no
handshake.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ConnectionError, ResponseError

from workers.contract.connection import Command, QueueConnection

BLOCK_MAX_S: Final = 2.0
"""Maximum wait of a blocking command; a longer one looks like a dead server."""

_SOCKET_S: Final = 6.0
_CONNECT_S: Final = 5.0
_BLOCKING: Final = frozenset(
    {
        *("BLMOVE", "BLMPOP", "BLPOP", "BRPOP", "BRPOPLPUSH"),
        *("BZMPOP", "BZPOPMAX", "BZPOPMIN", "XREAD", "XREADGROUP"),
    }
)


def connect(url: str) -> QueueClient:
    """Create a client for ``redis://``, ``rediss://`` or ``unix://``; it connects on first use.

    Close with ``aclose()``.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": None,
        "socket_timeout": _SOCKET_S,
        "socket_connect_timeout": _CONNECT_S,
        "decode_responses": False,
        "driver_info": None,
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
        options["socket_keepalive_options"] = _keepalive()
    return QueueClient(ConnectionPool.from_url(url, **options))


class QueueClient(Redis):
    """A client of redis-py whose commands and pipelines use our connections.

    The pool only knows how to open them.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        super().__init__(connection_pool=pool)
        self._shared = QueueConnection(pool.make_connection)
        self._blocking: set[QueueConnection] = set()
        self._idle: list[QueueConnection] = []

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command and return its answer, decoded as by redis-py."""
        if args[0] in _BLOCKING:
            answer = await self._wait(args)
        else:
            (answer,) = await self._shared.exchange(args)
        if isinstance(answer, Exception):
            raise answer
        return self.decode(args[0], answer, options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Collect commands, to be sent together."""
        return _Pipeline(self, transaction)

    async def exchange(self, *commands: Command) -> list[Any]:
        """Send commands together and return their answers undecoded; refusals are not raised."""
        return await self._shared.exchange(*commands)

    def post(self, *commands: Command) -> None:
        """Send commands with the next write, and ignore their answers.

        Only for what is repeated anyway: they can be lost.
        """
        self._shared.post(*commands)

    async def subscription(self, channel: str) -> AsyncIterator[None]:
        """Subscribe to a channel, and yield when messages have arrived.

        Raise ``ConnectionError`` when the connection is lost, with the messages of that time.
        """
        pushed = asyncio.Event()
        connection = QueueConnection(self.connection_pool.make_connection, on_push=pushed.set)
        self._blocking.add(connection)
        try:
            (answer,) = await connection.exchange(("SUBSCRIBE", channel))
            if isinstance(answer, Exception):
                raise answer
            while True:
                await pushed.wait()
                pushed.clear()
                if connection.lost:
                    raise ConnectionError("Subscription lost.")
                yield
        finally:
            connection.abort()
            self._blocking.discard(connection)

    async def aclose(self, close_connection_pool: bool | None = True) -> None:
        """Disconnect. Posted commands are sent before; commands in flight fail."""
        await asyncio.gather(*(one.close() for one in (self._shared, *self._blocking)))
        await super().aclose(close_connection_pool)

    async def _wait(self, command: Command) -> Any:
        """Send a blocking command over a connection that nothing else uses meanwhile."""
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = QueueConnection(self.connection_pool.make_connection)
            self._blocking.add(connection)
        try:
            (answer,) = await connection.exchange(command)
        except BaseException:
            # The server may still be waiting, for a caller that has gone.
            connection.abort()
            self._blocking.discard(connection)
            raise
        self._idle.append(connection)
        return answer

    def decode(self, name: Any, answer: Any, options: Mapping[str, Any]) -> Any:
        """Decode an answer as redis-py does."""
        decode = self.response_callbacks.get(name)
        if decode is None:
            return answer
        return decode(answer, **{key: options[key] for key in options if key != "keys"})


class _Pipeline(Pipeline):
    """Collects commands like redis-py's, and sends them over the client's shared connection."""

    def __init__(self, client: QueueClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = self.command_stack, []
        if not commands:
            return []
        sent = [args for args, _ in commands]
        if self.is_transaction:
            *queued, answers = await self._client.exchange(("MULTI",), *sent, ("EXEC",))
            if isinstance(answers, Exception):  # EXEC tells only that a command was refused
                raise next((one for one in queued if isinstance(one, Exception)), answers)
        else:
            answers = await self._client.exchange(*sent)
        for answer in answers:
            # Not only this command was refused if the server is loading or has too many clients.
            whole = isinstance(answer, Exception) and not isinstance(answer, ResponseError)
            if whole or (raise_on_error and isinstance(answer, Exception)):
                raise answer
        return [
            answer
            if isinstance(answer, Exception)
            else self._client.decode(args[0], answer, options)
            for answer, (args, options) in zip(answers, commands, strict=True)
        ]


def _keepalive() -> dict[int, int]:
    """Socket options that detect a vanished peer after 30 s, as far as the platform has them."""
    wanted = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    if hasattr(socket, "TCP_KEEPIDLE"):
        del wanted["TCP_KEEPALIVE"]
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
