"""Usage queries, pages and exports over many receipts, each compared with the simple method.

``BENCH_RECEIPTS`` is the number of receipts (1,000,000); ``BENCH_POSTGRES`` is an additional empty
database to measure. The receipts are of one month; a large account with 63 keys has 6 % of them.
"""

from __future__ import annotations

import csv
import io
import os
import random
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import Connection, insert, select

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.billing.exports.files import export
from gateway.billing.exports.footer import Footer, Format, Profile
from gateway.billing.exports.pages import connection_reader
from gateway.billing.usage.report import Filters, Span, usage
from gateway.billing.usage.rollups import HOURS_MAX, build_due, build_due_days
from gateway.ledger.prices import put_in_force
from gateway.ledger.transfers import add_credit
from gateway.performance import read_samples
from gateway.pricing import Component, Price, charge
from gateway.requests.lookup import RequestFilter, read_page, summarize
from gateway.sql.database import Database, migrate
from gateway.tables.core import QUANTITIES, receipts
from workers.contract.jobs import Usage

RECEIPTS = int(os.environ.get("BENCH_RECEIPTS", "1000000"))
START = datetime(2026, 10, 1, tzinfo=UTC)
MONTH = timedelta(days=31)
CHUNK = 20_000
OTHERS = 40
FAILED = 997
"""Number of receipts of which one is of a failed request."""
PRICE = Price((Component("input_token", 20), Component("output_token", 80)))
EXPORTED_MAX = 2_000_000
"""Maximum receipts for measuring exports: their rate does not depend on the number."""


def main() -> None:
    print(f"\nusage: {RECEIPTS:,} receipts of one month")
    with tempfile.TemporaryDirectory() as directory:
        measure("SQLite", f"sqlite:///{Path(directory) / 'bench.db'}")
        if postgres := os.environ.get("BENCH_POSTGRES"):
            measure("PostgreSQL", postgres)


