"""A closed loop of chat requests over keep-alive connections, with low CPU overhead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import uvloop


@dataclass(frozen=True)
class Figures:
    """Requests per second, and latency percentiles in milliseconds."""

    rate: float
    p50_ms: float
    p99_ms: float
    errors: int
    count: int
    first_p50_ms: float = 0.0
    """Time to the first token of a stream."""
    frames: int = 0
    """Frames of streams that contain text."""


@dataclass(slots=True)
class _Record:
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    errors: int = 0
    frames: int = 0


def chat_load(
    *,
    port: int,
    key: str,
    model: str,
    concurrency: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    words: int = 3,
    stream: bool = False,
    pause_s: float = 0.0,
) -> Figures:
    """Send the same chat on ``concurrency`` connections for ``seconds``, with a pause after each.

    The prompt has ``words`` words; the echo engine answers with the same number of tokens.
    """
    content = " ".join(["hello", "big", "world"][n % 3] for n in range(words))
    chat = {"model": model, "messages": [{"role": "user", "content": content}]}
    body = json.dumps({**chat, "stream": True} if stream else chat).encode()
    lines = {
        "Host": f"127.0.0.1:{port}",
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    request = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body
    return uvloop.run(_load(port, request, concurrency, seconds, pause_s))


async def _load(
    port: int, request: bytes, concurrency: int, seconds: float, pause_s: float
) -> Figures:
    record = _Record()
    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(
        *(_client(port, request, until, record, pause_s) for _ in range(concurrency))
    )
    elapsed = time.perf_counter() - started
    latencies = sorted(record.latencies)
    firsts = sorted(record.firsts)
    count = len(latencies)
    return Figures(
        rate=count / elapsed,
        p50_ms=latencies[count // 2] * 1000,
        p99_ms=latencies[min(count - 1, int(count * 0.99))] * 1000,
        errors=record.errors,
        count=count,
        first_p50_ms=firsts[len(firsts) // 2] * 1000 if firsts else 0.0,
        frames=record.frames,
    )


async def _client(port: int, request: bytes, until: float, record: _Record, pause_s: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (started := time.perf_counter()) < until:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
        else:
            frames = 0
            while (size := int(await reader.readline(), 16)) > 0:
                chunk = await reader.readexactly(size + 2)
                texts = chunk.count(b'"content":"') - chunk.count(b'"content":""')
                if texts and not frames:
                    record.firsts.append(time.perf_counter() - started)
                frames += texts
            await reader.readline()
            record.frames += frames
        record.errors += b" 200 " not in head[:16]
        record.latencies.append(time.perf_counter() - started)
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
