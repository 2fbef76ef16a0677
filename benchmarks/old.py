"""What an installation of years costs beside a new one: requests, the sweep, nights and months.

``python -m benchmarks old``. ``BENCH_OLD`` is the number of receipts (1,000,000), of 24 months and
of 100 accounts with 10,000 keys; below a million, of 3 months and 10 accounts, because sealing
hours and months takes longer than all else. ``BENCH_HOLDS`` is the number of open requests
(300,000). It runs on SQLite or, with ``BENCH_POSTGRES``, on the PostgreSQL server of that URL: two
databases are made there, and dropped. Both installations are measured by turns, so that a busy
machine slows both. The receipts are inserted by SQL, with transfers, balances and lots, so that the
books agree; hours and months are sealed by the product.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from sqlalchemy import Connection, func, insert, select, text, update

from benchmarks.databases import server, two_databases
from benchmarks.ledger import Books, Figure, chat, run
from benchmarks.sweep import HOLDS, fill_holds, started
from gateway.accounts.accounts import create_account
from gateway.accounts.keys import KeyFilter, create_key, list_keys
from gateway.archive.lifecycle import Archiver
from gateway.audit_log import Author
from gateway.billing.entries import entries
from gateway.billing.exports.files import export
from gateway.billing.exports.footer import Footer
from gateway.billing.exports.pages import connection_reader
from gateway.billing.proof import prove_books
from gateway.billing.statements.close import close_month
from gateway.billing.statements.statement import statement
from gateway.billing.usage.failures import count_failures
from gateway.billing.usage.margins import count_below_cost, margin_views
from gateway.billing.usage.report import Filters, Span, stored_usage, usage
from gateway.billing.usage.rollups import DAYS_MAX, HOURS_MAX, build_due, build_due_days
from gateway.ledger.periods import open_period, span_of, starts_at
from gateway.ledger.prices import put_in_force
from gateway.pricing import Component, Price, charge
from gateway.requests.lookup import RequestFilter, read_page
from gateway.sql.database import Database, migrate
from gateway.sql.lanes import WRITE, open_engine
from gateway.sql.partitions import create_month, is_partitioned
from gateway.tables.core import SYSTEM_ACCOUNTS, accounts, lots, transfers
from workers.contract.blobs import Blobs
from workers.contract.jobs import Usage

RECEIPTS: Final = int(os.environ.get("BENCH_OLD", "1000000"))
KEYS: Final = 100
"""Keys of each account."""
TOGETHER: Final = 4
"""Receipts of a charge."""
FAILED_OF: Final = 500
"""Charged requests beside each one that failed."""
CHUNK: Final = 200_000
ROUNDS: Final = 5
BATCHES: Final = (1, 16)
CREDIT: Final = 10**15
MODEL: Final = "bench"
PRICE: Final = Price((Component("input_token", 20), Component("output_token", 80)))
USED: Final = Usage(requests=1, input_tokens=100, output_tokens=50)
COST: Final = charge(PRICE, USED).total_nanos
BENCH: Final = Author("bench", "cli")


@dataclass(frozen=True)
class Installation:
    """A database, and what is measured in it."""

    url: str
    database: Database
    books: Books
    account: int
    """An account with history, if there is any."""
    key: int
    months: tuple[str, ...]
    """Those that ended."""


def main() -> None:
    size = size_of(RECEIPTS)
    print(f"\nold: {RECEIPTS:,} receipts of {size.months} months, {HOLDS:,} open requests")
    with two_databases("new", "old") as made:
        measure(made.name, *made.urls, made.directory)


def measure(name: str, new_url: str, old_url: str, directory: Path) -> None:
    new = install(new_url, receipts=0, size=size_of(RECEIPTS))
    old = install(old_url, receipts=RECEIPTS, size=size_of(RECEIPTS))
    print(f"\n| {name} | new | old | old to new |\n| --- | ---: | ---: | ---: |")
    for batch in BATCHES:
        _pairs(new, old, batch, "")
    for title, do in _reads(old).items():
        _row(title, _read(new, do), _read(old, do), "ms")
    asyncio.run(_sweeps(new, old))
    for batch in BATCHES:
        _pairs(new, old, batch, f" beside {HOLDS:,} open requests")
    for title, act in (
        ("nightly proof", _prove),
        # The first one stores what the next ones start from.
        ("next nightly proof", _prove),
        ("closing of a month", _close_next),
    ):
        _row(title, _taken(act, new), _taken(act, old), "s")
    _row("archiving of a month", None, _taken(lambda i: _archive(i, directory), old), "s")
    _row("its return", None, _taken(lambda i: _restore(i, directory), old), "s")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\nlargest memory of this process: {peak_mib:,.0f} MiB")
    for each in (new, old):
        each.database.dispose()
        each.books.engine.dispose()


@dataclass(frozen=True, slots=True)
class Size:
    """Of an installation: the months of its history, and its accounts."""

    months: int
    accounts: int


def size_of(receipts: int) -> Size:
    return Size(24, 100) if receipts >= 1_000_000 else Size(3, 10)


def install(url: str, *, receipts: int, size: Size) -> Installation:
    """Make an installation with a history of a number of receipts, whose hours are sealed."""
    migrate(url)
    database = Database(url)
    now = datetime.now(UTC)
    months = [now.strftime("%Y-%m")]
    for _ in range(size.months):
        months.insert(0, (starts_at(months[0]) - timedelta(days=1)).strftime("%Y-%m"))
    started = starts_at(months[0])
    with database.transaction() as connection:
        _make_partitions(connection, months)
        owners = [_open_account(connection, number, started) for number in range(size.accounts)]
        price_id = put_in_force(connection, MODEL, PRICE, started)
    if receipts:
        _fill(database, receipts, price_id, owners, started, now - timedelta(hours=2))
        with database.transaction() as connection:
            _settle_balances(connection)
        for month in months:
            with database.transaction() as connection:
                open_period(connection, month)
        while True:
            with database.transaction() as connection:
                if build_due(connection, now) < HOURS_MAX:
                    break
        while True:
            with database.transaction() as connection:
                if build_due_days(connection) < DAYS_MAX:
                    break
        for month in months[:-2]:
            close_month(database, month, author=BENCH)
    if database.engine.dialect.name == "postgresql":
        with server(url) as connection:
            connection.execute(text("VACUUM ANALYZE"))
    hot = [(account, owned[0]) for account, owned in owners]
    books = Books(open_engine(url, lane=WRITE), hot, price_id, chat())
    account, owned = owners[0]
    return Installation(url, database, books, account, owned[0], tuple(months[:-1]))


def _open_account(connection: Connection, number: int, moment: datetime) -> tuple[int, list[int]]:
    """Open an account with credit since a moment."""
    account = create_account(connection, f"customer {number}").id
    owned = [create_key(connection, account, pepper=b"bench")[1].id for _ in range(KEYS)]
    transfer = connection.execute(
        insert(transfers)
        .values(
            key=f"topup:{account}",
            kind="topup",
            from_account=SYSTEM_ACCOUNTS["cash"],
            to_account=account,
            amount_nanos=CREDIT,
            posted_after=CREDIT,
            account_version=1,
            actor="bench",
            booked_at=moment,
        )
        .returning(transfers.c.id)
    ).scalar_one()
    connection.execute(
        insert(lots).values(
            account_id=account,
            kind="paid",
            amount_nanos=CREDIT,
            remaining_nanos=CREDIT,
            transfer_id=transfer,
            created_at=moment,
        )
    )
    connection.execute(
        update(accounts)
        .where(accounts.c.id == account)
        .values(posted_nanos=CREDIT, version=1, created_at=moment)
    )
    return account, owned


def _make_partitions(connection: Connection, months: list[str]) -> None:
    if not is_partitioned(connection):
        return
    # A new database has one partition of all earlier months, which is empty.
    before = text(
        "SELECT oid::regclass::text FROM pg_class JOIN pg_inherits ON inhrelid = oid "
        "WHERE relkind = 'r' AND relname LIKE '%\\_before\\_%'"
    )
    for name in connection.execute(before).scalars().all():
        connection.execute(text(f"DROP TABLE {name}"))
    for month in months:
        create_month(connection, month)


def _fill(
    database: Database,
    count: int,
    price_id: int,
    owners: list[tuple[int, list[int]]],
    first: datetime,
    last: datetime,
) -> None:
    """Insert receipts and their charges: the n-th charge is of the n-th account by turns."""
    sqlite = database.engine.dialect.name == "sqlite"
    moment = "{}" if sqlite else "TIMESTAMPTZ 'epoch' + ({}) * INTERVAL '1 microsecond'"
    request = (
        "printf('req_%012x7%019d', {us} / 1000, {i})"
        if sqlite
        else "'req_' || lpad(to_hex({us} / 1000), 12, '0') || '7' || lpad(({i})::text, 19, '0')"
    )
    series = (
        "(WITH RECURSIVE n(i) AS (SELECT :first UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :last) "
        "SELECT i FROM n)"
        if sqlite
        else "generate_series(CAST(:first AS bigint), CAST(:last AS bigint) - 1) AS n(i)"
    )
    with database.transaction() as connection:
        base = connection.execute(select(func.max(transfers.c.id))).scalar_one() + 1
    start_us = int(first.timestamp() * 1_000_000)
    step_us = int((last - first) / timedelta(microseconds=1)) // count
    account, key = owners[0][0], owners[0][1][0]
    # Accounts and keys were numbered one after the other.
    owned = len(owners)
    assert [owner for owner, _ in owners] == [account + n for n in range(owned)]
    assert owners[-1][1][-1] == key + owned * KEYS - 1
    at = f"({start_us} + i * {step_us})"
    booked = f"({start_us} + (i / {TOGETHER} + 1) * {TOGETHER * step_us} + 1000000)"
    charges = f"""
        INSERT INTO transfers (id, key, kind, from_account, to_account, amount_nanos, posted_after,
            account_version, actor, reason, booked_at)
        SELECT {base} + i / {TOGETHER}, 'charge:' || {request.format(us=at, i="i")}, 'charge',
            {account} + i / {TOGETHER} % {owned}, {SYSTEM_ACCOUNTS["revenue"]},
            {COST * TOGETHER},
            {CREDIT} - (i / {TOGETHER} / {owned} + 1) * {COST * TOGETHER},
            i / {TOGETHER} / {owned} + 2, 'settler', '', {moment.format(booked)}
        FROM {series} WHERE i % {TOGETHER} = 0"""
    filled = f"""
        INSERT INTO receipts (request_id, account_id, key_id, model, task, price_id, outcome,
            status, reason, hold_nanos, charge_nanos, requests, input_tokens, cached_input_tokens,
            output_tokens, images, video_ms, audio_ms, characters, steps, gpu_us, timings,
            service_class, accepted_at, settled_at, transfer_id)
        SELECT {request.format(us=at, i="i")}, {account} + i / {TOGETHER} % {owned},
            {key} + i / {TOGETHER} % {owned} * {KEYS} + i % {KEYS}, '{MODEL}',
            'text-generation', {price_id}, 'charged', 'succeeded', 'completed', {COST * 2}, {COST},
            1, {USED.input_tokens}, 0, {USED.output_tokens}, 0, 0, 0, 0, 0, 0,
            '{{"queue_us": 500}}', 'standard', {moment.format(at)}, {moment.format(booked)},
            {base} + i / {TOGETHER}
        FROM {series}"""
    # Beside them, each of a request that was charged.
    failed = f"""
        INSERT INTO receipts (request_id, account_id, key_id, model, task, price_id, outcome,
            status, reason, hold_nanos, charge_nanos, requests, input_tokens, cached_input_tokens,
            output_tokens, images, video_ms, audio_ms, characters, steps, gpu_us, timings,
            service_class, accepted_at, settled_at, transfer_id)
        SELECT {request.replace("7", "8", 1).format(us=at, i="i")},
            {account} + i / {TOGETHER} % {owned},
            {key} + i / {TOGETHER} % {owned} * {KEYS} + i % {KEYS}, '{MODEL}',
            'text-generation', {price_id}, 'released', 'failed', 'timeout', {COST * 2}, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 0, 0, '{{"queue_us": 500}}', 'standard', {moment.format(at)},
            {moment.format(booked)}, NULL
        FROM {series} WHERE i % {FAILED_OF} = 0"""
    whole = count // TOGETHER * TOGETHER
    for begin in range(0, whole, CHUNK):
        parts = {"first": begin, "last": min(begin + CHUNK, whole)}
        with database.transaction() as connection:
            connection.execute(text(charges), parts)
            connection.execute(text(filled), parts)
            connection.execute(text(failed), parts)
    if not sqlite:
        with database.transaction() as connection:
            number = f"SELECT setval('transfers_id_seq', {base + whole // TOGETHER})"
            connection.execute(text(number))


def _settle_balances(connection: Connection) -> None:
    """Set balances, lots and the keys' spending to the sums of the charges."""
    for statement_ in (
        f"""UPDATE accounts SET version = 1 + made.n, posted_nanos = {CREDIT} - made.spent
            FROM (SELECT from_account AS id, count(*) AS n, CAST(sum(amount_nanos) AS bigint) AS
            spent FROM transfers WHERE kind = 'charge' GROUP BY from_account) AS made
            WHERE made.id = accounts.id""",
        "UPDATE lots SET remaining_nanos = accounts.posted_nanos FROM accounts "
        "WHERE accounts.id = lots.account_id",
        """UPDATE keys SET spent_nanos = made.spent FROM (SELECT key_id AS id,
            CAST(sum(charge_nanos) AS bigint) AS spent FROM receipts GROUP BY key_id) AS made
            WHERE made.id = keys.id""",
    ):
        connection.execute(text(statement_))


