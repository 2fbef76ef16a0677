"""HTTP connections to one endpoint of an upstream, by aiohttp.

Knows neither wire formats nor retries. A request that was sent may have been processed, and
charged, so each failure tells whether that is possible:

    ExchangeError             the request may have been processed
    ├── NotConnectedError     no connection was established
    └── NotSentError          the connection was lost before the request was sent

Redirects are not followed and cookies are not kept.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.http_exceptions import HttpProcessingError

CLOSED_S: Final = 0.5
"""Time within which the loss of a reused connection means that it was closed while idle."""
KEEP_ALIVE_S: Final = 5.0
"""Time for which an idle connection is kept, as in httpx."""
HEADER_BYTES_MAX: Final = 64 * 1024
"""Maximum size of one header of a response."""


class ExchangeError(Exception):
    """The exchange failed, and the upstream may have processed the request."""


class NotConnectedError(ExchangeError):
    """No connection was established."""


class NotSentError(ExchangeError):
    """The connection was lost before the request was sent, so it produced nothing."""


class Connections:
    """The connections to one endpoint, shared by all calls; at most ``limit`` are in use."""

    def __init__(
        self, url: str, *, limit: int, connect_timeout_s: float, headers: Mapping[str, str]
    ) -> None:
        self._url = url
        # Not the connector's limit: waiting for a connection would count as connecting.
        self._slots = asyncio.Semaphore(limit)
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_on_reuse)
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=_tls_context()),
            # Calls set their own timeouts for the response.
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
            headers={"User-Agent": "Tollgate-Worker"} | dict(headers),
            proxy=_environment_proxy(url),
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_Request,
            trace_configs=[tracing],
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        )

    async def open(self, method: str, path: str, body: bytes | None = None) -> Response:
        """Send a request. Return its response, which has started and must be closed.

        Raise ``ExchangeError``. Cancelling closes the connection.
        """
        sending = _Sending(body or b"")
        await self._slots.acquire()
        try:
            response = await self._session.request(
                method,
                self._url + path,
                data=None if body is None else sending,
                allow_redirects=False,
                trace_request_ctx=sending,
            )
        except BaseException as error:
            self._slots.release()
            sending.abort()
            if isinstance(error, _NOT_CONNECTED):
                raise NotConnectedError from error
            if isinstance(error, aiohttp.ClientConnectionError) and not sending.is_sent:
                raise NotSentError from error
            if isinstance(error, aiohttp.ClientError):
                raise ExchangeError from error
            raise
        sending.release()
        return Response(response, self._slots.release)

    async def close(self) -> None:
        await self._session.close()


class Response:
    """A response that has started."""

    def __init__(self, response: aiohttp.ClientResponse, release: Callable[[], None]) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._release = release

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, decompressed. Raise ``ExchangeError``."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            raise ExchangeError from error

    def close(self) -> None:
        """Close the connection, unless the body was read to its end. To be called once."""
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        self._response.close()
        self._release()


class _Sending(aiohttp.Payload):
    """The body of one request, and whether all of it was sent.

    A body counts as sent once the transport has accepted its end. The upstream can close an idle
    connection just as it is reused. Such a request was not read, so it counts as not sent if the
    connection is lost immediately.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__(body, content_type="application/json")
        self._body = body
        self._transport: asyncio.WriteTransport | None = None
        self._reused_s: float | None = None
        self._is_written = False

    @property
    def size(self) -> int:
        return len(self._body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._body.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._transport = writer.transport
        await writer.write(self._body)
        self._is_written = True

    def on_reuse(self) -> None:
        """Record that a connection is used that served a request before."""
        self._reused_s = time.monotonic()

    @property
    def is_sent(self) -> bool:
        if not self._is_written:
            return False
        return self._reused_s is None or time.monotonic() - self._reused_s > CLOSED_S

    def release(self) -> None:
        """Free the body. The response refers to this object, by its trace."""
        self._body = self._value = b""

    def abort(self) -> None:
        """Close the connection at once. A regular close would first send the rest of the body."""
        if self._transport is not None:
            self._transport.abort()


class _Request(aiohttp.ClientRequest):
    """A request that is not sent on a connection with an unread response.

    Such a response came unasked, while the connection was idle, and would be taken for the response
    to this request, which can be that of another account.
    """

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        if conn.protocol is None or conn.protocol.should_close:
            raise aiohttp.ServerDisconnectedError("unexpected response")
        return await super().send(conn)


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        protocol: type[ResponseHandler] = _Protocol
        self._factory = functools.partial(protocol, loop=self._loop)


class _Protocol(ResponseHandler):
    """Ends a body whose encoding is invalid; aiohttp would wait for the rest of it."""

    _body: aiohttp.StreamReader | None = None

    def feed_data(
        self, data: tuple[RawResponseMessage, aiohttp.StreamReader], size: int = 0
    ) -> None:
        self._body = data[1]
        super().feed_data(data, size)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        super().set_exception(exc, *cause)
        if not isinstance(exc, HttpProcessingError) or self._body is None:
            return
        if not self._body.is_eof():
            self._body.set_exception(exc)


async def _on_reuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.on_reuse()


_NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS settings of httpx: the authorities of certifi, or of ``SSL_CERT_FILE``."""
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _environment_proxy(url: str) -> str | None:
    """Return the proxy that ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` set."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
