"""Pairs of hold and settle per second: the ledger alone, one thread, compared with a bare insert.

The bare insert writes the same rows (hold, then receipt and output, and deletes the hold) by
SQLAlchemy Core without any logic. Both run as in a gateway: on its connections for writing, holds
without and settlements with a flush to the disk, and with its thresholds of garbage collection.
They run by short turns, and each ratio is the median of the turns' own ratios, so that a busy
machine slows both. Processor time is that of this process, without PostgreSQL's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, Engine, delete, func, insert, select

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.group_commit import BATCH_MAX
from gateway.ids import new_request_id
from gateway.ledger.closed import Output
from gateway.ledger.concurrency import UNBOUNDED
from gateway.ledger.holds import HoldRequest
from gateway.ledger.prices import PriceCache, put_in_force
from gateway.ledger.settle import Settlement
from gateway.ledger.transfers import add_credit
from gateway.ledger.writer import Entry, book, must_be_durable
from gateway.pricing import Component, Price
from gateway.server.single import tune_garbage_collection
from gateway.sql.connections import WriteConnections
from gateway.sql.database import migrate
from gateway.sql.lanes import WRITE, open_engine
from gateway.tables.core import QUANTITIES, holds, outputs, receipts, transfers
from workers.contract.jobs import Job, RequestId, Timings, Usage, encode

ROUNDS = 12
SECONDS = 0.25
BATCHES = (1, 16, 64, BATCH_MAX)
ACCOUNTS = 1000
LIMITS = Usage(requests=1, input_tokens=100, output_tokens=100)


def main() -> None:
    print("\nledger: pairs of hold and settle per second")
    print(f"{'':<48}" + "".join(f"{f'batch {size}':>11}" for size in BATCHES))
    with tempfile.TemporaryDirectory() as directory:
        measure("SQLite", f"sqlite:///{Path(directory) / 'bench.db'}")
        postgres = os.environ.get("BENCH_POSTGRES")
        if postgres:
            measure("PostgreSQL", postgres)
        else:
            print(
                "PostgreSQL: set BENCH_POSTGRES=postgresql://… to an empty database to measure it"
            )


def measure(name: str, url: str) -> None:
    migrate(url)
    books = open_books(url, ACCOUNTS)
    tune_garbage_collection()
    columns: list[tuple[list[Figure], ...]] = []
    for size in BATCHES:
        turns = [
            (run(books, size, hot=True), run(books, size, hot=False), insert_only(books, size))
            for _ in range(ROUNDS)
        ]
        hot, wide, bare = map(list, zip(*turns, strict=True))
        columns.append((hot, wide, bare))
    books.engine.dispose()
    titles = ("one hot account", f"{ACCOUNTS:,} accounts", "bare insert of the same rows")
    for unit, field in (("pairs/s", "pairs_per_s"), ("CPU µs", "cpu_us")):
        for place, title in enumerate(titles):
            figures = [[getattr(each, field) for each in column[place]] for column in columns]
            print_row(f"{name}, {title}, {unit}", [*map(statistics.median, figures)])
    for unit, field in (("pairs/s", "pairs_per_s"), ("CPU", "cpu_us")):
        ratios = [
            [
                getattr(ours, field) / getattr(peer, field)
                for ours, peer in zip(hot, bare, strict=True)
            ]
            for hot, _, bare in columns
        ]
        print_ratios(f"hot account to bare insert, {unit}", [*map(statistics.median, ratios)])


class Figure(NamedTuple):
    """Pairs of hold and settle per second, and processor time of a pair in microseconds."""

    pairs_per_s: float
    cpu_us: float


@dataclass(frozen=True)
class Books:
    engine: Engine
    owners: list[tuple[int, int]]
    price_id: int
    job: bytes


def open_books(url: str, count: int) -> Books:
    owners = []
    slow = open_engine(url)
    with slow.begin() as connection:
        for number in range(count):
            account = create_account(connection, f"bench {time.time_ns()} {number}")
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
            owners.append((account.id, key.id))
        price = Price((Component("input_token", 20), Component("output_token", 80)))
        price_id = put_in_force(connection, "bench", price, datetime.now(UTC))
    slow.dispose()
    return Books(open_engine(url, lane=WRITE), owners, price_id, chat())


def chat() -> bytes:
    """Encode the job of each request."""
    input = {"messages": [{"role": "user", "content": "hello " * 20}]}
    job = Job(RequestId("req_" + "0" * 32), "1", "bench", "text-generation", input, LIMITS)
    return encode(job)


def run(books: Books, size: int, *, hot: bool) -> Figure:
    cache: PriceCache = {}
    owners = itertools.cycle(books.owners[:1] if hot else books.owners)

    def write(batch: Sequence[Entry]) -> None:
        def function(connection: Connection) -> None:
            book(
                connection,
                batch,
                prices=cache,
                retention=timedelta(hours=1),
                concurrent=UNBOUNDED,
            )

        writing.transact(function, durable=must_be_durable(batch))

    def pairs() -> None:
        now = datetime.now(UTC)
        requests = [hold_request(books, *next(owners), now) for _ in range(size)]
        write(requests)
        write([settlement(each.request_id) for each in requests])

    with contextlib.closing(WriteConnections(books.engine)) as writing:
        return repeat(pairs, size)


def insert_only(books: Books, size: int) -> Figure:
    """Write the rows of each pair, in the same two transactions."""
    account_id, key_id = books.owners[0]
    body = msgspec.msgpack.encode(settlement(RequestId("req_")).output)
    with books.engine.begin() as connection:
        transfer_id = connection.execute(select(func.max(transfers.c.id))).scalar_one()

    def pairs() -> None:
        now = datetime.now(UTC)
        requests = [hold_request(books, account_id, key_id, now) for _ in range(size)]
        ids = [each.request_id for each in requests]

        def begin(connection: Connection) -> None:
            connection.execute(insert(holds), [hold_row(each) for each in requests])

        def end(connection: Connection) -> None:
            connection.execute(delete(holds).where(holds.c.request_id.in_(ids)))
            connection.execute(
                insert(receipts), [receipt_row(each, transfer_id, now) for each in requests]
            )
            connection.execute(
                insert(outputs),
                [{"request_id": id, "body": body, "expires_at": now} for id in ids],
            )

        writing.transact(begin, durable=False)
        writing.transact(end, durable=True)

    with contextlib.closing(WriteConnections(books.engine)) as writing:
        return repeat(pairs, size)


def repeat(pairs: Callable[[], None], size: int) -> Figure:
    """Measure a function that makes ``size`` pairs."""
    done = 0
    started, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < SECONDS:
        pairs()
        done += size
    cpu_us = (time.process_time() - cpu) / done * 1e6
    return Figure(done / (time.perf_counter() - started), cpu_us)


def hold_request(books: Books, account_id: int, key_id: int, now: datetime) -> HoldRequest:
    return HoldRequest(
        new_request_id(),
        account_id,
        key_id,
        "bench",
        "text-generation",
        books.price_id,
        10_000,
        books.job,
        now,
        now + timedelta(minutes=1),
        durable=False,
    )


def hold_row(each: HoldRequest) -> dict[str, object]:
    names = ("request_id", "account_id", "key_id", "model", "task", "price_id", "hold_nanos")
    times = ("job", "accepted_at", "deadline_at")
    return {name: getattr(each, name) for name in (*names, *times)}


def receipt_row(each: HoldRequest, transfer_id: int, now: datetime) -> dict[str, object]:
    row = hold_row(each)
    del row["job"], row["deadline_at"]
    return {
        **row,
        **dict.fromkeys(QUANTITIES, 0),
        "requests": 1,
        "input_tokens": 10,
        "output_tokens": 10,
        "charge_nanos": 1000,
        "outcome": "charged",
        "status": "succeeded",
        "reason": "completed",
        "timings": {"queue_us": 500, "forward_us": 100},
        "settled_at": now,
        "transfer_id": transfer_id,
    }


def settlement(request_id: RequestId) -> Settlement:
    return Settlement(
        request_id,
        "succeeded",
        "completed",
        billable=True,
        usage=Usage(requests=1, input_tokens=10, output_tokens=10),
        timings=Timings(queue_us=500, forward_us=100),
        output=Output({"choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}]}),
    )


def print_row(name: str, figures: list[float]) -> None:
    print(f"{name:<48}" + "".join(f"{figure:>11,.0f}" for figure in figures))


def print_ratios(name: str, ratios: list[float]) -> None:
    print(f"{name:<48}" + "".join(f"{ratio:>11.2f}" for ratio in ratios))
