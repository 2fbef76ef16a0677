"""What many models, prices, accounts and keys cost beside a few of each.

``python -m benchmarks wide``. ``BENCH_WIDE`` is the number of keys and of prices (100,000); there
are a tenth as many accounts and a hundredth as many models. Each account has ten keys, and a price
of its own for ten models. It runs on SQLite or, with ``BENCH_POSTGRES``, on the PostgreSQL server
of that URL, where two databases are made and dropped. Both installations are measured by turns, in
processor time of this process, so that a busy machine disturbs little.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, insert, select

from benchmarks.databases import two_databases
from benchmarks.ledger import Books, chat, run
from gateway.accounts.accounts import create_account, list_accounts
from gateway.accounts.keys import KeyFilter, authenticate, create_key, list_keys
from gateway.catalog.listing import model_view
from gateway.catalog.store import LiveCatalog
from gateway.ledger.prices import set_price
from gateway.ledger.transfers import add_credit
from gateway.operations import limits
from gateway.operations import prices as price_operations
from gateway.pricing import Component, Price
from gateway.sql.database import Database, migrate
from gateway.sql.lanes import WRITE, open_engine
from gateway.tables.core import price_periods, prices

WIDE: Final = int(os.environ.get("BENCH_WIDE", "100000"))
FEW: Final = 100
"""Number of keys and prices of the installation beside it."""
EACH: Final = 10
"""Keys of an account, and models that it has prices of its own for."""
ROUNDS: Final = 7
BATCHES: Final = (1, 16)
PEPPER: Final = b"bench"
CHUNK: Final = 10_000
ENTRY: Final = """\
  - name: bench-{number}
    task: text-generation
    engine: echo
    price:
      - {{unit: input_token, amount: "0.02", per: 1000000}}
      - {{unit: output_token, amount: "0.08", per: 1000000}}
    limits: {{context_tokens: 4096, output_tokens: 1024}}
