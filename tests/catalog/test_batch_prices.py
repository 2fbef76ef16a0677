"""Batch prices: the price in force less the discount in force, as a price row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway.audit_log import Author
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.selling.batch_prices import PriceStart, due
from gateway.catalog.store import LiveCatalog
from gateway.errors import InvalidRequest
from gateway.ledger.discounts import Discount, read_discounts
from gateway.ledger.prices import read_price, set_price
from gateway.pricing import Component, Price
from gateway.sql.database import Database

Connect = Callable[[str], Database]
OWN = 17
TESTER = Author("test", "system")
NOW = datetime(2026, 3, 1, tzinfo=UTC)
FULL = Price((Component("request", 1_000_001),), 3)
HALF = Price((Component("request", 1_000_001, 2),), 2)


def write(path: Path, more: str = "") -> Path:
    path.write_text(
        "models:\n  - name: m\n    task: text-generation\n    engine: echo\n"
        f"    limits: {{output_tokens: 100}}\n    {more}\n"
        '    price: [{unit: request, amount: "0.001000001"}]\n    minimum: "0.000000003"\n'
    )
    return path


def moment() -> datetime:
    return datetime.now(UTC)


def batch_price(live: LiveCatalog, account_id: int = 0) -> Price:
    return live.priced("m", moment(), account_id, "batch")[1]


async def test_batch_price_is_half_by_default(tmp_path: Path, database: Database) -> None:
    live = await LiveCatalog.open(write(tmp_path / "c.yaml"), database)

    price_id, price = live.priced("m", moment(), 0, "batch")

    assert live.priced("m", moment())[1] == FULL
    assert price == HALF
    with database.transaction() as connection:
        assert read_price(connection, price_id, {}) == HALF


async def test_a_changed_discount_is_a_new_price_and_the_old_one_stays(
    tmp_path: Path, database: Database, short_notice: float
) -> None:
    path = write(tmp_path / "c.yaml")
    live = await LiveCatalog.open(path, database)
    old_id, _ = live.priced("m", moment(), 0, "batch")

    write(path, 'batch_discount: "0.2500"')
    assert await live.reload(TESTER) == ()
    await live.refresh()

    assert batch_price(live) == Price((Component("request", 3_000_003, 4),), 3)
    with database.transaction() as connection:
        assert read_price(connection, old_id, {}) == HALF
        assert [each.discount for each in read_discounts(connection)["m"]] == ["0.5", "0.25"]


async def test_batch_sales_can_be_disabled_and_enabled_again(
    tmp_path: Path, database: Database, short_notice: float
) -> None:
    path = write(tmp_path / "c.yaml", "batch: false")
    live = await LiveCatalog.open(path, database)

    with pytest.raises(InvalidRequest, match="not sold in batches"):
        batch_price(live)

    write(path)
    assert await live.reload(TESTER) == ()
    await live.refresh()
    assert batch_price(live) == HALF
    assert live.priced("m", moment())[1] == FULL


async def test_price_override_is_discounted_in_batches_too(
    tmp_path: Path, database: Database
) -> None:
    live = await LiveCatalog.open(write(tmp_path / "c.yaml"), database)
    own = Price((Component("request", 7),))
    with database.transaction() as connection:
        set_price(
            connection, "m", own, account_id=OWN, starts_at=moment(), actor="test", reason="test"
        )
    await live.refresh()

    assert batch_price(live, OWN) == Price((Component("request", 7, 2),))
    assert batch_price(live) == HALF


async def test_gateways_agree_on_the_row_of_a_batch_price(
    tmp_path: Path, database: Database
) -> None:
    path = write(tmp_path / "c.yaml")

    first = await LiveCatalog.open(path, database)
    second = await LiveCatalog.open(path, database)

    now = moment()
    assert first.priced("m", now, 0, "batch")[0] == second.priced("m", now, 0, "batch")[0]


async def test_override_that_cannot_be_halved_exactly_is_not_sold_in_batches(
    tmp_path: Path, database: Database
) -> None:
    live = await LiveCatalog.open(write(tmp_path / "c.yaml", 'batch_discount: "0.3333"'), database)
    own = Price((Component("request", 2**62 + 1),))
    with database.transaction() as connection:
        set_price(
            connection, "m", own, account_id=OWN, starts_at=moment(), actor="test", reason="test"
        )
    await live.refresh()

    assert live.priced("m", moment(), OWN)[1] == own
    with pytest.raises(InvalidRequest):
        batch_price(live, OWN)


def test_only_prices_and_discounts_that_overlap_in_time_are_combined() -> None:
    hour = timedelta(hours=1)
    periods = {
        ("m", 0): (
            PriceStart(NOW - 9 * hour, 1),
            PriceStart(NOW - hour, 2),
            PriceStart(NOW + 2 * hour, 3),
        ),
        ("m", OWN): (PriceStart(NOW - hour, 4), PriceStart(NOW + hour, None)),
        ("n", 0): (PriceStart(NOW - hour, 5),),
    }
    discounts = {
        "m": (Discount(NOW - 3 * hour, "0.5"), Discount(NOW + 2 * hour, "0.1")),
        "n": (Discount(NOW - hour, None),),
    }

    assert due(periods, discounts, NOW) == {(2, "0.5"): "m", (3, "0.1"): "m", (4, "0.5"): "m"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_discount": "0"}, "not a valid discount"),
        ({"batch_discount": "0.0"}, "not a valid discount"),
        ({"batch_discount": "1"}, "not a valid discount"),
        ({"batch_discount": "1.5"}, "not a valid discount"),
        ({"batch_discount": "-0.5"}, "not a valid discount"),
        ({"batch_discount": "0.12345"}, "not a valid discount"),
        ({"batch_discount": 0.5}, "in quotes"),
        ({"batch_discount": "50%"}, "not a valid discount"),
        ({"batch": "no"}, "boolean"),
        ({"batch": False, "batch_discount": "0.5"}, "not sold in batches"),
        (
            {
                "batch_discount": "0.3333",
                "price": [{"unit": "request", "amount": "999999999.999999997"}],
            },
            "exactly",
        ),
    ],
)
def test_invalid_discount_is_refused(fields: dict[str, object], message: str) -> None:
    told = {
        "name": "m",
        "task": "text-generation",
        "engine": "echo",
        "limits": {"output_tokens": 1},
        "price": [{"unit": "request", "amount": "1"}],
    }

    with pytest.raises(ValidationError, match=message):
        CatalogEntry.model_validate({**told, **fields})


async def test_gateways_that_start_together_create_each_row_once(
    tmp_path: Path, database_url: str, connect: Connect
) -> None:
    path = write(tmp_path / "c.yaml")
    if database_url.startswith("sqlite"):
        gateways = [await LiveCatalog.open(path, connect(database_url))]
    else:
        databases = [connect(database_url) for _ in range(6)]
        gateways = await asyncio.gather(
            *(LiveCatalog.open(path, database) for database in databases)
        )

    now = moment()
    assert len({live.priced("m", now, 0, "batch")[0] for live in gateways}) == 1
