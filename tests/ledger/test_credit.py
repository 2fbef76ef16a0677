"""Credit: the order in which lots are consumed, expiry, allowances, refunds, chargebacks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from gateway.accounts.accounts import change_account
from gateway.ledger.expiry import expire_lots, give_allowances
from gateway.ledger.holds import AccountSuspended, hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import NotRefundable, refund, refunds_of
from gateway.ledger.transfers import TransferConflict, add_credit, chargeback, owed
from gateway.sql.database import Database
from gateway.tables.core import lots
from tests.ledger.books import HOLD, Books, done, open_books


def credit(books: Books, amount: int, kind: str = "topup", key: str = "", **more: object) -> None:
    with books.database.transaction() as connection:
        add_credit(
            connection,
            books.account.id,
            amount,
            kind=kind,  # type: ignore[arg-type]
            key=key or f"{kind}:{amount}",
            actor="test",
            reason="test",
            **more,  # type: ignore[arg-type]
        )


def run(books: Books, **usage: int) -> str:
    order = books.order()
    with books.database.transaction() as connection:
        hold(connection, [order])
    books.settle(done(order.request_id, **usage))
    return order.request_id


def remaining(books: Books) -> list[tuple[str, int]]:
    with books.database.transaction() as connection:
        rows = connection.execute(
            select(lots.c.kind, lots.c.remaining_nanos)
            .where(lots.c.account_id == books.account.id)
            .order_by(lots.c.id)
        )
        return [(row.kind, row.remaining_nanos) for row in rows]


def agree(books: Books) -> bool:
    with books.database.transaction() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


def test_granted_credit_is_consumed_before_paid_and_by_expiry(database: Database) -> None:
    books = open_books(database, credit=5 * HOLD)
    soon, late = (datetime.now(UTC) + timedelta(days=days) for days in (1, 9))
    credit(books, 300, "grant", "a", expires_at=late)
    credit(books, 300, "grant", "b", expires_at=soon)
    credit(books, 100, "grant", "c", priority=1)

    run(books)

    assert remaining(books) == [("paid", 5 * HOLD), ("promo", 200), ("promo", 0), ("promo", 0)]
    assert agree(books)


def test_debt_reduces_new_credit(database: Database) -> None:
    books = open_books(database, credit=0)
    with database.transaction() as connection:
        change_account(connection, books.account.id, credit_limit_nanos=2 * HOLD)
    run(books)

    credit(books, 800)

    assert remaining(books) == [("paid", 300)]
    assert books.balance().posted_nanos == 300
    assert agree(books)


def test_expiry_leaves_held_credit_until_it_is_released(database: Database) -> None:
    books = open_books(database, credit=0)
    now = datetime.now(UTC)
    credit(books, HOLD + 200, "grant", expires_at=now + timedelta(hours=1))
    order = books.order()
    with database.transaction() as connection:
        hold(connection, [order])

    with database.transaction() as connection:
        assert expire_lots(connection, now + timedelta(hours=2)) == 0
    assert remaining(books) == [("promo", HOLD)]
    books.settle(done(order.request_id))
    with database.transaction() as connection:
        assert expire_lots(connection, now + timedelta(hours=2)) == 1
        assert expire_lots(connection, now + timedelta(hours=2)) == 0

    assert remaining(books) == [("promo", 0)]
    assert books.balance().posted_nanos == 0
    assert agree(books)


def test_allowance_is_given_monthly_and_expires_with_the_month(database: Database) -> None:
    books = open_books(database, credit=0)
    with database.transaction() as connection:
        change_account(connection, books.account.id, allowance_nanos=700)
    now = datetime.now(UTC)

    with database.transaction() as connection:
        assert give_allowances(connection, now) == 1
        assert give_allowances(connection, now) == 0

    assert remaining(books) == [("free", 700)]
    with database.transaction() as connection:
        assert expire_lots(connection, now + timedelta(days=32)) == 1
    assert books.balance().posted_nanos == 0
    assert agree(books)


def test_refunds_never_exceed_the_charge(database: Database) -> None:
    books = open_books(database, credit=5 * HOLD)
    request_id = run(books)
    with database.transaction() as connection:
        refund(connection, request_id, 200, key="a", actor="test", reason="late")
        refund(connection, request_id, 200, key="a", actor="test", reason="late")
        with pytest.raises(NotRefundable, match=r"\$0\.0000003 can be refunded"):
            refund(connection, request_id, 301, key="b", actor="test", reason="test")
        with pytest.raises(TransferConflict):
            refund(connection, request_id, 100, key="a", actor="test", reason="test")
        rest = refund(connection, request_id, key="c", actor="test", reason="rest")
        with pytest.raises(NotRefundable):
            refund(connection, request_id, key="d", actor="test", reason="test")

    assert rest.amount_nanos == 300
    with database.transaction() as connection:
        assert [each.amount_nanos for each in refunds_of(connection, request_id)] == [200, 300]  # type: ignore[arg-type]
    assert books.balance().posted_nanos == 5 * HOLD
    assert agree(books)


async def test_of_two_concurrent_refunds_one_succeeds(database: Database) -> None:
    books = open_books(database, credit=5 * HOLD)
    request_id = run(books)

    async def try_refund(key: str) -> bool:
        try:
            await database.write(
                lambda connection: refund(connection, request_id, key=key, actor="t", reason="t")
            )
        except NotRefundable:
            return False
        return True

    won = await asyncio.gather(*(try_refund(f"r{number}") for number in range(10)))

    assert sum(won) == 1
    assert agree(books)


def test_chargeback_beyond_the_balance_becomes_debt(database: Database) -> None:
    books = open_books(database, credit=HOLD)
    run(books)

    with database.transaction() as connection:
        for _ in range(2):
            chargeback(connection, books.account.id, HOLD, key="cb", actor="bank", reason="stolen")

    balance = books.balance()
    assert (balance.posted_nanos, balance.status) == (0, "suspended")
    with database.transaction() as connection:
        assert owed(connection, books.account.id) == 500
        assert isinstance(hold(connection, [books.order()])[0], AccountSuspended)
    credit(books, 800)
    with database.transaction() as connection:
        assert owed(connection, books.account.id) == 0
    assert books.balance().posted_nanos == 300
    assert agree(books)


def test_chargeback_does_not_touch_held_credit(database: Database) -> None:
    books = open_books(database, credit=3 * HOLD)
    order = books.order()
    with database.transaction() as connection:
        hold(connection, [order])
        chargeback(connection, books.account.id, 3 * HOLD, key="cb", actor="bank", reason="test")

    assert books.balance().posted_nanos == HOLD
    books.settle(done(order.request_id))
    assert agree(books)


def test_a_credit_limit_cannot_go_below_what_is_used_of_it(database: Database) -> None:
    books = open_books(database, credit=0)
    with database.transaction() as connection:
        change_account(connection, books.account.id, credit_limit_nanos=2 * HOLD)
        hold(connection, [books.order()])
        with pytest.raises(ValueError, match="is in use"):
            change_account(connection, books.account.id, credit_limit_nanos=HOLD - 1)
        changed = change_account(connection, books.account.id, credit_limit_nanos=HOLD)

    assert changed.available_nanos == 0
