"""Budgets: refusals, windows, and that races do not exceed them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from gateway.accounts.budgets import (
    budget_states,
    change_budget,
    create_budget,
    end_budget,
    list_budgets,
    read_windows,
    window_end,
    window_start,
)
from gateway.accounts.keys import create_key
from gateway.ledger.bounds import BudgetExceeded
from gateway.ledger.concurrency import TooManyConcurrent
from gateway.ledger.holds import Held, HoldAnswer, HoldRequest, hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.refunds import refund
from gateway.sql.database import Database
from gateway.tables.core import accounts, rate_limits
from tests.ledger.books import HOLD, PEPPER, Books, done, open_books


def held(books: Books, *requests: HoldRequest) -> list[HoldAnswer]:
    with books.database.transaction() as connection:
        return hold(connection, requests)


def agree(books: Books) -> bool:
    with books.database.transaction() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


def test_hard_budget_refuses_requests_that_could_exceed_it(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, 2 * HOLD + 1, window="day")

    answers = held(books, *(books.order() for _ in range(3)))

    assert [type(answer) for answer in answers] == [Held, Held, BudgetExceeded]
    refused = answers[2]
    assert isinstance(refused, BudgetExceeded)
    assert (refused.budget.id, refused.remaining_nanos, refused.in_use) == (budget.id, 1, True)
    assert agree(books)


def test_refused_request_creates_no_budget_window(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, HOLD - 1, window="total", model="m")

    answers = held(books, books.order(), books.order(model="another"))

    assert [type(answer) for answer in answers] == [BudgetExceeded, Held]
    with database.transaction() as connection:
        assert read_windows(connection, [(budget.id, 0)]) == {}
    assert agree(books)


def test_charges_count_against_a_budget_and_releases_do_not(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, 2 * HOLD, window="month")
    first, second = books.order(), books.order()
    held(books, first, second)
    books.settle(done(first.request_id), done(second.request_id, input_tokens=10, output_tokens=10))

    with database.transaction() as connection:
        (state,) = budget_states(connection, [budget], datetime.now(UTC))

    assert (state.spent_nanos, state.held_nanos) == (500 + HOLD, 0)
    assert isinstance(held(books, books.order())[0], BudgetExceeded)
    assert isinstance(held(books, books.order(hold_nanos=500))[0], Held)
    assert agree(books)


def test_refund_frees_room_in_the_budget(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD, spend_limit=HOLD)
    with database.transaction() as connection:
        create_budget(connection, books.account.id, HOLD, window="total")
    order = books.order()
    held(books, order)
    books.settle(done(order.request_id, input_tokens=10, output_tokens=10))
    assert not isinstance(held(books, books.order())[0], Held)

    with database.transaction() as connection:
        refund(connection, order.request_id, key="r", actor="test", reason="test")

    assert isinstance(held(books, books.order())[0], Held)
    assert agree(books)


def test_soft_budget_accepts_and_reports(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, HOLD, window="hour", hard=False)

    answers = held(books, books.order(), books.order())

    assert [answer.soft_budgets_exceeded for answer in answers if isinstance(answer, Held)] == [
        (),
        (budget,),
    ]
    assert agree(books)


def test_budgets_of_a_key_and_of_a_model_count_only_theirs(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        _, other = create_key(connection, books.account.id, pepper=PEPPER)
        create_budget(connection, books.account.id, HOLD, window="day", key_id=books.key.id)
        create_budget(connection, books.account.id, HOLD, window="day", model="another")

    answers = held(books, books.order(), books.order(), books.order(key_id=other.id))

    assert [type(answer) for answer in answers] == [Held, BudgetExceeded, Held]


def test_a_lowered_budget_keeps_what_was_accepted_and_refuses_more(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, 3 * HOLD, window="day")
    order = books.order()
    held(books, order, books.order())
    with database.transaction() as connection:
        change_budget(connection, budget.id, limit_nanos=HOLD)

    assert isinstance(held(books, books.order(hold_nanos=1))[0], BudgetExceeded)
    books.settle(done(order.request_id))
    assert agree(books)


def test_an_ended_budget_refuses_nothing(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        budget = create_budget(connection, books.account.id, 0, window="day")
    order = books.order()
    assert isinstance(held(books, order)[0], BudgetExceeded)
    with database.transaction() as connection:
        end_budget(connection, budget.id)
        assert list_budgets(connection, books.account.id) == []

    assert isinstance(held(books, order)[0], Held)


def test_concurrency_limit_is_exact(database: Database) -> None:
    books = open_books(database, credit=100 * HOLD)
    with database.transaction() as connection:
        connection.execute(
            rate_limits.insert().values(
                account_id=books.account.id, key_id=0, model="m", concurrent_max=2
            )
        )
        connection.execute(
            accounts.update().where(accounts.c.id == books.account.id).values(bounded=True)
        )
    orders = [books.order() for _ in range(3)]

    assert held(books, *orders)[2] == TooManyConcurrent("model", 2)
    books.settle(done(orders[0].request_id))
    assert isinstance(held(books, orders[2])[0], Held)


async def test_concurrent_holds_do_not_exceed_a_hard_budget(database: Database) -> None:
    books = open_books(database, credit=1000 * HOLD)
    with database.transaction() as connection:
        create_budget(connection, books.account.id, 10 * HOLD + HOLD // 2, window="day")

    answers = await asyncio.gather(
        *(database.write(lambda connection: hold(connection, [books.order()])) for _ in range(50))
    )

    assert sum(isinstance(answer[0], Held) for answer in answers) == 10
    assert agree(books)


@pytest.mark.parametrize(
    ("window", "tz", "moment", "starts", "ends"),
    [
        ("hour", "UTC", "2026-03-01T10:59:59", "2026-03-01T10:00", "2026-03-01T11:00"),
        ("hour", "Asia/Kolkata", "2026-03-01T10:29:59", "2026-03-01T09:30", "2026-03-01T10:30"),
        ("day", "Asia/Kathmandu", "2026-03-01T18:15:00", "2026-03-01T18:15", "2026-03-02T18:15"),
        # A day of 23 hours, and one of 25.
        ("day", "Europe/Berlin", "2026-03-29T12:00:00", "2026-03-28T23:00", "2026-03-29T22:00"),
        ("day", "Europe/Berlin", "2026-10-25T12:00:00", "2026-10-24T22:00", "2026-10-25T23:00"),
        # The hour that is repeated in autumn is two windows.
        ("hour", "Europe/Berlin", "2026-10-25T00:30:00", "2026-10-25T00:00", "2026-10-25T01:00"),
        ("hour", "Europe/Berlin", "2026-10-25T01:30:00", "2026-10-25T01:00", "2026-10-25T02:00"),
        ("month", "America/New_York", "2026-03-01T03:00", "2026-02-01T05:00", "2026-03-01T05:00"),
    ],
)
def test_windows_follow_their_time_zone(
    window: str, tz: str, moment: str, starts: str, ends: str
) -> None:
    at = datetime.fromisoformat(moment).replace(tzinfo=UTC)

    assert window_start(window, tz, at) == datetime.fromisoformat(starts).replace(tzinfo=UTC)
    assert window_end(window, tz, at) == datetime.fromisoformat(ends).replace(tzinfo=UTC)


@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu"])
@pytest.mark.parametrize("window", ["hour", "day", "month"])
def test_windows_follow_one_another_without_gap(window: str, tz: str) -> None:
    at = datetime(2026, 3, 20, 7, 1, tzinfo=UTC)
    while at < datetime(2026, 4, 12, tzinfo=UTC):
        end = window_end(window, tz, at)

        assert end is not None
        assert window_start(window, tz, at) <= at < end
        assert window_start(window, tz, end) == end
        at += timedelta(minutes=31)
