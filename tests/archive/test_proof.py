"""The paged proof finds each fault, in the open month every night and in closed ones on demand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Executable, Table, insert, select, text, update

from gateway.accounts.budgets import create_organisation_budget
from gateway.accounts.organisations import add_account, create_organisation, remove_account
from gateway.billing import reconciliation
from gateway.billing.proof import prove_books
from gateway.billing.proof_process import prove_in_child
from gateway.billing.reconciliation import prove_here, run_reconciliation
from gateway.billing.sealed_months import prove_months
from gateway.billing.statements.close import close_month
from gateway.billing.usage.rollups import build_due, build_due_days
from gateway.errors import Conflict
from gateway.leases import Lease
from gateway.ledger.holds import hold
from gateway.ledger.proof import snapshots
from gateway.ledger.proof.accounts import Proof
from gateway.ledger.proof.carry import forget_carry, read_carries
from gateway.ledger.proof.snapshots import Snapshots
from gateway.ledger.proof.standing import Standing
from gateway.ledger.reconcile import prove_ledger
from gateway.ledger.refunds import refund
from gateway.sql.database import Database
from gateway.tables.core import (
    accounts,
    budget_windows,
    holds,
    keys,
    lots,
    outputs,
    periods,
    receipts,
    refunds,
    transfers,
)
from gateway.tables.payments import payments
from gateway.tables.proofs import proven_months
from gateway.tables.usage import usage_hourly, usage_hours
from gateway.tables.webhooks import webhook_deliveries
from gateway.tables.workflows import receipt_steps
from tests.archive.months import APRIL, AUTHOR, LATE, MARCH, MONTH, Month, at, pay, spend
from tests.databases import Databases
from tests.ledger.books import HOLD, done, open_books
from workers.contract.blobs import Blobs
from workers.contract.jobs import RequestId

PAGE = 3
TRAFFIC = 100
"""Requests that are settled and refunded during proofs."""
FAR = 2**40
"""Number of a row that does not exist."""


@pytest.fixture(scope="module")
def proven_march(
    month_on_both: Month, databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Month]:
    """March, which was proven when it had been closed, and an April with rows for each rule."""
    url = databases.copy(month_on_both.url)
    database = Database(url)
    month = month_on_both.copied(url, database, tmp_path_factory.mktemp("blobs"))
    assert prove_books(database, page=PAGE) == []
    later = APRIL + timedelta(hours=5)
    spend(month.books, later, 1, price_id=price_of_workflows(database))
    with database.transaction() as connection:
        refund(
            connection, month.requests[7], 100,
            key="refund:2", actor="test", reason="late", clock=at(later),
        )  # fmt: skip
    yield month
    database.dispose()


def price_of_workflows(database: Database) -> int:
    with database.snapshot() as connection:
        query = select(receipts.c.price_id).where(receipts.c.model == "flow")
        return int(connection.execute(query).scalars().first() or 0)


def rules(connection: Connection, *, whole: bool) -> set[str]:
    """Prove in pages on a connection whose transaction is rolled back."""
    horizon = datetime.now(UTC) - timedelta(seconds=30)
    reading = Snapshots(lambda: contextlib.nullcontext(connection), lambda: horizon, PAGE)
    proof = Proof(reading, whole=whole, keep=lambda function: function(connection))
    found = [*prove_ledger(proof, now=datetime.now(UTC)), *prove_months(proof)]
    return {each.rule for each in found}


@contextlib.contextmanager
def tampering(month: Month) -> Iterator[Connection]:
    """A transaction in which nothing guards the rows, and that leaves no trace."""
    with month.database.engine.connect() as connection, connection.begin() as transaction:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        else:
            connection.execute(text("PRAGMA defer_foreign_keys = ON"))
            named = text("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            for name in connection.execute(named).scalars().all():
                connection.execute(text(f"DROP TRIGGER {name}"))
        yield connection
        transaction.rollback()


def one(table: Table, moment: str, in_april: bool, *conditions: Any) -> Any:
    """Condition: the first row of a table that was booked in March, or in April."""
    column, key = table.c[moment], next(iter(table.primary_key))
    within = column >= APRIL if in_april else column < APRIL
    return key == select(key).where(within, *conditions).order_by(key).limit(1).scalar_subquery()


def add(
    table: Table, column: str, moment: str, *conditions: Any, by: int = 1
) -> Callable[[Connection, bool], None]:
    """Return a fault: add to a number of one row."""

    def do(connection: Connection, in_april: bool) -> None:
        found = one(table, moment, in_april, *conditions)
        changed = update(table).where(found).values({column: table.c[column] + by})
        assert connection.execute(changed).rowcount

    return do


def lost_step(connection: Connection, in_april: bool) -> None:
    receipt = one(receipts, "settled_at", in_april, receipts.c.model == "flow")
    id = connection.execute(select(receipts.c.request_id).where(receipt)).scalar_one()
    mine = receipt_steps.c.request_id == id
    connection.execute(update(receipt_steps).where(mine).values(request_id=id[:-1] + "x"))


def wrong_step(connection: Connection, in_april: bool) -> None:
    receipt = one(receipts, "settled_at", in_april, receipts.c.model == "flow")
    id = select(receipts.c.request_id).where(receipt).scalar_subquery()
    mine = receipt_steps.c.request_id == id
    connection.execute(update(receipt_steps).where(mine).values(price_id=FAR))


def transfer_to_nowhere(connection: Connection, in_april: bool) -> None:
    connection.execute(
        insert(transfers).values(
            key="x", kind="topup", from_account=1, to_account=FAR, amount_nanos=5, posted_after=5,
            account_version=1, actor="x", booked_at=APRIL + timedelta(hours=6) * (in_april or -1),
        )
    )  # fmt: skip


CHARGE = transfers.c.kind == "charge"
CHARGED = receipts.c.outcome == "charged"
BOOKED = {
    "R1": transfer_to_nowhere,
    "R4 charge": add(transfers, "amount_nanos", "booked_at", CHARGE),
    "R4 refund": add(refunds, "amount_nanos", "booked_at"),
    "R4 too much": add(refunds, "amount_nanos", "booked_at", by=10**6),
    "R4 key": add(receipts, "key_id", "settled_at", CHARGED),
    "R7 usage": add(receipts, "output_tokens", "settled_at", CHARGED),
    "R7 price": add(receipts, "price_id", "settled_at", CHARGED),
    "R7 step": wrong_step,
    "R10 receipt": add(receipts, "charge_nanos", "settled_at", CHARGED),
    "R10 cells": add(usage_hourly, "charge_nanos", "hour"),
    "R10 seal": add(usage_hours, "requests", "hour"),
    "R11 balance": add(transfers, "posted_after", "booked_at"),
    "R11 version": add(transfers, "account_version", "booked_at", CHARGE, by=-1000),
    "R14 receipt": add(receipts, "transfer_id", "settled_at", CHARGED, by=FAR),
    "R14 refund": add(refunds, "transfer_id", "booked_at", by=FAR),
    "R14 lot": add(lots, "transfer_id", "created_at", by=FAR),
    "R14 step": lost_step,
}
"""Faults in rows of a month: the rule that finds each, with a name of the fault."""


@pytest.mark.parametrize("fault", BOOKED)
def test_fault_in_the_open_month_is_found_at_night(fault: str, proven_march: Month) -> None:
    with tampering(proven_march) as connection:
        BOOKED[fault](connection, True)

        assert fault.split()[0] in rules(connection, whole=False)


@pytest.mark.parametrize("fault", BOOKED)
def test_fault_in_a_closed_month_is_found_when_asked_and_from_then_on(
    fault: str, proven_march: Month
) -> None:
    with tampering(proven_march) as connection:
        BOOKED[fault](connection, False)

        rule = fault.split()[0]
        assert rule in rules(connection, whole=True)
        if rule in ("R4", "R7", "R11"):
            assert rule in rules(connection, whole=False)


def overdue(connection: Connection, in_april: bool) -> None:
    order = {"request_id": "req_late", "hold_nanos": 1, "job": b"", "deadline_at": APRIL}
    row = connection.execute(select(receipts).where(CHARGED)).mappings().first()
    assert row is not None
    same = ("account_id", "key_id", "model", "task", "price_id", "accepted_at")
    connection.execute(insert(holds).values(order | {name: row[name] for name in same}))


def open_and_closed(connection: Connection, in_april: bool) -> None:
    overdue(connection, in_april)
    id = select(receipts.c.request_id).limit(1).scalar_subquery()
    connection.execute(update(holds).values(request_id=id))


def doing(statement: Executable) -> Callable[[Connection, bool], None]:
    """Return a fault: a statement that changes something."""

    def do(connection: Connection, _: bool) -> None:
        assert connection.execute(statement).rowcount

    return do


def forged(table: Table, **values: Any) -> Callable[[Connection, bool], None]:
    return doing(insert(table).values(values))


def anywhere(table: Table, column: str, *conditions: Any) -> Callable[[Connection, bool], None]:
    return doing(update(table).where(*conditions).values({column: table.c[column] - 1}))


STORED = {
    "R2": anywhere(accounts, "posted_nanos", accounts.c.kind == "customer"),
    "R3 account": anywhere(accounts, "open_requests", accounts.c.kind == "customer"),
    "R3 key": anywhere(keys, "open_requests"),
    "R4": anywhere(keys, "spent_nanos"),
    "R5": open_and_closed,
    "R6": overdue,
    "R8": anywhere(lots, "remaining_nanos", lots.c.remaining_nanos > 0),
    "R9 spent": anywhere(budget_windows, "spent_nanos"),
    "R9 held": doing(update(budget_windows).values(held_nanos=1)),
    "R10": anywhere(periods, "charge_nanos", periods.c.month == MONTH),
    "R13 seal": doing(update(periods).where(periods.c.month == MONTH).values(sha256="0")),
    "R13 rows": doing(
        update(receipts).where(one(receipts, "settled_at", False)).values(reason="x")
    ),
    "R14 output": forged(outputs, request_id="x", body=b"", expires_at=APRIL),
    "R14 delivery": forged(
        webhook_deliveries, request_id="x", account_id=FAR, url="", due_at=APRIL, queued_at=APRIL
    ),
    "R14 payment": forged(
        payments, id="x", account_id=FAR, provider="x", reference="x", amount_nanos=1,
        status="paid", created_at=APRIL, transfer_id=FAR,
    ),
}  # fmt: skip
"""Faults in what is stored beside the rows."""


@pytest.mark.parametrize("fault", STORED)
def test_fault_in_what_is_stored_is_found_at_night(fault: str, proven_march: Month) -> None:
    with tampering(proven_march) as connection:
        STORED[fault](connection, True)

        assert fault.split()[0] in rules(connection, whole=False)


def test_sound_books_have_no_findings(proven_march: Month) -> None:
    with tampering(proven_march) as connection:
        assert rules(connection, whole=False) == set()
        assert rules(connection, whole=True) == set()


def test_night_starts_from_the_proven_month_and_reads_its_rows_in_turn(march: Month) -> None:
    ids = [march.books.account.id, march.other.account.id]
    assert prove_books(march.database, page=PAGE) == []
    with march.database.snapshot() as connection:
        assert {each.month for each in read_carries(connection, ids).values()} == {MONTH}
        read = connection.execute(select(proven_months)).one()
        assert (read.month, read.agrees) == (MONTH, True)

    march.archive()
    assert prove_books(march.database, page=PAGE) == []
    assert prove_books(march.database, whole=True, page=PAGE) == []
    march.restore()
    assert prove_books(march.database, page=PAGE) == []
    assert prove_books(march.database, whole=True, page=PAGE) == []


def test_month_whose_rows_differ_is_read_again_each_night(march: Month) -> None:
    with march.database.transaction() as connection:
        connection.execute(
            insert(proven_months).values(month=MONTH, read_at=datetime.now(UTC), agrees=False)
        )
        connection.execute(insert(periods).values(month="2026-02", state="closed", sha256="0"))

    found = {each.subject for each in prove_books(march.database, page=PAGE)}

    # February was never read; the rows that it does not have are not those of its seal.
    assert "month 2026-02" in found
    with march.database.snapshot() as connection:
        query = select(proven_months.c.month, proven_months.c.agrees)
        assert {row[0]: row[1] for row in connection.execute(query)} == {
            MONTH: True, "2026-02": False
        }  # fmt: skip


def test_booking_of_a_gateway_whose_clock_is_behind_is_proven_with_the_next_month(
    database: Database,
) -> None:
    books = open_books(database, credit=0)
    pay(books, 10**6, MARCH)
    spend(books, APRIL + timedelta(seconds=5), 1)
    spend(books, LATE, 2)
    close_month(database, MONTH, author=AUTHOR, clock=at(APRIL + timedelta(minutes=10)))

    for _ in range(2):
        assert prove_books(database, page=PAGE) == []
        spend(books, APRIL + timedelta(hours=1), 1)
    with database.snapshot() as connection:
        carry = read_carries(connection, [books.account.id])[books.account.id]
    assert (carry.position.posted_nanos, carry.booked_since) == (10**6, LATE)


def test_budget_of_an_organisation_is_proven_of_all_accounts_that_were_members(
    databases: Databases, tmp_path: Path
) -> None:
    url = databases.make()
    database = Database(url)
    first, second, late = (open_books(database, credit=0) for _ in range(3))
    with database.transaction() as connection:
        owner = create_organisation(connection, "group")
        for books in (first, second):
            add_account(connection, owner.id, books.account.id)
        budget = create_organisation_budget(connection, owner.id, 10**9, window="month")
    for books in (first, second, late):
        pay(books, 10**6, MARCH)
    for books in (first, second):
        spend(books, LATE, 2)
    with database.transaction() as connection:
        remove_account(connection, owner.id, second.account.id)
        add_account(connection, owner.id, late.account.id)
        while build_due(connection, APRIL + timedelta(hours=1)):
            pass
        while build_due_days(connection):
            pass
    close_month(database, MONTH, author=AUTHOR, clock=at(APRIL + timedelta(minutes=10)))
    month = Month(first, second, Blobs(f"file://{tmp_path}"), url, [], *[RequestId("")] * 3)
    with database.transaction() as connection:
        connection.execute(outputs.delete())

    assert prove_books(database, page=PAGE) == []
    spend(late, APRIL + timedelta(hours=3), 1)
    spend(first, APRIL + timedelta(hours=4), 1)
    month.archive()
    assert prove_books(database, page=PAGE) == []
    with database.transaction() as connection:
        forget_carry(connection, first.account.id)
    assert prove_books(database, page=PAGE) == []
    assert prove_books(database, page=PAGE) == []
    assert prove_books(database, whole=True, page=PAGE) == []
    with database.transaction() as connection:
        mine = budget_windows.c.budget_id == budget.id
        more = {"spent_nanos": budget_windows.c.spent_nanos + 1}
        assert connection.execute(update(budget_windows).where(mine).values(more)).rowcount
    assert {each.rule for each in prove_books(database, page=PAGE)} == {"R9"}
    database.dispose()


def test_proof_under_traffic_finds_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One machine has one clock.
    monkeypatch.setattr(snapshots, "SKEW", timedelta(0))
    monkeypatch.setattr(snapshots, "RENEWED_S", 0.03)
    books = open_books(database, credit=10**6 * HOLD)
    ended = threading.Event()
    settled: list[Any] = []

    def traffic() -> None:
        while not ended.is_set() and len(settled) < TRAFFIC:
            order, held = books.order(), books.order()
            with database.transaction() as connection:
                hold(connection, [order, held])
            books.settle(done(order.request_id))
            settled.append(order)
            with database.transaction() as connection:
                refund(
                    connection, order.request_id, 1,
                    key=f"refund:{order.request_id}", actor="test", reason="test",
                )  # fmt: skip
            books.settle(done(held.request_id))

    threads = [threading.Thread(target=traffic) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            assert prove_books(database, page=TRAFFIC // 8) == []
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert len(settled) >= TRAFFIC
    assert prove_books(database, whole=True) == []


def test_finding_of_a_race_is_gone_when_the_account_is_proven_again(
    march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = iter([True])
    original = Standing.prove

    def prove(standing: Standing) -> None:
        if next(once, False):
            with march.database.transaction() as connection:
                connection.execute(update(keys).values(spent_nanos=keys.c.spent_nanos + 1))
            with march.database.snapshot() as connection:
                standing._connection = connection
                original(standing)
            with march.database.transaction() as connection:
                connection.execute(update(keys).values(spent_nanos=keys.c.spent_nanos - 1))
        else:
            original(standing)

    monkeypatch.setattr(Standing, "prove", prove)

    assert prove_books(march.database, page=PAGE) == []
    assert next(once, False) is False


async def test_proof_in_a_child_process_finds_the_same(march: Month) -> None:
    with march.database.transaction() as connection:
        connection.execute(update(keys).values(spent_nanos=keys.c.spent_nanos + 1))

    found = await prove_in_child(march.database, whole=True)

    assert found == await prove_here(march.database, True)
    assert [each.rule for each in found] == ["R4", "R4"]


async def test_second_run_at_the_same_time_is_refused(
    march: Month, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciliation, "WAIT_S", 0)
    other = Lease(march.database, "reconciliation", held_s=60)
    assert await other.acquire()

    with pytest.raises(Conflict, match="Another reconciliation is running"):
        await run_reconciliation(march.database)

    await other.release()
    assert (await run_reconciliation(march.database)).findings == ()
