"""Prices that an operator sets: own prices, times, and what stays in force."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.catalog.loader import load_catalog
from gateway.catalog.offers import BadOffer, read_offer, read_prices, read_start
from gateway.catalog.schema import Entry
from gateway.catalog.store import LiveCatalog
from gateway.database import Database
from gateway.ledger.prices import PriceConflict, in_force, put_in_force, set_price
from gateway.pricing import Component, Price, format_usd

NOW = datetime(2026, 3, 1, tzinfo=UTC)
OWN = 17
CATALOG = """\
models:
  - name: talker
    task: text-generation
    engine: echo
    limits: {output_tokens: 100}
    price:
      - {unit: input_token, amount: "0.02", per: 1000}
      - {unit: output_token, amount: "0.08", per: 1000}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.yaml"
    path.write_text(CATALOG)
    return path


@pytest.fixture
def talker(file: Path) -> Entry:
    return load_catalog(file).models[0]


def price(amount: int) -> Price:
    return Price((Component("request", amount),))


def put(
    database: Database, made: Price | None, *, hours: int, account_id: int = 0, model: str = "m"
) -> None:
    with database.transaction() as connection:
        set_price(
            connection,
            model,
            made,
            account_id=account_id,
            starts_at=NOW + timedelta(hours=hours),
            actor="test",
            reason="test",
        )


def test_an_accounts_own_price_goes_before_the_list_until_it_ends(database: Database) -> None:
    with database.transaction() as connection:
        listed = put_in_force(connection, "m", price(10), NOW)
    put(database, price(5), hours=1, account_id=OWN)
    put(database, price(12), hours=2)
    put(database, None, hours=3, account_id=OWN)

    with database.transaction() as connection:
        own = [
            in_force(connection, NOW + timedelta(hours=hour), account_id=OWN)["m"]
            for hour in range(4)
        ]
        everybody = [in_force(connection, NOW + timedelta(hours=hour))["m"] for hour in range(4)]

    assert own[0] == everybody[0] == everybody[1] == listed
    assert own[1] == own[2] != listed
    assert own[3] == everybody[2] == everybody[3]


def test_the_catalog_changes_the_price_when_its_file_does_and_not_when_it_is_read(
    database: Database,
) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(7), hours=1)
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW + timedelta(hours=2))
        kept = in_force(connection, NOW + timedelta(hours=2))["m"]
        changed = put_in_force(connection, "m", price(11), NOW + timedelta(hours=3))

        assert in_force(connection, NOW + timedelta(hours=1))["m"] == kept
        assert in_force(connection, NOW + timedelta(hours=3))["m"] == changed


def test_two_prices_cannot_begin_at_one_moment_and_a_list_price_cannot_end(
    database: Database,
) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(7), hours=1)
    with pytest.raises(PriceConflict):
        put(database, price(8), hours=1)
    with pytest.raises(ValueError, match="does not end"):
        put(database, None, hours=2)


async def test_a_gateway_sells_to_an_account_at_its_own_price(
    file: Path, database: Database
) -> None:
    live = await LiveCatalog.open(file, database)
    now = datetime.now(UTC)
    with database.transaction() as connection:
        set_price(
            connection,
            "talker",
            price(9),
            account_id=OWN,
            starts_at=now,
            actor="test",
            reason="test",
        )
    await live.refresh()

    later = now + timedelta(seconds=1)
    assert live.priced("talker", later, OWN)[1] == price(9)
    assert live.priced("talker", later)[1] == load_catalog(file).models[0].selling_price
    own = live.entry("talker", OWN)
    assert own is not None
    assert format_usd(own.price[0].amount) == "0.000000009"
    assert live.has_own_price("talker", OWN)
    assert not live.has_own_price("talker", 18)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"price": [{"unit": "image", "amount": "1"}]}, "not counted in images"),
        ({"price": [{"unit": "input_token", "amount": "1"}]}, "does not cover"),
        ({"price": [{"unit": "request", "amount": 1}]}, "not in quotes"),
        ({"price": [{"unit": "request", "amount": "0.0000000001"}]}, "at most 9 decimals"),
        ({"price": [{"unit": "request", "amount": "1"}], "limits": {}}, "no part of a price"),
        ({"price": []}, "price"),
    ],
)
def test_an_own_price_is_held_to_the_rules_of_the_catalog(
    told: dict[str, object], message: str, talker: Entry
) -> None:
    with pytest.raises(BadOffer, match=message):
        read_offer(talker, told)


@pytest.mark.parametrize("text", ["soon", "2026-03-01T12:00:00", "2026-02-28T00:00:00Z"])
def test_a_start_that_gateways_could_miss_is_refused(text: str) -> None:
    with pytest.raises(BadOffer):
        read_start(text, NOW)


def test_a_start_is_soon_or_when_it_says() -> None:
    assert read_start(None, NOW) == NOW + timedelta(seconds=10)
    assert read_start("2026-04-01T02:00:00+02:00", NOW) == datetime(2026, 4, 1, tzinfo=UTC)


def test_prices_are_read_from_a_catalog_or_from_a_list(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text('prices:\n  m: {price: [{unit: request, amount: "0.5"}], minimum: "1"}\n')
    bad = tmp_path / "bad.yaml"
    bad.write_text("prices:\n  m: {price: [{unit: moon, amount: '1'}]}\n")

    assert list(read_prices(file)) == ["talker"]
    assert read_prices(other) == {
        "m": Price((Component("request", 500_000_000),), minimum_nanos=1_000_000_000)
    }
    with pytest.raises(BadOffer, match=r"m: price.0.unit"):
        read_prices(bad)
