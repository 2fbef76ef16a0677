"""Holding and settling: exact, once, and never beyond an account's credit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from gateway.accounts.keys import revoke_key
from gateway.ledger.closed import RequestError
from gateway.ledger.holds import (
    AccountSuspended,
    CreditInUse,
    Held,
    HoldAnswer,
    HoldRequest,
    IdempotencyConflict,
    InsufficientCredit,
    KeyExpired,
    KeyRevoked,
    KeySpendLimit,
    Replayed,
    hold,
)
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Settlement
from gateway.sql.database import Database, open_engine
from gateway.tables.core import accounts, holds, keys, receipts, transfers
from tests.ledger.books import HOLD, Books, done, open_books

THREADS = 50
AFFORDABLE = 10


def place(books: Books, *orders: HoldRequest) -> list[HoldAnswer]:
    with books.database.transaction() as connection:
        return hold(connection, orders)


def race(
    books: Books,
    attempt: Callable[[Connection, HoldRequest], bool],
    *,
    engine: Engine | None = None,
) -> int:
    """Run an attempt in many threads, each in its own transaction; return how many are accepted."""
    barrier = threading.Barrier(THREADS)
    accepted: list[bool] = []

    def run() -> None:
        order = books.order()
        barrier.wait()
        try:
            with (engine or books.database.engine).begin() as connection:
                accepted.append(attempt(connection, order))
        except (IntegrityError, DBAPIError):
            accepted.append(False)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(accepted)


def test_fifty_racing_holds_on_a_balance_for_ten_admit_exactly_ten(database: Database) -> None:
    books = open_books(database, credit=AFFORDABLE * HOLD)

    admitted = race(books, lambda c, order: isinstance(hold(c, [order])[0], Held))

    assert admitted == AFFORDABLE
    assert books.open_holds() == AFFORDABLE
    assert books.balance().available_nanos == 0


def test_the_race_is_lost_without_the_lock(database_url: str) -> None:
    """The same race on the naive code: read, compare, write.

    Without the lock, all threads see the same balance on PostgreSQL, and too many are admitted. On
    SQLite, whose lock is taken at the begin of a transaction, all but the first fail. Both fail the
    test above.
    """
    with_lock = Database(database_url)
    books = open_books(with_lock, credit=AFFORDABLE * HOLD)
    with_lock.dispose()
    wide = open_engine(database_url, pool_size=THREADS)
    seen = threading.Barrier(THREADS)

    def careless(connection: Connection, order: HoldRequest) -> bool:
        row = connection.execute(
            select(accounts.c.posted_nanos, accounts.c.held_nanos).where(
                accounts.c.id == order.account_id
            )
        ).one()
        seen.wait(timeout=30)
        if row.posted_nanos - row.held_nanos < order.hold_nanos:
            return False
        connection.execute(
            update(accounts)
            .where(accounts.c.id == order.account_id)
            .values(held_nanos=row.held_nanos + order.hold_nanos)
        )
        return True

    admitted = race(books, careless, engine=wide.execution_options(reads=True))
    wide.dispose()

    assert admitted != AFFORDABLE


def test_check_constraint_stops_what_the_code_would_accept(database: Database) -> None:
    books = open_books(database, credit=HOLD)

    with pytest.raises(IntegrityError), database.transaction() as connection:
        connection.execute(
            update(accounts).where(accounts.c.id == books.account.id).values(held_nanos=HOLD + 1)
        )


def test_one_batch_stops_at_the_balance_too(database: Database) -> None:
    books = open_books(database, credit=3 * HOLD)

    answers = place(books, *(books.order() for _ in range(5)))

    assert [isinstance(answer, Held) for answer in answers] == [True] * 3 + [False] * 2
    assert isinstance(answers[3], CreditInUse)


def test_refusals_have_the_missing_amount(database: Database) -> None:
    books = open_books(database, credit=HOLD)

    assert place(books, books.order(hold_nanos=HOLD + 1)) == [InsufficientCredit(HOLD)]
    place(books, books.order())
    assert place(books, books.order()) == [CreditInUse(0)]


def test_holding_twice_for_one_request_holds_once(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()

    assert place(books, order, order) == [Held(order.request_id)] * 2
    assert place(books, order) == [Held(order.request_id)]

    assert books.balance().held_nanos == HOLD


def test_idempotency_key_is_accepted_once(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    first = books.order(idempotency_key="k", body_sha256=b"1" * 32)
    again = books.order(idempotency_key="k", body_sha256=b"1" * 32)
    other = books.order(idempotency_key="k", body_sha256=b"2" * 32)

    assert place(books, first, again) == [Held(first.request_id), Replayed(first.request_id)]
    assert place(books, again, other) == [Replayed(first.request_id), IdempotencyConflict()]

    assert books.open_holds() == 1


def test_a_revoked_or_expired_key_holds_nothing(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    now = datetime.now(UTC)
    with database.transaction() as connection:
        connection.execute(
            update(keys).where(keys.c.id == books.key.id).values(expires_at=now - timedelta(1))
        )
    assert place(books, books.order()) == [KeyExpired()]

    with database.transaction() as connection:
        revoke_key(connection, str(books.key.id))
    assert place(books, books.order()) == [KeyRevoked()]


def test_a_suspended_account_holds_nothing(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    with database.transaction() as connection:
        connection.execute(
            update(accounts).where(accounts.c.id == books.account.id).values(status="suspended")
        )

    assert place(books, books.order()) == [AccountSuspended()]


def test_a_key_spends_no_more_than_its_limit(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD, spend_limit=2 * HOLD)
    orders = [books.order() for _ in range(3)]

    answers = place(books, *orders)

    assert answers[2] == KeySpendLimit(0)
    books.settle(done(orders[0].request_id, input_tokens=10, output_tokens=10))
    assert place(books, books.order()) == [KeySpendLimit(0)]


def test_settling_charges_what_was_used_and_frees_the_rest(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()
    place(books, order)

    [settled] = books.settle(done(order.request_id, input_tokens=3, output_tokens=2))

    assert settled is not None
    assert settled.closed.cost_nanos == 3 * 20 + 2 * 80
    balance = books.balance()
    assert (balance.posted_nanos, balance.held_nanos) == (10 * HOLD - 220, 0)
    assert books.open_holds() == 0


def test_settling_twice_charges_once(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()
    place(books, order)
    settlement = done(order.request_id)

    first = books.settle(settlement, settlement)
    second = books.settle(settlement)

    assert first[0] is not None
    assert first[1] is None
    assert second == [None]
    assert books.balance().posted_nanos == 10 * HOLD - 500


def test_concurrent_settlers_charge_once(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()
    place(books, order)
    barrier = threading.Barrier(8)
    answers: list[object] = []

    def run() -> None:
        barrier.wait()
        answers.extend(books.settle(done(order.request_id)))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len([answer for answer in answers if answer is not None]) == 1
    assert books.balance().posted_nanos == 10 * HOLD - 500


def test_a_request_that_failed_is_released_and_costs_nothing(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()
    place(books, order)

    [settled] = books.settle(
        Settlement(
            order.request_id,
            "failed",
            "engine_error",
            billable=False,
            error=RequestError("engine_error", "broken"),
        )
    )

    assert settled is not None
    assert (settled.closed.outcome, settled.closed.cost_nanos) == ("released", 0)
    assert books.balance().available_nanos == 10 * HOLD


def test_usage_above_its_limits_is_charged_at_the_limit(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()
    place(books, order)

    [settled] = books.settle(done(order.request_id, input_tokens=5, output_tokens=10_000))

    assert settled is not None
    assert settled.clipped
    assert settled.closed.cost_nanos == 5 * 20 + 10 * 80


@pytest.mark.parametrize("table", ["receipts", "transfers", "prices", "price_periods"])
def test_booked_rows_cannot_be_changed(table: str, database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order()
    place(books, order)
    books.settle(done(order.request_id))

    for statement in (f"UPDATE {table} SET model = 'x'", f"DELETE FROM {table}"):
        statement = (
            statement.replace("SET model", "SET reason") if table == "transfers" else statement
        )
        with pytest.raises(DBAPIError, match="append-only"), database.transaction() as connection:
            connection.exec_driver_sql(statement)


def test_books_agree_after_many_operations(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    orders: Sequence[HoldRequest] = [books.order() for _ in range(20)]
    place(books, *orders)
    for number, order in enumerate(orders[:15]):
        billable = number % 3 > 0
        settlement = done(order.request_id, input_tokens=number % 11, output_tokens=1)
        if not billable:
            settlement = Settlement(order.request_id, "cancelled", "client", billable=False)
        books.settle(settlement)

    with database.transaction() as connection:
        assert reconcile(connection, now=datetime.now(UTC)) == []


@pytest.mark.parametrize("rule", ["R2", "R3", "R4", "R5", "R6", "R7"])
def test_reconciliation_finds_what_was_tampered_with(rule: str, database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    first, second = books.order(), books.order()
    place(books, first, second)
    books.settle(done(first.request_id))
    later = datetime.now(UTC) + timedelta(hours=1)

    with database.transaction() as connection:
        if rule == "R2":
            connection.execute(update(accounts).values(posted_nanos=accounts.c.posted_nanos + 1))
        elif rule == "R3":
            connection.execute(update(keys).values(held_nanos=keys.c.held_nanos + 1))
        elif rule == "R4":
            connection.execute(update(keys).values(spent_nanos=keys.c.spent_nanos + 1))
        elif rule == "R5":
            row = connection.execute(select(holds)).mappings().one()
            connection.execute(insert(holds).values({**row, "request_id": first.request_id}))
        elif rule == "R7":
            _forge_receipt(connection, first.request_id)
        found = {finding.rule for finding in reconcile(connection, now=later)}
        connection.rollback()

    assert rule in found


def _forge_receipt(connection: Connection, request_id: str) -> None:
    row = dict(
        connection.execute(select(receipts).where(receipts.c.request_id == request_id))
        .mappings()
        .one()
    )
    made = connection.execute(select(transfers.c.id).where(transfers.c.kind == "charge")).scalar()
    row |= {"request_id": "req_" + "0" * 32, "charge_nanos": 1, "transfer_id": made}
    connection.execute(insert(receipts).values(row))
