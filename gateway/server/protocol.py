"""HTTP connections with limits on their number and slowness, which uvicorn does not have.

A connection that does not send complete headers in time is closed, and so is one whose body arrives
more slowly than a minimum rate. Time in which the gateway itself pauses reading is not counted.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.requests.ticket import CONNECTION
from gateway.settings import Settings

_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\n"
    b"content-type: text/plain; charset=utf-8\r\n"
    b"content-length: 45\r\n"
    b"connection: close\r\n\r\n"
    b"The request headers were not received in time"
)


class BoundedProtocol(HttpToolsProtocol):
    """One connection; ``bounded_by`` creates a subclass with the limits of an installation."""

    connections_max: ClassVar[int]
    patience_s: ClassVar[float]
    """Time limit for a request's headers, and the interval over which a body's rate is measured."""
    rate_min: ClassVar[float]
    """Minimum rate of a body, in bytes per second."""

    gone: asyncio.Future[None]
    """Done once the client has disconnected."""

    _watch: asyncio.TimerHandle | None = None
    _used = False
    """Whether a request has ever begun on this connection."""
    _receiving = False
    """Whether a request has begun to arrive and is not complete."""
    _has_headers = False
    _late = False
    """Whether the headers were already missing at the previous check."""
    _received = 0
    """Bytes received since the previous check."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.gone = self.loop.create_future()
        if len(self.connections) > self.connections_max:
            transport.abort()
            return
        self._watch = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if not self.gone.done():
            self.gone.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._used = self._receiving = True
        self._has_headers = self._late = False
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._has_headers = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._receiving = False
        super().on_message_complete()

    @property
    def takes_chunks(self) -> bool:
        """Whether ``write_chunk`` would do what the application's ``send`` does."""
        cycle = self.cycle
        ended = cycle.response_complete or cycle.disconnected
        return bool(cycle.chunked_encoding) and not ended and not self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body of a response that is streamed in chunks."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _look(self) -> None:
        """Close the connection if it was too slow, otherwise schedule the next check."""
        if self.transport.is_closing():
            return
        received, self._received = self._received, 0
        if not self._used:
            self.transport.close()  # opened, but never used
            return
        if self._receiving and not self._has_headers:
            if self._late:
                self.transport.write(_TIMEOUT)
                self.transport.close()
                return
            self._late = True
        elif self._receiving and self._is_too_slow(received):
            self.transport.close()
            return
        self._watch = self.loop.call_later(self.patience_s, self._look)

    def _is_too_slow(self, received: int) -> bool:
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:
            return False
        return received < self.rate_min * self.patience_s


def bounded_by(settings: Settings) -> type[BoundedProtocol]:
    """Create the connection class with an installation's limits."""
    limits = {
        "connections_max": settings.connections_max,
        "patience_s": settings.header_timeout_s,
        "rate_min": settings.body_bytes_per_s_min,
    }
    return type("Connection", (BoundedProtocol,), limits)