def measure(name: str, url: str) -> None:
    migrate(url)
    database = Database(url)
    large, key = fill(database)
    span = Span(START, START + MONTH, ZoneInfo("UTC"))
    account, one_key = Filters((large,)), Filters((large,), (key,))

    def month_of_key(connection: Connection) -> object:
        return usage(connection, span, (), one_key)

    def by_day(connection: Connection) -> object:
        return usage(connection, span, ("day", "model"), account)

    def by_day_raw(connection: Connection) -> object:
        return usage(connection, span, ("day", "model"), account, rolled=False)

    before = timed(database, month_of_key)
    with database.transaction() as connection:
        started = time.perf_counter()
        hours = 0
        while (built := build_due(connection, START + MONTH + timedelta(hours=1))) == HOURS_MAX:
            hours += built
        while build_due_days(connection):
            pass
        build_s = time.perf_counter() - started
    with database.snapshot() as connection:
        middle = connection.execute(
            select(receipts.c.request_id)
            .where(receipts.c.account_id == large)
            .order_by(receipts.c.request_id.desc())
            .offset(RECEIPTS // 20)
            .limit(1)
        ).scalar_one()

    def page(connection: Connection) -> object:
        return connection.execute(
            select(receipts)
            .where(receipts.c.account_id == large, receipts.c.request_id < middle)
            .order_by(receipts.c.request_id.desc())
            .limit(100)
        ).all()

    def page_by_offset(connection: Connection) -> object:
        return connection.execute(
            select(receipts)
            .where(receipts.c.account_id == large)
            .order_by(receipts.c.request_id.desc())
            .offset(RECEIPTS // 20)
            .limit(100)
        ).all()

    print_row(name, "a key's month, from receipts", before)
    print_row(name, "a key's month, from sealed hours", timed(database, month_of_key))
    print_row(name, "largest account by day and model, from receipts", timed(database, by_day_raw))
    print_row(name, "largest account by day and model, sealed hours", timed(database, by_day))
    print_row(name, "page of 100, deep, by cursor", timed(database, page))
    print_row(name, "page of 100, deep, by OFFSET", timed(database, page_by_offset))
    lists(name, database, large)
    print(f"{name:<11} {'building all hours':<50} {build_s:>9.1f} s")
    if RECEIPTS <= EXPORTED_MAX:
        exports(name, database, span)
    database.dispose()


def lists(name: str, database: Database, large: int) -> None:
    """Measure what the API and the console list, of the largest account and of all accounts."""
    filters = {
        "newest 100 of an account": RequestFilter(large),
        "newest 100 failed of an account": RequestFilter(large, status="failed"),
        "newest 100 of an account and a model": RequestFilter(large, model="model-1"),
        "100 of an account with a tag that none has": RequestFilter(large, tags={"project": "y"}),
        "newest 100 of all accounts": RequestFilter(None),
        "newest 100 failed of all accounts": RequestFilter(None, status="failed"),
    }
    for title, chosen in filters.items():

        def page(connection: Connection, chosen: RequestFilter = chosen) -> object:
            return read_page(connection, chosen, limit=100, cursor=None, oldest_first=False)

        print_row(name, title, timed(database, page))

    def counted(connection: Connection) -> object:
        return summarize(connection, RequestFilter(large), None)

    def samples(connection: Connection) -> object:
        return read_samples(connection, "model-1", START)

    print_row(name, "summary of an account, up to 50,000 receipts", timed(database, counted))
    print_row(name, "statistics of a model", timed(database, samples))


def exports(name: str, database: Database, span: Span) -> None:
    """Measure the rows per second of processor time of this process, without PostgreSQL's."""
    files: tuple[tuple[Format, Profile], ...] = (
        ("csv", "native"),
        ("parquet", "native"),
        ("csv", "focus"),
        ("parquet", "focus"),
    )
    for format, profile in files:
        footer = Footer()
        started = time.process_time()
        with database.snapshot() as connection:
            for _ in export(
                connection_reader(connection),
                span,
                Filters(),
                format=format,
                profile=profile,
                footer=footer,
            ):
                pass
        rate = footer.rows / (time.process_time() - started)
        print(
            f"{name:<11} {f'export, {profile} {format}':<50} {rate:>9,.0f} rows/s of processor time"
        )
    started = time.process_time()
    rows = 0
    with database.snapshot() as connection:
        text = io.StringIO()
        writer = csv.writer(text)
        result = connection.execute(select(receipts), execution_options={"yield_per": CHUNK})
        for part in result.partitions():
            writer.writerows(part)
            rows += len(part)
            text.seek(0)
            text.truncate()
    rate = rows / (time.process_time() - started)
    print(f"{name:<11} {'peer: SELECT and csv.writer':<50} {rate:>9,.0f} rows/s of processor time")


def fill(database: Database) -> tuple[int, int]:
    """Create accounts and receipts. Return the largest account and one of its keys."""
    r = random.Random(1)
    owners: list[tuple[int, list[int]]] = []
    with database.transaction() as connection:
        for number in range(OTHERS + 1):
            made = create_account(connection, f"bench {time.time_ns()} {number}")
            keys = [
                create_key(connection, made.id, pepper=b"a pepper for benchmarks")[1].id
                for _ in range(63 if not number else 3)
            ]
            owners.append((made.id, keys))
        price_id = put_in_force(connection, "m", PRICE, START)
        transfer = add_credit(
            connection, owners[0][0], 10**15,
            kind="topup", key=f"bench:{time.time_ns()}", actor="bench", reason="bench",
        )  # fmt: skip
    step = MONTH / RECEIPTS
    for first in range(0, RECEIPTS, CHUNK):
        rows = []
        for number in range(first, min(first + CHUNK, RECEIPTS)):
            moment = START + number * step
            account_id, keys = owners[0 if r.random() < 0.063 else r.randrange(1, OTHERS + 1)]
            tokens = {"input_tokens": r.randrange(20, 2000), "output_tokens": r.randrange(1, 500)}
            charge_nanos = charge(PRICE, msgspec.convert(tokens, Usage)).total_nanos
            milliseconds = int(moment.timestamp() * 1000)
            rows.append(
                {
                    "request_id": f"req_{milliseconds:012x}{r.getrandbits(80):020x}",
                    "account_id": account_id,
                    "key_id": r.choice(keys),
                    "model": f"model-{number % 3}",
                    "task": "text-generation",
                    "price_id": price_id,
                    "outcome": "charged",
                    "status": "succeeded" if number % FAILED else "failed",
                    "reason": "completed" if number % FAILED else "engine_error",
                    "hold_nanos": charge_nanos,
                    "charge_nanos": charge_nanos,
                    "requests": 1,
                    **dict.fromkeys(QUANTITIES, 0),
                    **tokens,
                    "timings": {"queue_us": 500},
                    "metadata": {"project": "x"},
                    "accepted_at": moment,
                    "settled_at": moment + timedelta(milliseconds=900),
                    "transfer_id": transfer.id,
                }
            )
        with database.transaction() as connection:
            connection.execute(insert(receipts), rows)
    return owners[0][0], owners[0][1][0]


def timed(database: Database, query: Callable[[Connection], Any]) -> float:
    """Return the median of seven runs, in milliseconds."""
    took = []
    for _ in range(7):
        with database.snapshot() as connection:
            started = time.perf_counter()
            query(connection)
            took.append(time.perf_counter() - started)
    return sorted(took)[3] * 1000


def print_row(name: str, what: str, milliseconds: float) -> None:
    print(f"{name:<11} {what:<50} {milliseconds:>9.2f} ms", flush=True)
