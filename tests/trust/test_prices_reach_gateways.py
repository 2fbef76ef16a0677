"""Every price change reaches every gateway in time, and looking for changes reads one row."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, insert

from gateway.accounts.accounts import create_account
from gateway.catalog.store import LiveCatalog
from gateway.ledger.discounts import put_discount_in_force
from gateway.ledger.prices import cancel_price, put_in_force, read_version, set_price
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from gateway.tables.core import price_periods

CATALOG = """\
models:
  - name: painter
    task: text-to-image
    engine: echo
    price: [{unit: image, amount: "0.01"}]
"""
SET_PRICE = """\
import sys
from datetime import UTC, datetime, timedelta
from gateway.sql.database import Database
from gateway.ledger.prices import set_price
from gateway.pricing import Component, Price

with Database(sys.argv[1]).transaction() as connection:
    set_price(
        connection, "painter", Price((Component("image", 7),)),
        starts_at=datetime.now(UTC) + timedelta(hours=1), actor="other", reason="test",
    )
"""
Write = Callable[[Connection], object]


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


def price(amount: int) -> Price:
    return Price((Component("image", amount),))


def write_period(connection: Connection) -> object:
    """Write a period as SQL by hand, or as a gateway of an earlier version."""
    price_id = put_in_force(connection, "other", price(3), datetime.now(UTC))
    return connection.execute(
        insert(price_periods).values(
            model="painter", account_id=0, effective_from=soon(), price_id=price_id
        )
    )


def set_own_price(connection: Connection) -> object:
    account = create_account(connection, "acme")
    return set_price(
        connection, "painter", price(5),
        account_id=account.id, starts_at=soon(), actor="x", reason="x",
    )  # fmt: skip


@pytest.fixture
async def live(tmp_path: Path, database: Database) -> AsyncIterator[LiveCatalog]:
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG)
    yield await LiveCatalog.open(path, database)
    await database.close()


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """Collect the queries that any engine executes."""
    found: list[str] = []

    def collect(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if "SELECT" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", collect)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", collect)


async def test_refresh_without_a_change_reads_one_row(
    live: LiveCatalog, database: Database
) -> None:
    with database.transaction() as connection:
        set_own_price(connection)
    await live.refresh()

    with statements() as found:
        await live.refresh()

    assert len(found) == 1
    assert "price_version" in found[0]
    assert "price_periods" not in found[0]


@pytest.mark.parametrize(
    "write",
    [
        lambda connection: put_in_force(connection, "painter", price(2), datetime.now(UTC)),
        lambda connection: set_price(
            connection, "painter", price(2), starts_at=soon(), actor="x", reason="x"
        ),
        lambda connection: put_discount_in_force(connection, "painter", "0.9", soon()),
        set_own_price,
        write_period,
    ],
    ids=["catalog", "operator", "discount", "account", "by hand"],
)
async def test_every_change_has_a_later_version(
    live: LiveCatalog, database: Database, write: Write
) -> None:
    with database.transaction() as connection:
        before = read_version(connection)
        write(connection)
        after = read_version(connection)

    with statements() as found:
        await live.refresh()

    assert after > before
    assert any("price_periods" in statement for statement in found)


async def test_cancelled_price_is_taken_back_in_every_gateway(
    live: LiveCatalog, database: Database
) -> None:
    starts_at = soon()
    with database.transaction() as connection:
        set_price(connection, "painter", price(2), starts_at=starts_at, actor="x", reason="x")
    await live.refresh()
    assert live.priced("painter", starts_at)[1] == price(2)

    with database.transaction() as connection:
        cancel_price(
            connection, "painter",
            starts_at=starts_at, now=datetime.now(UTC), actor="x", reason="x",
        )  # fmt: skip
    await live.refresh()

    assert live.priced("painter", starts_at)[1] == price(10_000_000)


async def test_change_that_is_rolled_back_leaves_the_version(
    live: LiveCatalog, database: Database
) -> None:
    with database.transaction() as connection:
        before = read_version(connection)
        changed = connection.begin_nested()
        set_own_price(connection)
        assert read_version(connection) > before
        changed.rollback()

        assert read_version(connection) == before


async def test_price_set_by_another_process_is_known_here(
    live: LiveCatalog, database_url: str
) -> None:
    later = soon() + timedelta(minutes=1)
    keeping = asyncio.create_task(live.keep_fresh())
    try:
        await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", SET_PRICE, database_url], check=True
        )
        async with asyncio.timeout(20):
            while live.priced("painter", later)[1] != price(7):  # noqa: ASYNC110  # there is no event to await
                await asyncio.sleep(0.01)
    finally:
        keeping.cancel()

    assert live.priced("painter", datetime.now(UTC))[1] == price(10_000_000)