def _pairs(new: Installation, old: Installation, size: int, beside: str) -> None:
    """Measure hold and settle by turns: time, and processor time of client and server."""
    turns: list[tuple[Figure, Figure]] = []
    for number in range(ROUNDS):
        order = (new, old) if number % 2 else (old, new)
        taken = {id(each): run(each.books, size, hot=False) for each in order}
        turns.append((taken[id(new)], taken[id(old)]))
    taken_us = [(1e6 / first.pairs_per_s, 1e6 / second.pairs_per_s) for first, second in turns]
    used_us = [(first.cpu_us, second.cpu_us) for first, second in turns]
    for what, values in (("µs", taken_us), ("µs of this process", used_us)):
        new_us, old_us = (statistics.median(each) for each in zip(*values, strict=True))
        ratio = statistics.median(second / first for first, second in values)
        print(
            f"| hold and settle in batches of {size}{beside}, {what} | {new_us:,.0f} | "
            f"{old_us:,.0f} | {ratio:.2f} |",
            flush=True,
        )


def _reads(installation: Installation) -> dict[str, Callable[[Connection], object]]:
    last = span_of(installation.months[-1])
    span = Span(last.starts_at, last.ends_at, ZoneInfo("UTC"))
    account, key = installation.account, installation.key

    def month_of_key(connection: Connection) -> object:
        return usage(connection, span, (), Filters((account,), (key,)))

    def by_day(connection: Connection) -> object:
        return usage(connection, span, ("day", "model"), Filters((account,)))

    def newest(chosen: RequestFilter) -> Callable[[Connection], object]:
        return lambda connection: read_page(
            connection, chosen, limit=100, cursor=None, oldest_first=False
        )

    def exported(connection: Connection) -> object:
        read = connection_reader(connection)
        footer = Footer()
        filters = Filters((account,))
        return list(export(read, span, filters, format="csv", profile="native", footer=footer))

    every = Filters()
    return {
        "usage of all accounts in a month by day": lambda connection: usage(
            connection, span, ("day", "model"), every
        ),
        "margins of all models in a month": lambda connection: margin_views(
            stored_usage(connection, span, ("model",), every), None
        ),
        "charges below cost of a week": lambda connection: count_below_cost(
            connection, last.ends_at - timedelta(days=7)
        ),
        "usage of an account in a day by a tag": lambda connection: usage(
            connection,
            Span(last.ends_at - timedelta(days=1), last.ends_at, ZoneInfo("UTC")),
            ("tag:project",),
            Filters((account,)),
        ),
        "failures of all accounts in a month": lambda connection: count_failures(
            connection, account_id=None, starts_at=last.starts_at, ends_at=last.ends_at
        ),
        "newest 100 entries of an account": lambda connection: entries(
            connection, account, limit=100
        ),
        "100 keys of an account": lambda connection: list_keys(
            connection, KeyFilter(account), limit=100
        ),
        "usage of a key in a month": month_of_key,
        "usage of an account in a month by day": by_day,
        "newest 100 of an account": newest(RequestFilter(account)),
        "newest 100 failed of an account": newest(RequestFilter(account, status="failed")),
        "newest 100 of all accounts": newest(RequestFilter(None)),
        "statement of a month": lambda connection: statement(
            connection, account, installation.months[-1]
        ),
        "export of an account's month": exported,
    }


