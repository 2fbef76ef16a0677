"""The connection to the queue server, before real servers and before one that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    InvalidResponse,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from tests.servers import queue_server
from workers.contract import connection
from workers.contract.redis import QueueClient, connect

SILENT_S = 0.2
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(serve: Script) -> AsyncIterator[QueueClient]:
    """Yield a client of a server that runs ``serve`` for each connection, then closes it."""
    served: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.create_task(run(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    client = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        await client.aclose()
        for task in served:
            task.cancel()
        await asyncio.gather(*served)
        server.close()


def answering(*answers: bytes) -> Script:
    """Answer whatever is read with one of the answers, in turn, over all connections."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left and await reader.read(1 << 16):
            writer.write(left.pop(0))
            await writer.drain()

    return serve


# --- Answers --------------------------------------------------------------------------------------


async def test_answers_arrive_in_order_for_many_callers(client: Redis, namespace: str) -> None:
    await asyncio.gather(*(client.set(f"{namespace}:{n}", n) for n in range(500)))

    found = await asyncio.gather(*(client.get(f"{namespace}:{n}") for n in range(500)))

    assert found == [b"%d" % n for n in range(500)]


async def test_commands_of_one_turn_are_sent_in_one_write(client: Redis) -> None:
    before = (await client.info("stats"))["total_reads_processed"]

    await asyncio.gather(*(client.echo(f"{n}") for n in range(100)))

    assert (await client.info("stats"))["total_reads_processed"] - before == 2


async def test_posted_commands_leave_with_the_next_write(client: Redis, namespace: str) -> None:
    assert isinstance(client, QueueClient)
    before = (await client.info("stats"))["total_reads_processed"]

    client.post(("SET", namespace, "1"), ("INCR", namespace))
    assert await client.get(namespace) == b"2"

    assert (await client.info("stats"))["total_reads_processed"] - before == 2


async def test_posted_commands_leave_without_another_write(
    client: Redis, server_url: str, namespace: str
) -> None:
    poster = connect(server_url)
    await poster.ping()
    poster.post(("SET", namespace, "sent"), ("NOT-A-COMMAND",))
    await _until(client, namespace, b"sent")
    # A server that cannot write an earlier answer drops what it has not read.
    await poster.ping()

    poster.post(("SET", namespace, "closing"))
    await poster.aclose()

    # The server may answer another connection before it reads what was sent here.
    await _until(client, namespace, b"closing")


async def _until(client: Redis, name: str, value: bytes) -> None:
    async with asyncio.timeout(20):
        while await client.get(name) != value:  # noqa: ASYNC110  # there is no event to await
            await asyncio.sleep(0.01)


async def test_cancelled_caller_drops_only_its_answer(client: Redis) -> None:
    tasks = [asyncio.create_task(client.echo(f"{n}")) for n in range(10)]
    await asyncio.sleep(0)  # sent, and not answered

    tasks[3].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(answers.pop(3), asyncio.CancelledError)
    assert answers == [b"%d" % n for n in range(10) if n != 3]
    assert await client.echo("after") == b"after"


async def test_huge_answer_is_complete_and_in_its_place(client: Redis, namespace: str) -> None:
    value = bytes(range(256)) * (1 << 17)  # 32 MiB
    await client.set(namespace, value)

    before, huge, after = await asyncio.gather(
        client.echo("before"), client.get(namespace), client.echo("after")
    )

    assert (before, after) == (b"before", b"after")
    assert huge == value
    await client.delete(namespace)


async def test_answer_in_small_parts_is_put_together() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        for byte in b"*3\r\n$5\r\nfirst\r\n:-42\r\n*1\r\n$-1\r\n$6\r\nsecond\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with scripted(serve) as client:
        answers = await client.exchange(("ONE",), ("TWO",))

    assert answers == [[b"first", -42, [None]], b"second"]


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"-READONLY You can't write against a read only replica.", ReadOnlyError, "replica"),
        (b"-LOADING Redis is loading the dataset in memory", BusyLoadingError, "loading"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.", OutOfMemoryError, "memory"),
        (b"-NOSCRIPT No matching script.", NoScriptError, "No matching"),
        (b"-NOAUTH Authentication required.", AuthenticationError, "required"),
        (b"-ERR max number of clients reached", ConnectionError, "clients"),
        (b"-WRONGTYPE Operation against a key of the wrong kind", ResponseError, "^WRONGTYPE"),
    ],
)
async def test_refusals_are_the_exceptions_of_redis_py(
    answer: bytes, kind: type[RedisError], says: str
) -> None:
    async with scripted(answering(answer + b"\r\n", b"+PONG\r\n", answer + b"\r\n")) as client:
        with pytest.raises(kind, match=says):
            await client.get("x")
        assert await client.ping()

        pipeline = client.pipeline(transaction=False)
        pipeline.get("x")
        with pytest.raises(kind, match=says):
            await pipeline.execute()


