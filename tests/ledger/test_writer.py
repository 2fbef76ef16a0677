"""The writer of the ledger: one transaction for entries of all kinds, as durable as they need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import Connection, event, select
from sqlalchemy.exc import OperationalError

from gateway.ledger.concurrency import UNBOUNDED
from gateway.ledger.extend import Extended, Extension
from gateway.ledger.holds import CreditInUse, Held, HoldRequest, hold
from gateway.ledger.periods import booking_time
from gateway.ledger.prices import PriceCache
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Closing, Settlement, settle
from gateway.ledger.writer import Answer, Entry, book
from gateway.pricing import Price
from gateway.sql.database import Database
from gateway.sql.lanes import deadlocked
from gateway.tables.core import periods
from tests.ledger.books import HOLD, PRICE, RETENTION, Books, done, open_books
from tests.ledger.test_races import only_postgresql, race


@contextmanager
def commits(database: Database) -> Iterator[list[bool]]:
    """Collect the transactions that are committed meanwhile: whether each waited for the disk."""
    durable: list[bool] = []

    def look(connection: Connection) -> None:
        if connection.dialect.name == "sqlite":
            level = connection.exec_driver_sql("PRAGMA synchronous").scalar_one()
            durable.append(level == 2)
        else:
            shown = connection.exec_driver_sql("SHOW synchronous_commit").scalar_one()
            durable.append(shown == "on")

    engine = database._lanes["write"].engine
    event.listen(engine, "commit", look)
    yield durable
    event.remove(engine, "commit", look)


def agree(books: Books) -> bool:
    with books.database.transaction() as connection:
        return reconcile(connection, now=datetime.now(UTC)) == []


async def test_entries_of_one_instant_share_a_transaction(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    ledger = books.writer()
    ending, growing, beginning = books.order(), books.order(hold_nanos=600), books.order()
    await asyncio.gather(ledger.hold(ending), ledger.hold(growing))

    with commits(database) as made:
        begun, extended, closed = await asyncio.gather(
            ledger.hold(beginning),
            ledger.extend(Extension(growing.request_id, 800, 8)),
            ledger.settle(done(ending.request_id)),
        )

    assert begun == Held(beginning.request_id)
    assert extended == Extended()
    assert closed is not None
    assert closed.closed.request_id == ending.request_id
    one = database.engine.dialect.name == "sqlite"
    assert made == ([True] if one else [True, True]), "PostgreSQL writes settlements apart"
    assert books.balance().held_nanos == 800 + HOLD
    assert agree(books)
    await database.close()


async def test_what_a_settlement_releases_is_held_again_in_the_same_transaction(
    database: Database,
) -> None:
    books = open_books(database, credit=HOLD)
    ledger = books.writer()
    first, second = books.order(), books.order()
    await ledger.hold(first)
    assert isinstance(await ledger.hold(second), CreditInUse)

    release = Settlement(first.request_id, "cancelled", "client", billable=False)
    with database.transaction() as connection:
        answer, _ = book(
            connection,
            [second, release],
            prices=PriceCache(),
            retention=RETENTION,
            concurrent=UNBOUNDED,
        )

    assert answer == Held(second.request_id)
    assert agree(books)
    await database.close()


async def test_hold_does_not_wait_for_a_month_that_is_locked(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    only_postgresql(books)
    ledger = books.writer()
    ending, beginning = books.order(), books.order()
    await ledger.hold(ending)

    with database.transaction() as connection:
        month = booking_time(connection).strftime("%Y-%m")
        connection.execute(select(periods).where(periods.c.month == month).with_for_update())
        settling = asyncio.ensure_future(ledger.settle(done(ending.request_id)))
        await asyncio.sleep(0.2)

        assert await ledger.hold(beginning) == Held(beginning.request_id)
        assert not settling.done()

    assert await settling is not None
    assert agree(books)
    await database.close()


async def test_entry_that_cannot_be_booked_fails_alone(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    ledger = books.writer()
    ending, good = books.order(), books.order()
    await ledger.hold(ending)

    bad, held, closed = await asyncio.gather(
        ledger.hold(books.order(price_id=-1)),
        ledger.hold(good),
        ledger.settle(done(ending.request_id)),
        return_exceptions=True,
    )

    assert isinstance(bad, Exception)
    assert held == Held(good.request_id)
    assert isinstance(closed, Closing)
    assert books.open_holds() == 1
    assert agree(books)
    await database.close()


async def test_only_holds_that_need_not_be_durable_do_not_wait_for_the_disk(
    database: Database,
) -> None:
    books = open_books(database, credit=100 * HOLD)
    ledger = books.writer()
    orders = [books.order(durable=False) for _ in range(4)]

    with commits(database) as made:
        await asyncio.gather(*(ledger.hold(order) for order in orders[:3]))
        await asyncio.gather(ledger.hold(orders[3]), ledger.hold(books.order()))
        await ledger.hold(books.order(durable=False))
        await ledger.extend(Extension(orders[0].request_id, 2 * HOLD, 20))
        await ledger.hold(books.order(durable=False))
        await ledger.settle(done(orders[0].request_id))
        await database.write(lambda connection: connection.exec_driver_sql("SELECT 1"))

    assert made == [False, True, False, True, False, True, True]
    await database.close()


# --- Two gateways: each settles for an account for which the other one holds ---


class SlowPrices(PriceCache):
    """Prices that take a while to read, which is between the locks of a settlement and a hold."""

    def get(self, *_: object) -> Price:  # type: ignore[override]  # a price is always found
        time.sleep(0.3)
        return next(iter(self.values()))


def locked_apart(
    connection: Connection, batch: Sequence[Entry], *, prices: PriceCache
) -> list[Answer]:
    """Lock the accounts of settlements first, and those of holds afterwards."""
    ends = [entry for entry in batch if isinstance(entry, Settlement)]
    begins = [entry for entry in batch if isinstance(entry, HoldRequest)]
    now = booking_time(connection)
    closed = settle(connection, ends, now=now, prices=prices, retention=RETENTION)
    return [*closed, *hold(connection, begins)]


def locked_together(
    connection: Connection, batch: Sequence[Entry], *, prices: PriceCache
) -> list[Answer]:
    return book(connection, batch, prices=prices, retention=RETENTION, concurrent=UNBOUNDED)


@pytest.mark.parametrize("function", [locked_together, locked_apart])
def test_batches_of_two_gateways_do_not_deadlock(
    function: Callable[..., list[Answer]], database: Database
) -> None:
    here = open_books(database, credit=10 * HOLD)
    only_postgresql(here)
    there = replace(open_books(database, credit=10 * HOLD), price_id=here.price_id)
    ending = here.order(), there.order()
    with database.transaction() as connection:
        hold(connection, ending)
    prices = SlowPrices({here.price_id: PRICE})

    results = race(
        database,
        [
            lambda c: function(c, [done(ending[0].request_id), there.order()], prices=prices),
            lambda c: function(c, [done(ending[1].request_id), here.order()], prices=prices),
        ],
    )

    lost = [result for result in results if isinstance(result, OperationalError)]
    assert [deadlocked(error) for error in lost] == ([True] if function is locked_apart else [])
