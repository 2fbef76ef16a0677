"""A connection to the queue server: commands of many callers in one write, answers in order.

The commands of one turn of the event loop leave in one write. There is no pool, and no task or
timer per command: a caller waits on a future, and one timer per connection detects a silent server.
If the connection is lost, all commands in flight fail and may or may not have been executed;
nothing is repeated. The next command connects again. A caller that is cancelled only drops its
answer.

redis-py opens the connection, with TLS, credentials and database; this module takes its socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import hiredis
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import ConnectionError, DataError, InvalidResponse, TimeoutError

Command: TypeAlias = tuple[Any, ...]
"""Name and arguments: bytes, strings and numbers."""

ANSWER_S: Final = 6.0
"""Time without an answer to the oldest command after which the server counts as dead. Longer than
any blocking command takes."""
POST_S: Final = 0.02
"""Maximum delay of commands whose answers nothing waits for."""
EXCHANGES_MAX: Final = 10_000
"""Maximum number of exchanges in flight."""
UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum number of bytes that wait for a server that does not read."""
_CLOSE_S: Final = 1.0
_CLOSED: Final = "Connection to the queue server closed."
_LOST: Final = "Connection closed by the queue server."
_INCOMPLETE: Final = object()


class QueueConnection:
    """One connection at a time, opened by the first command and again after it was lost."""

    def __init__(
        self,
        opener: Callable[[], AbstractConnection],
        *,
        on_push: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_push`` is called for each message of a subscription, and when the connection is
        lost."""
        self._opener = opener
        self._on_push = on_push
        self._link: _Link | None = None
        self._opening: asyncio.Task[_Link] | None = None
        self._closed = False

    @property
    def lost(self) -> bool:
        """Whether there is no connection now."""
        return self._link is None or self._link.lost

    async def exchange(self, *commands: Command) -> list[Any]:
        """Send commands together and return their answers; a refusal is returned, not raised.

        Raise ``ConnectionError`` or ``TimeoutError`` (redis-py's) if an answer does not arrive.
        """
        data = [_pack(command) for command in commands]
        link = self._link
        if link is None or link.lost:
            link = await self._connect()
        return await link.send(data)

    def post(self, *commands: Command) -> None:
        """Send commands with the next write, or after ``POST_S``, and ignore their answers.

        They are lost with the connection, and dropped if there is none.
        """
        if self._link is not None and not self._link.lost:
            self._link.post([_pack(command) for command in commands])

    async def close(self) -> None:
        """Disconnect after everything has been written; commands in flight fail."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._link is not None:
            await self._link.close()

    def abort(self) -> None:
        """Disconnect immediately; commands in flight fail."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._link is not None:
            self._link.fail(ConnectionError(_CLOSED))

    async def _connect(self) -> _Link:
        if self._closed:
            raise ConnectionError(_CLOSED)
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        # All callers wait for the same task, so the cancellation of one must not reach it.
        return await asyncio.shield(self._opening)

    async def _open(self) -> _Link:
        opened = self._opener()
        try:
            await opened.connect()  # type: ignore[no-untyped-call]  # redis-py's
            reader, stream = opened._reader, opened._writer
            assert reader is not None
            assert stream is not None
            # From here on redis-py must neither use nor close the stream.
            opened._reader = opened._writer = None
            self._link = _Link(stream, self._on_push)
            # A connection that was reset does not report the end of its stream.
            if reader.at_eof() or reader.exception() is not None or stream.transport.is_closing():
                self._link.fail(ConnectionError(_LOST))
            elif self._closed:
                self._link.fail(ConnectionError(_CLOSED))
            return self._link
        except asyncio.CancelledError:
            raise ConnectionError(_CLOSED) from None
        finally:
            self._opening = None


class _Exchange:
    """Commands that were sent together, and their answers so far."""

    __slots__ = ("answers", "count", "future", "sent_s")

    def __init__(self, count: int, future: asyncio.Future[list[Any]], sent_s: float) -> None:
        self.count = count
        self.future = future
        self.sent_s = sent_s
        self.answers: list[Any] = []


class _Link(asyncio.Protocol):
    """An open connection, until it is lost."""

    def __init__(self, stream: asyncio.StreamWriter, on_push: Callable[[], None]) -> None:
        self.lost = False
        self._on_push = on_push
        self._loop = asyncio.get_running_loop()
        self._stream = stream  # some versions of Python close a stream that is not referenced
        self._transport = cast(asyncio.Transport, stream.transport)
        self._parser = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=DefaultParser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self._unsent: list[bytes] = []
        self._exchanges: deque[_Exchange] = deque()
        self._flushing: asyncio.Handle | None = None
        self._posting: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        # Of earlier turns; commands of this one are counted in the next.
        self._unsent_bytes = self._transport.get_write_buffer_size
        self._transport.set_protocol(self)

    def send(self, data: list[bytes]) -> asyncio.Future[list[Any]]:
        """Send commands with all others of this turn of the event loop."""
        if self.lost:
            raise ConnectionError(_LOST)
        if len(self._exchanges) >= EXCHANGES_MAX or self._unsent_bytes() >= UNSENT_BYTES_MAX:
            raise ConnectionError("Too many commands wait for the queue server.")
        future = self._add(data)
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)
        return future

    def post(self, data: list[bytes]) -> None:
        """Send commands with the next write, or after ``POST_S``."""
        if len(self._exchanges) >= EXCHANGES_MAX or self._unsent_bytes() >= UNSENT_BYTES_MAX:
            return
        self._add(data).add_done_callback(_ignore)
        if self._posting is None:
            self._posting = self._loop.call_later(POST_S, self._flush)

    def fail(self, error: Exception) -> None:
        """Disconnect immediately. Every command in flight raises such an error."""
        if self.lost:
            return
        self.lost = True
        self._transport.abort()
        for handle in (self._flushing, self._posting, self._watch):
            if handle is not None:
                handle.cancel()
        for exchange in self._exchanges:
            if not exchange.future.done():
                exchange.future.set_exception(type(error)(*error.args))
        self._exchanges.clear()
        self._on_push()

    async def close(self) -> None:
        """Disconnect after everything has been written."""
        if not self.lost:
            self._flush()
            self._transport.close()
        await asyncio.wait([self._closed], timeout=_CLOSE_S)
        self.fail(ConnectionError(_CLOSED))

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        try:
            while (answer := self._parser.gets()) is not _INCOMPLETE:
                self._receive(answer)
        except InvalidResponse as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(
            ConnectionError(f"Connection to the queue server lost: {error}." if error else _LOST)
        )
        if not self._closed.done():
            self._closed.set_result(None)

    def _receive(self, answer: Any) -> None:
        if not self._exchanges:
            # A message of a subscription or, from a server that refuses connections, the reason.
            if isinstance(answer, Exception):
                self.fail(ConnectionError(str(answer)))
            self._on_push()
            return
        exchange = self._exchanges[0]
        exchange.answers.append(answer)
        if len(exchange.answers) == exchange.count:
            self._exchanges.popleft()
            if not exchange.future.done():
                exchange.future.set_result(exchange.answers)

    def _add(self, data: list[bytes]) -> asyncio.Future[list[Any]]:
        exchange = _Exchange(len(data), self._loop.create_future(), self._loop.time())
        self._exchanges.append(exchange)
        self._unsent += data
        if self._watch is None:
            self._watch = self._loop.call_at(exchange.sent_s + ANSWER_S, self._check)
        return exchange.future

    def _flush(self) -> None:
        self._flushing = None
        if self._posting is not None:
            self._posting.cancel()
            self._posting = None
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def _check(self) -> None:
        """Disconnect if the oldest command was not answered in time."""
        self._watch = None
        if not self._exchanges:
            return
        due_s = self._exchanges[0].sent_s + ANSWER_S
        if self._loop.time() >= due_s:
            self.fail(TimeoutError("Timeout reading from the queue server."))
        else:
            self._watch = self._loop.call_at(due_s, self._check)


def _pack(command: Command) -> bytes:
    name = command[0]
    if " " in name:  # redis-py's name of a subcommand, such as SCRIPT LOAD
        command = (*name.split(), *command[1:])
    try:
        packed: bytes = hiredis.pack_command(command)
    except TypeError as error:
        raise DataError(str(error)) from None
    return packed


def _ignore(answers: asyncio.Future[list[Any]]) -> None:
    if not answers.cancelled():
        answers.exception()  # asyncio reports errors that nothing has looked at
