"""Chunks of streams: written as they arrive, in order, whether or not the client reads fast."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from gateway.api.http.answering import stream_events
from gateway.api.openai.chat import ChunkWriter
from gateway.dispatch.waiters import Waiters
from gateway.ledger.closed import ClosedRequest, Output
from gateway.requests.ticket import Ticket, TicketServices
from gateway.tasks.registry import OtherTask
from gateway.tasks.submission import Submission
from tests.stack import Stack, chat
from workers.contract.jobs import RequestId, SentEvent, Timings, Tokens, Usage

ID = RequestId(f"req_{1:032x}")
NOW = datetime.now(UTC)
WORDS = ["one ", "two ", "three ", "four ", "five "]


class Connection:
    """A client that reads, or does not read."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.takes_chunks = True
        self.sent: list[bytes] = []

    def write_chunk(self, data: bytes) -> None:
        assert self.takes_chunks
        self.sent.append(data)


class Streamed:
    """One stream, whose events tests deliver."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        unused: Any = None
        services = TicketServices(self.waiters, unused, unused, unused, unused)
        submission = Submission(model="m", input=OtherTask(), stream=True, waits=False)
        self.ticket = Ticket(services, 1, submission, ID, NOW)
        self.ticket._look_first = False
        self.connection = Connection()
        self.seq = 0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        writer = ChunkWriter(self.ticket, include_usage=False)
        events: AsyncIterator[bytes] = stream_events(self.ticket, writer, self.connection)
        with self.ticket:
            async for data in events:
                self.connection.sent.append(data)

    def deliver(self, word: str, *, attempt: int = 1) -> None:
        self.seq += 1
        self.waiters.deliver((SentEvent(ID, attempt, self.seq, Tokens(0, word, 1)),))

    def settle(self) -> None:
        choice = {"index": 0, "text": "".join(WORDS), "finish_reason": "stop"}
        closed = ClosedRequest(
            request_id=ID,
            account_id=1,
            model="m",
            task="text-generation",
            status="succeeded",
            outcome="charged",
            reason="completed",
            cost_nanos=1,
            hold_nanos=1,
            price_id=1,
            usage=Usage(requests=1),
            timings=Timings(),
            accepted_at=NOW,
            settled_at=NOW,
            output=Output({"choices": [choice]}),
        )
        self.waiters.settle(ID, closed)

    @property
    def texts(self) -> list[str]:
        """The texts of the chunks that the client was sent, in order."""
        return texts_of(b"".join(self.connection.sent))


def texts_of(data: bytes) -> list[str]:
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_chunk_is_written_when_its_event_arrives() -> None:
    stream = Streamed()
    await turn()

    for number, word in enumerate(WORDS, 1):
        stream.deliver(word)
        assert stream.texts == WORDS[:number]

    stream.settle()
    await stream.task
    assert stream.texts == WORDS
    assert stream.connection.sent[-1].endswith(b"data: [DONE]\n\n")


async def test_client_that_reads_slowly_gets_everything_in_order() -> None:
    stream = Streamed()
    await turn()

    stream.deliver(WORDS[0])
    stream.connection.takes_chunks = False
    stream.deliver(WORDS[1])
    stream.deliver(WORDS[2])
    stream.connection.takes_chunks = True
    stream.deliver(WORDS[3])  # behind those that wait
    assert stream.texts == WORDS[:1]
    await turn()
    assert stream.texts == WORDS[:4]
    stream.deliver(WORDS[4])
    assert stream.texts == WORDS

    stream.settle()
    await stream.task
    assert stream.texts == WORDS


async def test_stream_that_another_attempt_contradicts_ends_with_an_error() -> None:
    stream = Streamed()
    await turn()
    stream.deliver(WORDS[0])

    stream.seq = 0
    stream.deliver("another text", attempt=2)
    await turn()
    stream.deliver(" and more", attempt=2)

    await stream.task
    sent = b"".join(stream.connection.sent)
    assert sent.count(b"stream_diverged") == 1
    assert b"another" not in sent
    assert b"more" not in sent
    assert sent.endswith(b"data: [DONE]\n\n")


async def test_call_behind_a_stream_on_its_connection_is_answered_after_it(stack: Stack) -> None:
    body = json.dumps(chat("slow", "".join(WORDS), stream=True)).encode()
    place = urlsplit(stack.url)
    head = f"Host: {place.netloc}\r\nAuthorization: Bearer {stack.caller().secret}\r\n"
    with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\n{head}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
            + f"GET /v1/models HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
        )
        received = b"".join(iter(lambda: connection.recv(65536), b""))

    stream, _, answer = received.partition(b"\r\n0\r\n\r\n")
    assert "".join(texts_of(stream)).split() == [word.strip() for word in WORDS]
    assert answer.startswith(b"HTTP/1.1 200")
