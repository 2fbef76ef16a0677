"""Races behind a barrier; each also runs on a broken variant, to prove that the test can fail.

A race test that passes on code without a lock proves nothing. So every race here is a function of
the raced code, and must fail with plausible but wrong variants of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import pytest
from sqlalchemy import Connection, delete, func, insert, select, text, update

from gateway.ledger.holds import Held, HoldRequest, Replayed, hold
from gateway.ledger.periods import booking_time
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import NotRefundable, refund
from gateway.ledger.settle import Settlement, settle
from gateway.ledger.transfers import add_credit
from gateway.sql.database import Database
from gateway.tables.core import accounts, holds, receipts, refunds
from tests.ledger.books import HOLD, Books, done, open_books

T = TypeVar("T")
Work = Callable[[Connection], T]


def race(database: Database, works: Sequence[Work[T]]) -> list[T | BaseException]:
    """Run transactions concurrently, each in its own thread; return their results."""
    barrier = threading.Barrier(len(works))
    results: list[T | BaseException | None] = [None] * len(works)

    def run(place: int, work: Work[T]) -> None:
        barrier.wait()
        try:
            with database.transaction() as connection:
                results[place] = work(connection)
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place, work)) for place, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results  # type: ignore[return-value]


def agrees(books: Books) -> bool:
    with books.database.transaction() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


def only_postgresql(books: Books) -> None:
    """On SQLite a writer is alone from its first statement on, so these races cannot be lost."""
    if books.database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time")


# --- C1: fifty requests on a balance for ten ---


def overdraw(books: Books, place: Callable[[Connection, HoldRequest], bool]) -> tuple[int, int]:
    """Return how many of 50 were admitted, and the sum of the open holds."""
    orders = [books.order() for _ in range(50)]
    works: list[Work[bool]] = [
        lambda connection, order=order: place(connection, order)  # type: ignore[misc]
        for order in orders
    ]
    results = race(books.database, works)
    admitted = sum(result is True for result in results)
    if place is ours:
        # No constraint error: the ledger decides, and the CHECK is only a safeguard.
        assert {type(result) for result in results} == {bool}
    with books.database.transaction() as connection:
        held = connection.execute(
            select(func.coalesce(func.sum(holds.c.hold_nanos), 0)).where(
                holds.c.account_id == books.account.id
            )
        ).scalar_one()
    return admitted, int(held)


def ours(connection: Connection, order: HoldRequest) -> bool:
    return isinstance(hold(connection, [order])[0], Held)


def read_compare_write(connection: Connection, order: HoldRequest) -> bool:
    row = connection.execute(select(accounts).where(accounts.c.id == order.account_id)).one()
    connection.execute(text("SELECT pg_sleep(0.02)"))
    if row.posted_nanos - row.held_nanos < order.hold_nanos:
        return False
    connection.execute(
        update(accounts)
        .where(accounts.c.id == order.account_id)
        .values(held_nanos=row.held_nanos + order.hold_nanos)
    )
    return insert_hold(connection, order)


def read_compare_add(connection: Connection, order: HoldRequest) -> bool:
    row = connection.execute(select(accounts).where(accounts.c.id == order.account_id)).one()
    connection.execute(text("SELECT pg_sleep(0.02)"))
    if row.posted_nanos - row.held_nanos < order.hold_nanos:
        return False
    connection.execute(
        update(accounts)
        .where(accounts.c.id == order.account_id)
        .values(held_nanos=accounts.c.held_nanos + order.hold_nanos)
    )
    return insert_hold(connection, order)


def sum_and_insert(connection: Connection, order: HoldRequest) -> bool:
    held = connection.execute(
        select(func.coalesce(func.sum(holds.c.hold_nanos), 0)).where(
            holds.c.account_id == order.account_id
        )
    ).scalar_one()
    connection.execute(text("SELECT pg_sleep(0.02)"))
    return held + order.hold_nanos <= 10 * HOLD and insert_hold(connection, order)


def insert_hold(connection: Connection, order: HoldRequest) -> bool:
    connection.execute(
        insert(holds).values(
            request_id=order.request_id, account_id=order.account_id, key_id=order.key_id,
            model=order.model, task=order.task, price_id=order.price_id,
            hold_nanos=order.hold_nanos, job=order.job, accepted_at=order.accepted_at,
            deadline_at=order.deadline_at,
        )
    )  # fmt: skip
    return True


def test_fifty_racing_holds_on_a_balance_for_ten_admit_ten(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)

    assert overdraw(books, ours) == (10, 10 * HOLD)
    assert agrees(books)


@pytest.mark.parametrize("broken", [read_compare_write, read_compare_add, sum_and_insert])
def test_race_is_lost_without_the_lock(
    broken: Callable[[Connection, HoldRequest], bool], database: Database
) -> None:
    books = open_books(database, credit=10 * HOLD)
    only_postgresql(books)
    with database.transaction() as connection:
        # The table's CHECK would stop two of them, as it is meant to.
        connection.execute(text("ALTER TABLE accounts DROP CONSTRAINT ck_accounts_covered"))

    admitted, held = overdraw(books, broken)

    assert admitted > 10
    assert held > 10 * HOLD


# --- C2: one hold, settled, released and expired concurrently ---


def end_at_once(books: Books, take: Callable[[Connection, Settlement], bool]) -> int:
    """Return how many of several ends of one request succeeded."""
    order = books.order()
    with books.database.transaction() as connection:
        hold(connection, [order])
    ends = [
        done(order.request_id),
        Settlement(order.request_id, "expired", "deadline", billable=False),
        Settlement(order.request_id, "cancelled", "client", billable=False),
        done(order.request_id, output_tokens=9),
    ]
    works: list[Work[bool]] = [
        lambda connection, end=end: take(connection, end)  # type: ignore[misc]
        for end in ends
    ]
    return sum(result is True for result in race(books.database, works))


def test_exactly_one_of_several_racing_ends_settles(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)

    def take(connection: Connection, end: Settlement) -> bool:
        (closed,) = settle(
            connection,
            [end],
            now=booking_time(connection),
            prices={},
            retention=timedelta(hours=1),
        )
        return closed is not None

    for _ in range(10):
        assert end_at_once(books, take) == 1
    assert agrees(books)


def test_race_is_lost_if_the_hold_is_read_before_it_is_deleted(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    only_postgresql(books)

    def take(connection: Connection, end: Settlement) -> bool:
        mine = holds.c.request_id == end.request_id
        there = connection.execute(select(holds.c.request_id).where(mine)).first()
        connection.execute(text("SELECT pg_sleep(0.2)"))
        connection.execute(delete(holds).where(mine))
        return there is not None

    assert end_at_once(books, take) > 1


# --- C3: one charge refunded twice concurrently ---


def refund_at_once(books: Books, give: Callable[[Connection, str, int], bool]) -> int:
    order = books.order()
    with books.database.transaction() as connection:
        hold(connection, [order])
    books.settle(done(order.request_id))
    works: list[Work[bool]] = [
        lambda connection, place=place: give(connection, order.request_id, place)  # type: ignore[misc]
        for place in range(6)
    ]
    results = race(books.database, works)
    # No constraint error: the second refund is refused with what is left.
    assert {type(result) for result in results} == {bool}
    return sum(result is True for result in results)


def test_charge_is_refunded_once(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)

    def give(connection: Connection, request_id: str, place: int) -> bool:
        try:
            refund(connection, request_id, key=f"{request_id}:{place}", actor="t", reason="t")
        except NotRefundable:
            return False
        return True

    assert refund_at_once(books, give) == 1
    assert agrees(books)


def test_race_is_lost_without_the_lock_of_the_account(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    only_postgresql(books)

    def give(connection: Connection, request_id: str, place: int) -> bool:
        charged = connection.execute(
            select(receipts.c.charge_nanos).where(receipts.c.request_id == request_id)
        ).scalar_one()
        given = connection.execute(
            select(func.coalesce(func.sum(refunds.c.amount_nanos), 0)).where(
                refunds.c.request_id == request_id
            )
        ).scalar_one()
        connection.execute(text("SELECT pg_sleep(0.02)"))
        return bool(given < charged)

    assert refund_at_once(books, give) > 1


# --- C5, C6, C7 ---


def test_credit_added_during_a_race_is_used(database: Database) -> None:
    books = open_books(database, credit=0)

    def top_up(connection: Connection) -> bool:
        add_credit(
            connection, books.account.id, 3 * HOLD, kind="topup", key="late", actor="t", reason="t"
        )
        return False

    works: list[Work[bool]] = [top_up]
    works += [
        lambda connection, order=order: ours(connection, order)  # type: ignore[misc]
        for order in [books.order() for _ in range(12)]
    ]
    results = race(books.database, works)

    assert not any(isinstance(result, BaseException) for result in results)
    assert sum(result is True for result in results) <= 3
    assert isinstance(place_one(books), Held) or books.balance().held_nanos == 3 * HOLD
    assert agrees(books)


def place_one(books: Books) -> object:
    with books.database.transaction() as connection:
        return hold(connection, [books.order()])[0]


def test_batches_with_accounts_in_opposite_order_do_not_deadlock(
    database: Database,
) -> None:
    one, other = open_books(database, credit=10**9), open_books(database, credit=10**9)
    rounds = 1000 if database.engine.dialect.name == "postgresql" else 100
    failures: list[BaseException] = []

    def run(first: Books, second: Books) -> None:
        try:
            for _ in range(rounds // 4):
                orders = [first.order(), second.order()]
                with database.transaction() as connection:
                    hold(connection, orders)
                with database.transaction() as connection:
                    settle(
                        connection,
                        [done(order.request_id) for order in orders],
                        now=booking_time(connection),
                        prices={},
                        retention=timedelta(0),
                    )
        except BaseException as error:
            failures.append(error)

    pairs = ((one, other), (other, one), (one, other), (other, one))
    threads = [threading.Thread(target=run, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert agrees(one)


def test_two_hundred_repeats_of_one_idempotency_key_make_one_request(database: Database) -> None:
    books = open_books(database, credit=1000 * HOLD)
    orders = [books.order(idempotency_key="k", body_sha256=b"x" * 32) for _ in range(200)]
    answers: list[object] = []
    for chunk in range(0, 200, 20):
        works: list[Work[object]] = [
            lambda connection, order=order: hold(connection, [order])[0]  # type: ignore[misc]
            for order in orders[chunk : chunk + 20]
        ]
        answers += race(books.database, works)

    assert {type(answer) for answer in answers} == {Held, Replayed}
    assert len({answer.request_id for answer in answers}) == 1  # type: ignore[attr-defined]
    assert books.open_holds() == 1
    assert agrees(books)
