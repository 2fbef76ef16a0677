"""Hold and settle pairs per second of the ledger alone, on one hot account, one thread."""

from __future__ import annotations

import os
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.database import Database, migrate
from gateway.ledger.closed import Output
from gateway.ledger.holds import HoldRequest, hold
from gateway.ledger.ids import new_request_id
from gateway.ledger.prices import PriceCache, put_in_force
from gateway.ledger.settle import Settlement, settle
from gateway.ledger.transfers import add_credit
from gateway.pricing import Component, Price
from workers.contract.jobs import Job, RequestId, Timings, Usage, encode

SECONDS = 3.0
BATCHES = (1, 8, 64, 128)
LIMITS = Usage(requests=1, input_tokens=100, output_tokens=100)


def main() -> None:
    print("\nledger: pairs of hold and settle per second, one hot account")
    print(f"{'database':<12}" + "".join(f"{f'batch {size}':>12}" for size in BATCHES))
    with tempfile.TemporaryDirectory() as directory:
        measure("SQLite", f"sqlite:///{Path(directory) / 'bench.db'}")
        postgres = os.environ.get("BENCH_POSTGRES")
        if postgres:
            measure("PostgreSQL", postgres)
        else:
            print(
                "PostgreSQL   set BENCH_POSTGRES=postgresql://… to an empty database to measure it"
            )


def measure(name: str, url: str) -> None:
    migrate(url)
    database = Database(url)
    with database.transaction() as connection:
        account = create_account(connection, f"bench {time.time_ns()}")
        _, key = create_key(connection, account.id, pepper=b"a pepper for benchmarks")
        add_credit(
            connection,
            account.id,
            10**15,
            kind="topup",
            key=f"bench:{account.id}",
            actor="bench",
            reason="bench",
        )
        price = Price((Component("input_token", 20), Component("output_token", 80)))
        price_id = put_in_force(connection, "bench", price, datetime.now(UTC))
    job = encode(
        Job(
            RequestId("req_" + "0" * 32),
            str(account.id),
            "bench",
            "text-generation",
            {"messages": [{"role": "user", "content": "hello " * 20}]},
            LIMITS,
        )
    )
    cache: PriceCache = {}
    figures = []
    for size in BATCHES:
        pairs = 0
        started = time.perf_counter()
        while time.perf_counter() - started < SECONDS:
            now = datetime.now(UTC)
            orders = [
                HoldRequest(
                    new_request_id(),
                    account.id,
                    key.id,
                    "bench",
                    "text-generation",
                    price_id,
                    10_000,
                    job,
                    now,
                    now + timedelta(minutes=1),
                )
                for _ in range(size)
            ]
            with database.transaction() as connection:
                hold(connection, orders)
            with database.transaction() as connection:
                settle(
                    connection,
                    [_settlement(order.request_id) for order in orders],
                    now=now,
                    prices=cache,
                    retention=timedelta(hours=1),
                )
            pairs += size
        figures.append(pairs / (time.perf_counter() - started))
    database.engine.dispose()
    print(f"{name:<12}" + "".join(f"{figure:>12,.0f}" for figure in figures))


def _settlement(request_id: RequestId) -> Settlement:
    return Settlement(
        request_id,
        "succeeded",
        "completed",
        billable=True,
        usage=Usage(requests=1, input_tokens=10, output_tokens=10),
        timings=Timings(queue_us=500, forward_us=100),
        output=Output({"choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}]}),
    )
