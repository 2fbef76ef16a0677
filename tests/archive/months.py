"""A month of receipts, made through the ledger, closed and summed up by hours."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import text

from gateway.accounts.budgets import create_budget
from gateway.archive.files import TABLES
from gateway.archive.lifecycle import Archiver, Sizes
from gateway.archive.marks import Archive
from gateway.audit_log import Author
from gateway.billing.reconciliation import check_books
from gateway.billing.statements.close import close_month
from gateway.billing.usage.rollups import build_due, build_due_days
from gateway.ids import first_request_id
from gateway.ledger.closed import Output
from gateway.ledger.holds import hold
from gateway.ledger.periods import booking_time
from gateway.ledger.prices import put_in_force
from gateway.ledger.refunds import refund
from gateway.ledger.settle import Settlement, settle
from gateway.ledger.steps import StepLine, write_steps
from gateway.ledger.transfers import add_credit
from gateway.pricing import Price
from gateway.sql.database import Database
from tests.ledger.books import Books, done, open_books
from workers.contract.blobs import Blobs
from workers.contract.jobs import RequestId, Timings, Usage

MARCH = datetime(2026, 3, 1, tzinfo=UTC)
LATE = datetime(2026, 3, 31, tzinfo=UTC)
"""All requests are of the last day, so that few hours are summed up."""
APRIL = datetime(2026, 4, 1, tzinfo=UTC)
MONTH = "2026-03"
AUTHOR = Author("test", "system")
SMALL = Sizes(page=7, pages=2, batch=3)
"""Several files, several row groups in each, and many batches."""


def at(moment: datetime) -> Callable[[], datetime]:
    return lambda: moment


def request_id_at(moment: datetime) -> RequestId:
    return RequestId(f"{first_request_id(moment)}{secrets.token_hex(10)}")


@dataclass
class Month:
    """March of an account, of which April is open."""

    books: Books
    other: Books
    blobs: Blobs
    url: str
    requests: list[RequestId]
    refunded: RequestId
    workflow: RequestId
    kept: RequestId
    """Its output is still kept."""

    def copied(self, url: str, database: Database, folder: Path) -> Month:
        return replace(
            self,
            url=url,
            books=replace(self.books, database=database),
            other=replace(self.other, database=database),
            blobs=Blobs(f"file://{folder}"),
        )

    @property
    def database(self) -> Database:
        return self.books.database

    def archiver(self) -> Archiver:
        return Archiver(self.database, self.blobs, AUTHOR, sizes=SMALL)

    def archive(self, *, keep: bool = False) -> Archive:
        return asyncio.run(self.archiver().archive(MONTH, keep=keep))

    def restore(self) -> int:
        return asyncio.run(self.archiver().restore(MONTH))

    def findings(self) -> list[str]:
        with self.database.snapshot() as connection:
            return [str(each) for each in check_books(connection, now=datetime.now(UTC))]

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return all rows of the archived tables, as the driver returns them."""
        order = {"receipts": "request_id", "receipt_steps": "request_id, seq", "transfers": "id"}
        with self.database.snapshot() as connection:
            json_as_text = connection.dialect.name == "postgresql"
            found = {}
            for name, table in TABLES.items():
                columns = ", ".join(
                    f'"{each.name}"::text' if json_as_text else f'"{each.name}"' for each in table.c
                )
                query = f"SELECT {columns} FROM {name} ORDER BY {order[name]}"
                found[name] = [tuple(row) for row in connection.execute(text(query))]
            return found

    def digest(self) -> str:
        return hashlib.sha256(repr(self.rows()).encode()).hexdigest()


def make_month(url: str) -> Month:
    """Make the month in an empty database. ``copied`` gives the same month in a copy of it."""
    database = Database(url)
    books, other = open_books(database, credit=0), open_books(database, credit=0)
    for each in (books, other):
        pay(each, 10**9, MARCH + timedelta(hours=1))
    with database.transaction() as connection:
        create_budget(connection, books.account.id, 10**9, window="day")
        free = put_in_force(connection, "flow", Price(()), datetime(2020, 1, 1, tzinfo=UTC))
    requests: list[RequestId] = []
    for hour in range(1, 21, 2):
        moment = LATE + timedelta(hours=hour)
        requests += spend(books, moment, 3)
        requests += spend(other, moment + timedelta(minutes=1), 1)
        spend(books, moment + timedelta(minutes=2), 1, status="failed")
        if hour % 4 == 1:
            pay(books, 10_000, moment + timedelta(minutes=3))
    (kept,) = spend(books, LATE + timedelta(hours=21), 1, output=Output({"text": "kept"}))
    (workflow,) = spend(books, LATE + timedelta(hours=22), 1, price_id=free)
    with database.transaction() as connection:
        refund(
            connection, requests[4], 100,
            key="refund:1", actor="test", reason="late", clock=at(LATE + timedelta(hours=23)),
        )  # fmt: skip
    close_month(database, MONTH, author=AUTHOR, clock=at(APRIL + timedelta(minutes=10)))
    for each in (books, other):
        spend(each, APRIL + timedelta(hours=2), 2)
    with database.transaction() as connection:
        while build_due(connection, APRIL + timedelta(hours=4)):
            pass
        while build_due_days(connection):
            pass
    database.dispose()
    return Month(books, other, Blobs("memory:///"), url, requests, requests[4], workflow, kept)


def pay(books: Books, nanos: int, moment: datetime) -> None:
    with books.database.transaction() as connection:
        add_credit(
            connection, books.account.id, nanos, kind="topup",
            key=f"topup:{books.account.id}:{moment}", actor="test", reason="paid",
            clock=at(moment),
        )  # fmt: skip


def spend(
    books: Books,
    moment: datetime,
    count: int,
    *,
    status: Any = "succeeded",
    price_id: int | None = None,
    output: Output | None = None,
) -> list[RequestId]:
    """Settle requests of an account together: they are one charge."""
    orders = [
        books.order(
            request_id=request_id_at(moment),
            price_id=price_id or books.price_id,
            model="m" if price_id is None else "flow",
            accepted_at=moment,
            deadline_at=moment + timedelta(minutes=1),
            metadata={"tag": 'Ω "quoted", \n new line', "empty": ""} if number == 0 else None,
        )
        for number in range(count)
    ]
    billable = status == "succeeded"
    with books.database.transaction() as connection:
        hold(connection, orders)
        settlements = [
            Settlement(
                order.request_id, status, "completed", billable=billable and price_id is None,
                usage=done(order.request_id).usage, output=output,
                timings=Timings(queue_us=15),
            )
            for order in orders
        ]  # fmt: skip
        settle(
            connection, settlements, now=booking_time(connection, at(moment)),
            prices=books.prices, retention=timedelta(days=3650),
        )  # fmt: skip
        if price_id is not None:
            line = StepLine(
                "draw", "m", "text-generation", books.price_id, "not_run", 1, 0,
                Usage(), Timings(), None, moment, None,
            )  # fmt: skip
            write_steps(connection, [(orders[0].request_id, [line, line])])
    return [order.request_id for order in orders]