async def test_refused_command_of_a_pipeline_fails_only_itself(
    client: Redis, namespace: str
) -> None:
    await client.set(namespace, "text")
    pipeline = client.pipeline(transaction=False)
    pipeline.incr(namespace)
    pipeline.get(namespace)

    refused, found = await pipeline.execute(raise_on_error=False)

    assert isinstance(refused, ResponseError)
    assert found == b"text"


async def test_transaction_is_dropped_whole_if_a_command_is_invalid(
    client: Redis, namespace: str
) -> None:
    pipeline = client.pipeline(transaction=True)
    pipeline.set(namespace, "x")
    pipeline.execute_command("NOT-A-COMMAND")

    with pytest.raises(ResponseError, match="unknown command"):
        await pipeline.execute()

    assert await client.get(namespace) is None


# --- Blocking reads and subscriptions -------------------------------------------------------------


async def test_blocking_read_does_not_delay_other_commands(client: Redis, namespace: str) -> None:
    reading = asyncio.create_task(client.bzpopmin([namespace], 60))
    others = asyncio.gather(
        client.bzpopmin([f"{namespace}:other"], 60),
        client.blmove(f"{namespace}:source", f"{namespace}:target", 60),
    )
    await asyncio.sleep(0.02)

    async with asyncio.timeout(30):
        assert await client.ping()
        await client.zadd(namespace, {"marker": 1})
        assert (await reading)[1] == b"marker"

    assert not others.done()
    others.cancel()
    with pytest.raises(asyncio.CancelledError):
        await others


async def test_connections_of_blocking_reads_are_used_again(client: Redis, namespace: str) -> None:
    for _ in range(5):
        await asyncio.gather(*(client.bzpopmin([f"{namespace}:{n}"], 0.01) for n in range(3)))

    assert (await client.info("clients"))["connected_clients"] <= 5


async def test_cancelled_blocking_read_takes_nothing(client: Redis, namespace: str) -> None:
    reading = asyncio.create_task(client.bzpopmin([namespace], 2))
    await asyncio.sleep(0.02)
    reading.cancel()
    await asyncio.wait([reading])
    await asyncio.sleep(0.02)

    await client.zadd(namespace, {"marker": 1})

    assert await client.zcard(namespace) == 1


async def test_subscription_fails_when_its_connection_is_lost(client: Redis) -> None:
    assert isinstance(client, QueueClient)
    received = asyncio.Event()

    async def listen() -> None:
        async for _ in client.subscription("news"):
            received.set()

    listening = asyncio.create_task(listen())
    async with asyncio.timeout(30):
        while not received.is_set():
            await client.publish("news", b"x")
            await asyncio.sleep(0.01)

    await client.execute_command("CLIENT KILL", "TYPE", "pubsub")

    with pytest.raises(ConnectionError):
        async with asyncio.timeout(30):
            await listening


# --- Lost and silent servers ----------------------------------------------------------------------


async def test_silent_server_fails_everything_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", SILENT_S)
    accepted = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(reader)
        if len(accepted) == 1:
            await reader.read()
        while await reader.read(1 << 16):
            writer.write(b"+PONG\r\n")

    async with scripted(serve) as client:
        started = time.monotonic()
        first = asyncio.create_task(client.ping())
        await asyncio.sleep(SILENT_S / 2)
        answers = await asyncio.gather(first, client.ping(), return_exceptions=True)

        assert [type(answer) for answer in answers] == [TimeoutError, TimeoutError]
        assert time.monotonic() - started >= SILENT_S
        assert await client.ping()


async def test_slow_answers_to_others_do_not_hide_a_command_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", SILENT_S)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"$1000\r\n")
        while True:  # never complete in time
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(SILENT_S / 10)

    async with scripted(serve) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20 * SILENT_S):
                await client.get("x")


async def test_connection_closed_within_an_answer_fails_what_is_in_flight() -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        connections.append(writer)
        writer.write(b"+PONG\r\n$100\r\nonly a part" if len(connections) == 1 else b"+PONG\r\n")

    async with scripted(serve) as client:
        answers = await asyncio.gather(
            client.ping(), client.get("x"), client.get("y"), return_exceptions=True
        )

        assert answers[0] is True
        assert [type(answer) for answer in answers[1:]] == [ConnectionError, ConnectionError]
        assert await client.ping()


