"""An external model service: a real HTTP server with OpenAI's wire format.

The test decides how it handles a request, by a function that writes the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.workers.hosting import listening
from tests.workers.running import PATIENCE_S


@dataclass
class Exchange:
    """One request, with methods to respond."""

    head: str
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def send(self, status: str, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await self.writer.drain()

    async def refuse(self, status: str, message: str, **error: Any) -> None:
        body = {"error": {"message": message, "type": "invalid_request_error", **error}}
        await self.send(status, body)

    async def begin(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def event(self, data: str) -> None:
        await self.raw(f"data: {data}\n\n".encode())

    async def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def delta(
        self,
        content: str | None = None,
        *,
        index: int = 0,
        finish_reason: str | None = None,
        logprobs: Any = None,
    ) -> None:
        choice = {
            "index": index,
            "delta": {} if content is None else {"content": content},
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        await self.event(json.dumps({"object": "chat.completion.chunk", "choices": [choice]}))

    async def usage(self, prompt: int, completion: int, *, cached: int | None = None) -> None:
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self.event(json.dumps({"choices": [], "usage": usage}))

    async def end(self) -> None:
        await self.event("[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()


async def refuse_busily(exchange: Exchange) -> None:
    await exchange.refuse("503 Service Unavailable", "overloaded")


async def echo_words(exchange: Exchange) -> None:
    """A correct service: repeats the last message word by word."""
    words = exchange.body["messages"][-1]["content"].split()
    await exchange.begin()
    for word in words:
        await exchange.delta(word + " ")
    await exchange.delta(finish_reason="stop")
    await exchange.usage(10, len(words), cached=4)
    await exchange.end()


@dataclass
class Upstream:
    answer: Callable[[Exchange], Awaitable[None]] = echo_words
    requests: list[Exchange] = field(default_factory=list)
    connections: int = 0
    probes: int = 0
    is_well: bool = True
    """Whether it responds to ``GET /models``."""
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client disconnects during a response."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def until_hung_up(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.hung_up.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET "):
                    self.probes += 1
                    status = "200 OK" if self.is_well else "503 Service Unavailable"
                    await Exchange(head, {}, writer).send(status, {"object": "list", "data": []})
                    continue
                length = next(
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                )
                body = json.loads(await reader.readexactly(length))
                exchange = Exchange(head, body, writer)
                self.requests.append(exchange)
                await self._answer_unless_left(exchange, reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer_unless_left(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        """Wait until the client disconnects; it sends nothing else during a response."""
        answer = asyncio.ensure_future(self.answer(exchange))
        left = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        answer.cancel()
        await asyncio.wait((answer, left))
        if answer not in done or isinstance(answer.exception(), ConnectionError):
            self.hung_up.set()
            raise ConnectionResetError
        answer.result()


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    service = Upstream()
    async with listening(service):
        yield service
