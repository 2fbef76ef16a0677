"""Connections to an upstream against a real TCP server: what a lost exchange may have caused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.workers.hosting import listening
from tests.workers.running import PATIENCE_S
from workers.upstreams import connections
from workers.upstreams.connections import (
    Connections,
    ExchangeError,
    NotConnectedError,
    NotSentError,
    Response,
)

CERTIFICATE = Path(__file__).parent / "localhost.pem"
LARGE = b"x" * 20_000_000
"""More than the kernel buffers for one connection."""
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine"


@dataclass
class Peer:
    """One connection of the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """Number of the connection, from 1."""

    async def request(self) -> bytes:
        """Read a request. Return its head."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await self.reader.readexactly(int(line.split(b":")[1]))
        return head

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Close the connection with an RST."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


@dataclass
class Server:
    behave: Callable[[Peer], Awaitable[None]]
    port: int = 0
    connections: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection has ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.behave(Peer(reader, writer, self.connections))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.ended.set()


@contextlib.asynccontextmanager
async def connected(
    behave: Callable[[Peer], Awaitable[None]], *, limit: int = 4, connect_timeout_s: float = 5.0
) -> AsyncIterator[tuple[Connections, Server]]:
    server = Server(behave)
    async with listening(server):
        made = connect(server, limit=limit, connect_timeout_s=connect_timeout_s)
        try:
            yield made, server
        finally:
            await made.close()


def connect(
    server: Server, *, scheme: str = "http", limit: int = 4, connect_timeout_s: float = 5.0
) -> Connections:
    return Connections(
        f"{scheme}://localhost:{server.port}/v1/",
        limit=limit,
        connect_timeout_s=connect_timeout_s,
        headers={"Authorization": "Bearer secret"},
    )


async def exchange(made: Connections, body: bytes = b"{}") -> bytes:
    """Post a body. Return that of the response."""
    async with asyncio.timeout(PATIENCE_S):
        response = await made.open("POST", "chat", body)
        with contextlib.closing(response):
            return await read(response)


async def read(response: Response) -> bytes:
    return b"".join([chunk async for chunk in response.chunks()])


async def fails(made: Connections, body: bytes = b"{}") -> type[ExchangeError]:
    with pytest.raises(ExchangeError) as raised:
        await exchange(made, body)
    return raised.type


async def serve_fine(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(FINE)


# --- Whether a request was sent -------------------------------------------------------------------


async def test_refused_connection_is_not_connected() -> None:
    async with connected(serve_fine) as (_, server):
        pass
    made = connect(server)

    assert await fails(made) is NotConnectedError
    await made.close()


async def test_unresolvable_host_is_not_connected() -> None:
    made = Connections("http://nowhere.invalid/", limit=1, connect_timeout_s=5.0, headers={})

    assert await fails(made) is NotConnectedError
    await made.close()


async def test_handshake_counts_as_connecting() -> None:
    async def say_nothing(peer: Peer) -> None:
        await peer.reader.read()

    async with connected(say_nothing) as (_, server):
        made = connect(server, scheme="https", connect_timeout_s=0.2)

        assert await fails(made) is NotConnectedError
        await made.close()


async def test_connection_lost_while_sending_is_not_sent() -> None:
    async def reset_early(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.reset()

    async with connected(reset_early) as (made, server):
        assert await fails(made, LARGE) is NotSentError
    assert server.connections == 1


@pytest.mark.parametrize("with_reset", [False, True])
async def test_request_lost_after_it_was_sent_may_have_been_processed(with_reset: bool) -> None:
    async def close(peer: Peer) -> None:
        await peer.request()
        if with_reset:
            peer.reset()

    async with connected(close) as (made, server):
        assert await fails(made) is ExchangeError
    assert server.connections == 1, "a POST is not repeated"


@pytest.mark.parametrize("late", [False, True])
async def test_reused_connection_that_is_lost_immediately_did_not_take_the_request(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setattr(connections, "CLOSED_S", 0.0)

    async def close_second(peer: Peer) -> None:
        await peer.request()
        await peer.send(FINE)
        await peer.request()

    async with connected(close_second) as (made, server):
        assert await exchange(made) == b"fine"
        assert await fails(made) is (ExchangeError if late else NotSentError)
    assert server.connections == 1


async def test_connection_closed_while_idle_is_replaced() -> None:
    async def close_after_one(peer: Peer) -> None:
        await peer.request()
        await peer.send(FINE)

    async with connected(close_after_one) as (made, server):
        for _ in range(3):
            assert await exchange(made) == b"fine"
            await asyncio.sleep(0.05)
    assert server.connections == 3


async def test_response_that_no_request_asked_for_is_given_to_no_request() -> None:
    async def say_too_much(peer: Peer) -> None:
        await peer.request()
        await peer.send(FINE)
        await asyncio.sleep(0.05)
        await peer.send(FINE.replace(b"fine", b"evil"))
        await serve_fine(peer)

    async with connected(say_too_much) as (made, server):
        assert await exchange(made) == b"fine"
        await asyncio.sleep(0.15)
        assert await fails(made) is NotSentError
        assert await exchange(made) == b"fine"
    assert server.connections == 2


# --- Responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhalf\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nhalf",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1_000_000 + b"\r\n\r\n",
    ],
    ids=["short", "unfinished", "chunk", "gzip", "length", "protocol", "header"],
)
async def test_broken_response_may_have_been_processed(response: bytes) -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        head, end, body = response.partition(b"\r\n\r\n")
        await peer.send(head + end)
        await asyncio.sleep(0.05)
        await peer.send(body)

    async with connected(answer) as (made, server):
        assert await fails(made) is ExchangeError
    assert server.connections == 1


async def test_body_is_read_as_it_arrives() -> None:
    seen = asyncio.Event()

    async def answer(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await seen.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with connected(answer) as (made, _), asyncio.timeout(PATIENCE_S):
        response = await made.open("POST", "chat", b"{}")
        with contextlib.closing(response):
            chunks = response.chunks()
            assert await anext(chunks) == b"one"
            seen.set()
            assert b"".join([chunk async for chunk in chunks]) == b"two"


async def test_large_headers_are_accepted() -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        await peer.send(FINE.replace(b"\r\n\r\n", b"\r\nX-Policy: " + b"x" * 40_000 + b"\r\n\r\n"))

    async with connected(answer) as (made, _):
        assert await exchange(made) == b"fine"


async def test_redirects_are_not_followed_and_cookies_are_not_sent_back() -> None:
    heads = []

    async def answer(peer: Peer) -> None:
        while True:
            heads.append(await peer.request())
            await peer.send(
                b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\n"
                b"Set-Cookie: session=1\r\nContent-Length: 0\r\n\r\n"
            )

    async with connected(answer) as (made, _), asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            response = await made.open("POST", "chat", b"{}")
            assert response.status == 307
            response.close()

    assert [head.split(b" ")[1] for head in heads] == [b"/v1/chat"] * 2
    assert not any(b"cookie" in head.lower() for head in heads)


# --- Cancelling and limits ------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [False, True])
async def test_cancelled_call_closes_its_connection(begins: bool) -> None:
    started = asyncio.Event()

    async def answer(peer: Peer) -> None:
        await peer.request()
        if begins:
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
        started.set()
        await peer.reader.read()

    async with connected(answer) as (made, server), asyncio.timeout(PATIENCE_S):
        call = asyncio.create_task(exchange(made))
        await started.wait()
        await asyncio.sleep(0.05)
        call.cancel()
        await server.ended.wait()


async def test_cancelled_call_stops_sending() -> None:
    paused, cancelled, received = asyncio.Event(), asyncio.Event(), 0

    async def read_slowly(peer: Peer) -> None:
        nonlocal received
        await peer.reader.readuntil(b"\r\n\r\n")
        paused.set()
        await cancelled.wait()
        while data := await peer.reader.read(1_000_000):
            received += len(data)

    async with connected(read_slowly) as (made, server), asyncio.timeout(PATIENCE_S):
        call = asyncio.create_task(exchange(made, LARGE))
        await paused.wait()
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        cancelled.set()
        await server.ended.wait()

    assert received < len(LARGE)


async def test_calls_beyond_the_limit_wait_without_being_late_to_connect() -> None:
    running, most = 0, 0

    async def answer(peer: Peer) -> None:
        nonlocal running, most
        while True:
            await peer.request()
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.1)
            running -= 1
            await peer.send(FINE)

    async with connected(answer, limit=2, connect_timeout_s=0.15) as (made, _):
        assert await asyncio.gather(*(exchange(made) for _ in range(6))) == [b"fine"] * 6
    assert most == 2


async def test_failed_cancelled_and_unread_calls_leave_their_connection_to_others() -> None:
    async def answer(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            return
        if peer.number == 2:
            await peer.reader.read()
        await peer.send(FINE)
        await serve_fine(peer)

    async with connected(answer, limit=1) as (made, _), asyncio.timeout(PATIENCE_S):
        assert await fails(made) is ExchangeError
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await exchange(made)
        (await made.open("POST", "chat", b"{}")).close()

        assert await exchange(made) == b"fine"


# --- Environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_excepted", [False, True])
async def test_proxy_of_the_environment_is_used_unless_the_host_is_excepted(
    is_excepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []

    async def relay(peer: Peer) -> None:
        heads.append(await peer.request())
        await peer.send(FINE)

    proxy = Server(relay)
    async with listening(proxy), connected(serve_fine) as (_, server):
        monkeypatch.setenv("http_proxy", f"http://user:pass@127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", "localhost" if is_excepted else "")
        made = connect(server)
        assert await exchange(made) == b"fine"
        await made.close()

    if is_excepted:
        assert heads == []
    else:
        (head,) = heads
        assert head.startswith(f"POST http://localhost:{server.port}/v1/chat ".encode())
        assert b"proxy-authorization: basic dxnlcjpwyxnz\r\n" in head.lower()


async def test_refusing_proxy_fails_the_call_without_connecting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    async with connected(refuse) as (_, server):
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{server.port}")
        made = Connections("https://example.com/", limit=1, connect_timeout_s=5.0, headers={})
        assert await fails(made) is ExchangeError
        await made.close()


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_certificates_are_verified(is_trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server, theirs = Server(serve_fine), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(CERTIFICATE)
    connections._tls_context.cache_clear()
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    async with listening(server, tls=theirs):
        made = connect(server, scheme="https")
        if is_trusted:
            assert await exchange(made) == b"fine"
        else:
            assert await fails(made) is NotConnectedError
        await made.close()
    connections._tls_context.cache_clear()
