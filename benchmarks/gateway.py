"""The complete path over HTTP with the echo engine: key, hold, queue, worker, charge, response."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load import chat_load
from benchmarks.processes import Product, start_product

SECONDS = 6.0
CONCURRENCY = (1, 8, 64)


def main() -> None:
    print("\ngateway: chat completions with the echo engine, ledger on, everything on this machine")
    print(
        f"{'database':<12}{'concurrency':>12}{'req/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'errors':>8}"
    )
    for name, product in products():
        for concurrency in CONCURRENCY:
            figures = chat_load(
                port=product.port,
                key=product.key,
                model="echo",
                concurrency=concurrency,
                seconds=SECONDS,
            )
            print(
                f"{name:<12}{concurrency:>12}{figures.rate:>10,.0f}{figures.p50_ms:>10.2f}"
                f"{figures.p99_ms:>10.2f}{figures.errors:>8}"
            )


def products() -> Iterator[tuple[str, Product]]:
    databases: list[tuple[str, str | None]] = [("SQLite", None)]
    if postgres := os.environ.get("BENCH_POSTGRES"):
        databases.append(("PostgreSQL", postgres))
    for name, url in databases:
        with running(url) as product:
            yield name, product


@contextmanager
def running(database_url: str | None) -> Iterator[Product]:
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        product = start_product(Path(directory), database_url)
        try:
            yield product
        finally:
            product.stop()