async def test_answer_that_is_not_of_the_protocol_fails_what_is_in_flight() -> None:
    async with scripted(answering(b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+PONG\r\n")) as client:
        with pytest.raises(InvalidResponse):
            await client.ping()

        assert await client.ping()


async def test_server_that_refuses_connections_is_an_outage() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR max number of clients reached\r\n")

    async with scripted(serve) as client:
        for _ in range(3):
            with pytest.raises(ConnectionError):
                await client.get("x")


async def test_killed_server_fails_what_is_in_flight() -> None:
    with queue_server("valkey") as url:
        client = connect(url)
        process = (await client.info("server"))["process_id"]
        os.kill(process, signal.SIGSTOP)  # so that nothing is answered before
        waiting = [
            asyncio.create_task(client.incr("once")),
            asyncio.create_task(client.bzpopmin(["nothing"], 2)),
        ]
        await asyncio.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        answers = await asyncio.gather(*waiting, return_exceptions=True)

        assert [type(answer) for answer in answers] == [ConnectionError, ConnectionError]
        with pytest.raises(ConnectionError):
            await client.ping()
        await client.aclose()


async def test_restarted_server_is_found_again(tmp_path: Path) -> None:
    async def pong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"+PONG\r\n")
        writer.close()

    socket = tmp_path / "s"
    client = connect(f"unix://{socket}")
    for _ in range(3):
        server = await asyncio.start_unix_server(pong, socket)
        assert await client.ping()
        server.close()
        await server.wait_closed()
        socket.unlink(missing_ok=True)
        with pytest.raises(ConnectionError):
            await client.ping()
    await client.aclose()


async def test_commands_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "EXCHANGES_MAX", 10)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(serve) as client:
        waiting = [asyncio.create_task(client.ping()) for _ in range(11)]
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

        assert len(done) == 1
        with pytest.raises(ConnectionError, match="Too many"):
            await done.pop()
    answers = await asyncio.gather(*pending, return_exceptions=True)
    assert {type(answer) for answer in answers} == {ConnectionError}


async def test_closing_while_connecting_fails_those_who_wait() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(serve) as client:
        client.connection_pool.connection_kwargs["password"] = "never answered"
        waiting = asyncio.create_task(client.ping())
        await asyncio.sleep(0.02)
        await client.aclose()

        with pytest.raises(ConnectionError):
            await waiting


# --- Addresses ------------------------------------------------------------------------------------


async def test_address_names_the_database_and_the_user() -> None:
    with queue_server("valkey") as url:
        admin = connect(url)
        await admin.execute_command("ACL SETUSER", "gateway", "on", ">right", "~*", "&*", "+@all")
        await admin.config_set("requirepass", "other")
        path = url.removeprefix("unix://")

        named = connect(f"unix://gateway:right@{path}?db=3")
        await named.set("k", "v")
        assert (await admin.info("keyspace"))["db3"]["keys"] == 1
        for address in (f"unix://gateway:wrong@{path}", f"unix://:wrong@{path}"):
            wrong = connect(address)
            with pytest.raises(ConnectionError, match="invalid username-password"):
                await wrong.get("k")
            await wrong.aclose()
        nobody = connect(url)
        with pytest.raises(AuthenticationError):
            await nobody.get("k")
        default = connect(f"unix://:other@{path}")
        assert await default.get("k") is None  # another database

        for each in (admin, named, nobody, default):
            await each.aclose()


@contextlib.asynccontextmanager
async def tls_proxy(socket: str, authority: Path, *, client_cert: bool) -> AsyncIterator[int]:
    """Yield the port of a TLS endpoint before a server: the packaged ones are built without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority / "ca.pem")
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED if client_cert else ssl.CERT_NONE
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(socket)
        tasks.add(asyncio.create_task(pump(reader, ours)))
        tasks.add(asyncio.create_task(pump(theirs, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_tls_verifies_the_server(valkey_url: str, namespace: str, authority: Path) -> None:
    socket = valkey_url.removeprefix("unix://")
    async with tls_proxy(socket, authority, client_cert=False) as port:
        trusting = connect(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}/ca.pem")
        await trusting.set(namespace, b"x" * 1_000_000)
        assert await trusting.get(namespace) == b"x" * 1_000_000
        assert await trusting.bzpopmin([f"{namespace}:none"], 0.01) is None
        await trusting.aclose()

        stranger = connect(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}/stranger.pem")
        with pytest.raises(ConnectionError):
            await stranger.ping()
        await stranger.aclose()


async def test_tls_presents_a_client_certificate(
    valkey_url: str, namespace: str, authority: Path
) -> None:
    socket = valkey_url.removeprefix("unix://")
    async with tls_proxy(socket, authority, client_cert=True) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}/ca.pem"
        certified = connect(
            f"{url}&ssl_certfile={authority}/client.pem&ssl_keyfile={authority}/client.key"
        )
        assert await certified.ping()
        await certified.aclose()

        anonymous = connect(url)
        with pytest.raises(ConnectionError):
            await anonymous.ping()
        await anonymous.aclose()
