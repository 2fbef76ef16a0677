"""Batches: throughput of their lines, and their effect on interactive requests."""

from __future__ import annotations

import json
import time

import httpx

from benchmarks.gateway import running
from benchmarks.load import chat_load
from benchmarks.processes import Product

LINES = 10_000
SECONDS = 8.0
CONCURRENCY = (1, 4, 16)


def main() -> None:
    print("\nbatches: lines with the echo engine, SQLite, everything on this machine")
    with running(None) as product:
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{product.port}",
            headers={"Authorization": f"Bearer {product.key}"},
            timeout=60,
        )
        with client:
            _throughput(client)
            _latency_beside_batch(client, product)


def _throughput(client: httpx.Client) -> None:
    started = time.monotonic()
    batch_id = _submit(client, "echo", LINES)
    running_since = 0.0
    while (batch := _fetch(client, batch_id))["status"] != "completed":
        if batch["status"] == "in_progress" and not running_since:
            running_since = time.monotonic()
        time.sleep(0.1)
    ended = time.monotonic()
    print(
        f"{LINES:,} lines: validated in {running_since - started:.1f} s, "
        f"{LINES / (ended - running_since):,.0f}/s"
    )


def _latency_beside_batch(client: httpx.Client, product: Product) -> None:
    """Measure chats on an engine with eight slots, alone and beside a batch on the same engine."""
    print(
        f"{'beside':<10}{'concurrency':>12}{'req/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'lines/s':>10}"
    )
    for beside in ("nothing", "a batch"):
        for concurrency in CONCURRENCY:
            batch_id = _submit(client, "paced", LINES) if beside == "a batch" else None
            if batch_id:
                while _fetch(client, batch_id)["status"] == "validating":
                    time.sleep(0.1)
            before = _done(client, batch_id)
            figures = chat_load(
                port=product.port,
                key=product.key,
                model="paced",
                concurrency=concurrency,
                seconds=SECONDS,
            )
            lines = (_done(client, batch_id) - before) / SECONDS
            print(
                f"{beside:<10}{concurrency:>12}{figures.rate:>10,.0f}{figures.p50_ms:>10.1f}"
                f"{figures.p99_ms:>10.1f}{lines:>10,.0f}"
            )
            if batch_id:
                client.post(f"/v1/batches/{batch_id}/cancel").raise_for_status()
                while _fetch(client, batch_id)["status"] != "cancelled":
                    time.sleep(0.1)


def _submit(client: httpx.Client, model: str, count: int) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "hello big world"}]}
    lines = (
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(count)
    )
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.post("/v1/files", files={"file": text}, data={"purpose": "batch"})
    made = client.post(
        "/v1/batches",
        json={
            "input_file_id": file.raise_for_status().json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    )
    batch_id: str = made.raise_for_status().json()["id"]
    return batch_id


def _fetch(client: httpx.Client, batch_id: str) -> dict[str, object]:
    found: dict[str, object] = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
    return found


def _done(client: httpx.Client, batch_id: str | None) -> int:
    if batch_id is None:
        return 0
    counts = _fetch(client, batch_id)["request_counts"]
    assert isinstance(counts, dict)
    return int(counts["completed"])