"""


@dataclass(frozen=True)
class Installation:
    database: Database
    books: Books
    catalog: Path
    secret: str
    """An API key."""


def main() -> None:
    print(f"\nwide: {WIDE:,} keys and prices, {WIDE // 10:,} accounts, {WIDE // 100:,} models")
    with two_databases("few", "wide") as made:
        measure(made.name, *made.urls, made.directory)


def measure(name: str, few_url: str, wide_url: str, directory: Path) -> None:
    few = install(few_url, FEW, directory / "few.yaml")
    wide = install(wide_url, WIDE, directory / "wide.yaml")
    print(f"\n| {name}, processor time of the gateway | few | many |\n| --- | ---: | ---: |")
    for batch in BATCHES:
        pairs = [
            [run(each.books, batch, hot=False).cpu_us for each in (few, wide)]
            for _ in range(ROUNDS)
        ]
        _row(f"hold and settle in batches of {batch}, µs", *_medians(pairs))
    for title, do in _reads().items():
        _row(
            f"{title}, ms",
            *_medians([[_read(each, do) for each in (few, wide)] for _ in range(ROUNDS)]),
        )
    times = [asyncio.run(_catalog(each)) for each in (few, wide)]
    for title in times[0]:
        _row(title, *(each[title] for each in times))
    for installation in (few, wide):
        installation.database.dispose()
        installation.books.engine.dispose()


def install(url: str, count: int, catalog: Path) -> Installation:
    """Make an installation with a number of keys and prices."""
    migrate(url)
    database = Database(url)
    models = max(count // 100, EACH)
    names = [f"bench-{number}" for number in range(models)]
    entries = "".join(ENTRY.format(number=number) for number in range(models))
    catalog.write_text(f"models:\n{entries}")
    asyncio.run(LiveCatalog.open(catalog, database))  # puts the list prices in force
    owners: list[tuple[int, int]] = []
    secret = ""
    for begin in range(0, count // EACH, CHUNK // EACH):
        with database.transaction() as connection:
            for number in range(begin, min(begin + CHUNK // EACH, count // EACH)):
                account = create_account(connection, f"customer {number}").id
                for _ in range(EACH):
                    secret, key = create_key(connection, account, pepper=PEPPER)
                owners.append((account, key.id))
                _add_credit(connection, account)
    price_id = _fill_prices(database, names, [account for account, _ in owners])
    books = Books(open_engine(url, lane=WRITE), owners, price_id, chat())
    return Installation(database, books, catalog, secret)


def _add_credit(connection: Connection, account: int) -> None:
    add_credit(
        connection,
        account,
        10**15,
        kind="topup",
        key=f"bench:{account}",
        actor="bench",
        reason="bench",
    )


def _fill_prices(database: Database, names: list[str], accounts: list[int]) -> int:
    """Insert a price of its own for ten models of each account; return the id of a list price."""
    with database.transaction() as connection:
        listed = dict(connection.execute(select(prices.c.model, prices.c.id)).tuples().all())
        now = datetime.now(UTC)
        rows = [
            {
                "model": (model := names[(number * EACH + place) % len(names)]),
                "account_id": account,
                "effective_from": now,
                "price_id": listed[model],
                "source": "operator",
                "actor": "bench",
                "reason": "bench",
            }
            for number, account in enumerate(accounts)
            for place in range(EACH)
        ]
        for begin in range(0, len(rows), CHUNK):
            connection.execute(insert(price_periods), rows[begin : begin + CHUNK])
    return int(listed[names[0]])


def _reads() -> dict[str, Callable[[Installation, Connection], object]]:
    return {
        "a key that is not remembered": lambda each, connection: authenticate(
            connection, each.secret, PEPPER
        ),
        "100 keys of an account": lambda each, connection: list_keys(
            connection, KeyFilter(each.books.owners[-1][0]), limit=100
        ),
        "100 accounts": lambda each, connection: list_accounts(connection, limit=100),
        "100 prices of an account": lambda each, connection: _prices(
            connection, account=str(each.books.owners[-1][0])
        ),
        "100 prices of a model": lambda each, connection: _prices(connection, model="bench-0"),
        "100 prices of all": _prices_of_all,
        "100 limits of all": lambda each, connection: limits.list_page(
            connection, None, limit=100, cursor=None
        ),
    }


def _prices(
    connection: Connection, *, model: str | None = None, account: str | None = None
) -> object:
    return price_operations.list_page(
        connection, model=model, account=account, limit=100, cursor=None, cache={}
    )


def _prices_of_all(_: Installation, connection: Connection) -> object:
    return _prices(connection)


def _read(each: Installation, do: Callable[[Installation, Connection], object]) -> float:
    with each.database.snapshot() as connection:
        started = time.process_time()
        do(each, connection)
        return (time.process_time() - started) * 1000


async def _catalog(each: Installation) -> dict[str, float]:
    """Return what a gateway's catalog costs: at its start, when nothing and when one price has
    changed, and to list it."""
    started = time.process_time()
    live = await LiveCatalog.open(each.catalog, each.database)
    found = {"start of a gateway: catalog and prices, s": time.process_time() - started}
    started = time.process_time()
    await live.refresh()
    found["a second in which no price changes, ms"] = (time.process_time() - started) * 1000
    account, _ = each.books.owners[-1]
    later = datetime.now(UTC) + timedelta(minutes=1)
    price = Price((Component("input_token", 30), Component("output_token", 90)))
    with each.database.transaction() as connection:
        set_price(
            connection,
            "bench-0",
            price,
            account_id=account,
            starts_at=later,
            actor="bench",
            reason="bench",
        )
    started = time.process_time()
    await live.refresh()
    found["a second in which one price changes, ms"] = (time.process_time() - started) * 1000
    now, turns = datetime.now(UTC), 1000
    started = time.process_time()
    for _ in range(turns):
        live.priced("bench-0", now, account)
    found["the price of a request, µs"] = (time.process_time() - started) / turns * 1e6
    started = time.process_time()
    [model_view(entry, (), 0) for entry in live.entries(account)]
    found["list of all models, ms"] = (time.process_time() - started) * 1000
    return found


def _medians(rows: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _row(title: str, few: float, many: float) -> None:
    print(f"| {title} | {few:,.2f} | {many:,.2f} |", flush=True)
