"""Limits on concurrent requests: exact under races; configured limits replace defaults."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, delete, select, update

from gateway.accounts.keys import create_key
from gateway.accounts.limits import Limit, remove_limit, set_limit
from gateway.ledger.concurrency import Defaults, TooManyConcurrent
from gateway.ledger.discounts import put_discount_in_force
from gateway.ledger.extend import Extension, extend
from gateway.ledger.holds import CreditInUse, Held, HoldAnswer, HoldRequest, hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Settlement
from gateway.scheduled import recount_tasks
from gateway.sql.database import Database
from gateway.tables.core import accounts, holds, idempotency, keys
from tests.ledger.books import HOLD, PEPPER, Books, done, open_books
from tests.ledger.test_discounts import LONG_AGO, batch_order
from tests.ledger.test_races import race

BOUNDS = Defaults(account=3, key=2)


@pytest.fixture
def books(database: Database) -> Books:
    return open_books(database, credit=100 * HOLD)


def place(books: Books, *orders: HoldRequest, bounds: Defaults = BOUNDS) -> list[HoldAnswer]:
    with books.database.transaction() as connection:
        return hold(connection, orders, concurrent=bounds)


def admitted(books: Books, count: int, *, bounds: Defaults = BOUNDS, **changes: object) -> int:
    answers = place(books, *(books.order(**changes) for _ in range(count)), bounds=bounds)
    return sum(isinstance(answer, Held) for answer in answers)


def other_key(books: Books) -> int:
    with books.database.transaction() as connection:
        return create_key(connection, books.account.id, pepper=PEPPER)[1].id


def counted(books: Books) -> tuple[int, dict[int, int]]:
    """Return the open requests counted in the rows of the account and its keys."""
    with books.database.transaction() as connection:
        own = select(keys.c.id, keys.c.open_requests).where(keys.c.account_id == books.account.id)
        account = select(accounts.c.open_requests).where(accounts.c.id == books.account.id)
        found = {row.id: row.open_requests for row in connection.execute(own)}
        return connection.execute(account).scalar_one(), found


def agrees(books: Books) -> bool:
    with books.database.snapshot() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


def test_defaults_bound_a_key_and_its_account(books: Books) -> None:
    second = other_key(books)

    of_one = place(books, *(books.order() for _ in range(3)))
    of_other = place(books, *(books.order(key_id=second) for _ in range(2)))

    assert of_one[2] == TooManyConcurrent("key", 2)
    assert isinstance(of_other[0], Held)
    assert of_other[1] == TooManyConcurrent("account", 3)
    assert counted(books) == (3, {books.key.id: 2, second: 1})
    assert books.balance().held_nanos == 3 * HOLD


def test_concurrency_of_one_account_does_not_limit_another(
    books: Books, database: Database
) -> None:
    other = open_books(database, credit=10 * HOLD)
    admitted(books, 2)

    assert isinstance(place(other, other.order())[0], Held)


def test_every_end_of_a_request_frees_its_slot(books: Books) -> None:
    first, second = books.order(), books.order()
    place(books, first, second)
    assert admitted(books, 1) == 0

    books.settle(
        done(first.request_id),
        Settlement(second.request_id, "cancelled", "client", billable=False),
        done(first.request_id),
    )

    assert counted(books) == (0, {books.key.id: 0})
    assert admitted(books, 3) == 2
    assert agrees(books)


@pytest.mark.parametrize("bounds", [Defaults(), Defaults(account=0, key=9), Defaults(9, 0)])
def test_zero_is_unlimited(bounds: Defaults, books: Books) -> None:
    assert admitted(books, 8, bounds=bounds) == 8


@pytest.mark.parametrize("limit", [1, 5])
def test_limit_of_an_account_replaces_both_defaults(limit: int, books: Books) -> None:
    with books.database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, concurrent_max=limit))

    assert admitted(books, 7) == limit
    assert place(books, books.order()) == [TooManyConcurrent("account", limit)]


@pytest.mark.parametrize("limit", [1, 3])
def test_limit_of_a_key_replaces_the_default_of_keys_alone(limit: int, books: Books) -> None:
    with books.database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, books.key.id, concurrent_max=limit))

    assert admitted(books, 7) == limit
    assert admitted(books, 7, key_id=other_key(books)) == min(3 - limit, 2)


def test_default_is_in_force_again_when_the_limit_is_removed(books: Books) -> None:
    with books.database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, concurrent_max=1))
    assert admitted(books, 3) == 1

    with books.database.transaction() as connection:
        remove_limit(connection, books.account.id)

    assert admitted(books, 3) == 1
    assert counted(books)[0] == 2


def test_limit_for_a_model_applies_beside_the_defaults(books: Books) -> None:
    with books.database.transaction() as connection:
        set_limit(connection, Limit(books.account.id, None, "m", concurrent_max=1))

    assert place(books, books.order(), books.order())[1] == TooManyConcurrent("model", 1)
    assert admitted(books, 3, model="n") == 1
    assert counted(books)[0] == 2


def test_batch_lines_are_not_counted(books: Books) -> None:
    with books.database.transaction() as connection:
        put_discount_in_force(connection, "m", "0.5", LONG_AGO)
    line = batch_order(books)
    assert isinstance(place(books, line)[0], Held)
    assert admitted(books, 3) == 2
    assert admitted(books, 5, service_class="batch") == 5

    books.settle(done(line.request_id))

    assert counted(books) == (2, {books.key.id: 2})
    assert agrees(books)


def test_refused_request_is_not_counted_and_frees_its_key(books: Books) -> None:
    first = books.order()
    place(books, first, books.order())
    named = {"idempotency_key": "name", "body_sha256": b"x" * 32}

    assert place(books, books.order(**named)) == [TooManyConcurrent("key", 2)]

    with books.database.transaction() as connection:
        assert connection.execute(select(idempotency)).all() == []
    assert books.balance().held_nanos == 2 * HOLD
    books.settle(done(first.request_id))
    assert isinstance(place(books, books.order(**named))[0], Held)


def test_hold_repeated_after_an_unknown_commit_is_counted_once(books: Books) -> None:
    order = books.order()
    place(books, order)

    assert place(books, order) == [Held(order.request_id)]
    assert counted(books) == (1, {books.key.id: 1})


def test_request_without_credit_is_not_counted(books: Books) -> None:
    answers = place(books, books.order(hold_nanos=99 * HOLD), books.order(hold_nanos=2 * HOLD))

    assert isinstance(answers[1], CreditInUse)
    assert counted(books) == (1, {books.key.id: 1})


def test_free_requests_are_counted_too(books: Books) -> None:
    orders = [books.order(hold_nanos=0) for _ in range(2)]
    place(books, *orders)

    assert counted(books) == (2, {books.key.id: 2})
    books.settle(
        *(Settlement(order.request_id, "cancelled", "client", billable=False) for order in orders)
    )
    assert counted(books) == (0, {books.key.id: 0})


def test_extension_of_a_hold_opens_no_request(books: Books) -> None:
    order = books.order(held_tokens=1)
    place(books, order)

    with books.database.transaction() as connection:
        extend(connection, [Extension(order.request_id, 2 * HOLD, 5)])

    assert counted(books) == (1, {books.key.id: 1})


def test_fifty_racing_requests_with_room_for_ten_admit_ten(books: Books) -> None:
    bounds = Defaults(account=20, key=10)

    def ours(connection: Connection) -> HoldAnswer:
        return hold(connection, [books.order()], concurrent=bounds)[0]

    results = race(books.database, [ours] * 50)

    assert sum(isinstance(result, Held) for result in results) == 10
    assert results.count(TooManyConcurrent("key", 10)) == 40
    assert counted(books) == (10, {books.key.id: 10})
    assert agrees(books)


def test_racing_keys_share_the_limit_of_their_account(books: Books) -> None:
    bounds = Defaults(account=10, key=8)
    own = [books.key.id, *(other_key(books) for _ in range(3))]

    def of(key: int, connection: Connection) -> HoldAnswer:
        return hold(connection, [books.order(key_id=key)], concurrent=bounds)[0]

    results = race(
        books.database,
        [lambda connection, key=key: of(key, connection) for key in own * 10],  # type: ignore[misc]
    )

    assert sum(isinstance(result, Held) for result in results) == 10
    assert counted(books)[0] == 10
    assert sum(counted(books)[1].values()) == 10


def test_limit_holds_while_requests_begin_and_end(books: Books) -> None:
    bounds = Defaults(account=5, key=3)
    most: list[int] = []

    def run() -> None:
        for _ in range(15):
            order = books.order()
            if isinstance(place(books, order, bounds=bounds)[0], Held):
                most.append(books.open_holds())
                books.settle(done(order.request_id))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 1 <= max(most) <= 3
    assert counted(books) == (0, {books.key.id: 0})
    assert agrees(books)


async def test_wrong_counts_are_found_and_corrected(books: Books) -> None:
    """Reset the counts, like a gateway of an earlier version, which settles but does not count."""
    spare = other_key(books)
    place(books, *(books.order() for _ in range(2)))
    with books.database.transaction() as connection:
        connection.execute(delete(holds).where(holds.c.account_id == books.account.id))
        connection.execute(update(accounts).values(held_nanos=0))
        connection.execute(update(keys).values(held_nanos=0))
        connection.execute(update(keys).where(keys.c.id == spare).values(open_requests=-1))
    with books.database.snapshot() as connection:
        found = [str(each) for each in reconcile(connection, now=datetime.now(UTC))]

    (task,) = recount_tasks(books.database)
    await task.run()

    assert found == [
        f"R3 account {books.account.id}: counts 2 open requests, but it should be 0",
        f"R3 key {books.key.id}: counts 2 open requests, but it should be 0",
        f"R3 key {spare}: counts -1 open requests, but it should be 0",
    ]
    assert agrees(books)
    assert counted(books) == (0, {books.key.id: 0, spare: 0})