def _read(installation: Installation, do: Callable[[Connection], object]) -> float:
    """Return the median of seven reads, in milliseconds."""
    taken = []
    for _ in range(7):
        with installation.database.snapshot() as connection:
            started = time.perf_counter()
            do(connection)
            taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000


async def _sweeps(new: Installation, old: Installation) -> None:
    taken = []
    for each in (new, old):
        fill_holds(each.database)
        async with started(each.database) as (sweeper, _, _):
            await sweeper.turn()
            processor = time.process_time()
            await sweeper.turn()
            taken.append((time.process_time() - processor) * 1000)
    _row("turn of the sweep, processor time", taken[0], taken[1], "ms")


def _prove(installation: Installation) -> None:
    for finding in prove_books(installation.database):
        print(finding)


def _close_next(installation: Installation) -> None:
    close_month(installation.database, installation.months[-1], author=BENCH)


def _archive(installation: Installation, directory: Path) -> None:
    asyncio.run(_archiver(installation, directory).archive(installation.months[0]))


def _restore(installation: Installation, directory: Path) -> None:
    asyncio.run(_archiver(installation, directory).restore(installation.months[0]))


def _archiver(installation: Installation, directory: Path) -> Archiver:
    return Archiver(installation.database, Blobs(f"file://{directory}/blobs"), BENCH)


def _taken(act: Callable[[Installation], None], installation: Installation) -> float:
    started = time.perf_counter()
    act(installation)
    return time.perf_counter() - started


def _row(title: str, new: float | None, old: float, unit: str) -> None:
    first = "" if new is None else f"{new:,.1f}"
    ratio = "" if new is None else f"{old / new:.2f}"
    print(f"| {title}, {unit} | {first} | {old:,.1f} | {ratio} |", flush=True)
