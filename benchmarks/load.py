"""A closed loop of chat requests over keep-alive connections, with low CPU overhead."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import uvloop


@dataclass(frozen=True)
class Figures:
    """Requests per second, and latency percentiles in milliseconds."""

    rate: float
    p50_ms: float
    p99_ms: float
    errors: int


def chat_load(
    *, port: int, key: str, model: str, concurrency: int, seconds: float, path: str
) -> Figures:
    """Send the same chat on ``concurrency`` connections for ``seconds``."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "hello big world"}]}
    ).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return uvloop.run(_load(port, head.encode() + body, concurrency, seconds))


async def _load(port: int, request: bytes, concurrency: int, seconds: float) -> Figures:
    latencies: list[float] = []
    errors = 0
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (started := time.perf_counter()) < until:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            if b"content-length: " in lower:
                await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r")[0]))
            else:
                while (size := int(await reader.readline(), 16)) > 0:
                    await reader.readexactly(size + 2)
                await reader.readline()
            if b" 200 " not in head[:16]:
                errors += 1
            latencies.append(time.perf_counter() - started)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    elapsed = time.perf_counter() - started
    latencies.sort()
    count = len(latencies)
    return Figures(
        rate=count / elapsed,
        p50_ms=latencies[count // 2] * 1000,
        p99_ms=latencies[min(count - 1, int(count * 0.99))] * 1000,
        errors=errors,
    )
