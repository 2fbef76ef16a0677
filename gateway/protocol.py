"""HTTP connections that are bounded in number and in patience: uvicorn's own have no such limits.

A connection that sends no complete header in time is closed, and so is one whose body arrives more
slowly than a minimum rate. Time in which the gateway itself pauses reading is not counted.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.settings import Settings

_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\n"
    b"content-type: text/plain; charset=utf-8\r\n"
    b"content-length: 47\r\n"
    b"connection: close\r\n\r\n"
    b"The headers of the request did not come in time"
)


class BoundedProtocol(HttpToolsProtocol):
    """One connection; ``bounded_by`` makes the class with the limits of an installation."""

    connections_max: ClassVar[int]
    patience_s: ClassVar[float]
    """Time for the headers of a request; the rate of a body is measured over as long."""
    rate_min: ClassVar[float]
    """Bytes per second."""

    _watch: asyncio.TimerHandle | None = None
    _used = False
    """Whether a request has ever begun here."""
    _receiving = False
    """Whether a request has begun to arrive and is not complete."""
    _has_headers = False
    _late = False
    """Whether its headers were missing the last time already."""
    _received = 0
    """Bytes since then."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            transport.abort()
            return
        self._watch = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._used = self._receiving = True
        self._has_headers = self._late = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._has_headers = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._receiving = False
        super().on_message_complete()

    def _look(self) -> None:
        """Close the connection if it was too slow, else look again later."""
        if self.transport.is_closing():
            return
        received, self._received = self._received, 0
        if not self._used:
            self.transport.close()  # it was opened for nothing
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
    """Make the class of an installation's connections."""
    limits = {
        "connections_max": settings.connections_max,
        "patience_s": settings.header_timeout_s,
        "rate_min": settings.body_bytes_per_s_min,
    }
    return type("Connection", (BoundedProtocol,), limits)
