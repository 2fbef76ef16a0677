"""Prices that an operator sets: overrides, start times, and what stays in force."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, insert
from sqlalchemy.exc import DBAPIError

from gateway.catalog.loader import load_catalog
from gateway.catalog.price_overrides import (
    InvalidPriceOverride,
    read_price_override,
    read_prices,
    read_start,
)
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.store import LiveCatalog
from gateway.ledger.prices import (
    LIST,
    PriceConflict,
    PricePeriod,
    cancel_price,
    in_force,
    price_periods_of,
    put_in_force,
    set_price,
)
from gateway.ledger.reconcile import reconcile
from gateway.pricing import Component, Price, format_usd
from gateway.sql.database import Database
from gateway.tables.prices import cancelled_prices

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
def talker(file: Path) -> CatalogEntry:
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


def test_price_override_takes_precedence_over_the_list_price_until_it_ends(
    database: Database,
) -> None:
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
    with pytest.raises(ValueError, match="cannot be ended"):
        put(database, None, hours=2)


def cancel(
    database: Database, starts_at: datetime, *, now: datetime = NOW, account_id: int = LIST
) -> PricePeriod:
    with database.transaction() as connection:
        return cancel_price(
            connection,
            "m",
            account_id=account_id,
            starts_at=starts_at,
            now=now,
            actor="test",
            reason="wrong amount",
        )


def in_force_after(database: Database, hours: int, *, account_id: int = LIST) -> int:
    with database.transaction() as connection:
        return in_force(connection, NOW + timedelta(hours=hours), account_id=account_id)["m"]


@pytest.mark.parametrize("account_id", [LIST, OWN])
def test_cancelled_scheduled_price_never_applies(database: Database, account_id: int) -> None:
    with database.transaction() as connection:
        listed = put_in_force(connection, "m", price(10), NOW)
    put(database, price(12), hours=2, account_id=account_id)

    made = cancel(database, NOW + timedelta(hours=2), account_id=account_id)

    assert made.cancelled is not None
    assert in_force_after(database, 3, account_id=account_id) == listed
    with database.transaction() as connection:
        shown = price_periods_of(connection, model="m", account_ids=[account_id])
        assert reconcile(connection, now=NOW) == []
    assert shown[-1].cancelled == made.cancelled
    assert (made.cancelled.actor, made.cancelled.reason) == ("test", "wrong amount")
    with pytest.raises(LookupError, match="none is scheduled"):
        cancel(database, NOW + timedelta(hours=2), account_id=account_id)


def test_scheduled_end_of_an_override_can_be_cancelled(database: Database) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(5), hours=0, account_id=OWN)
    own = in_force_after(database, 0, account_id=OWN)
    put(database, None, hours=1, account_id=OWN)

    cancel(database, NOW + timedelta(hours=1), account_id=OWN)

    assert in_force_after(database, 2, account_id=OWN) == own


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0, "began at"), (3600, "began at"), (-9, "until 10 s before")],
)
def test_price_that_has_begun_or_is_about_to_is_not_cancelled(
    database: Database, seconds: int, message: str
) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(12), hours=2)
    starts_at = NOW + timedelta(hours=2)

    with pytest.raises(PriceConflict, match=message):
        cancel(database, starts_at, now=starts_at + timedelta(seconds=seconds))

    assert in_force_after(database, 3) != in_force_after(database, 1)


def test_price_that_is_not_scheduled_is_not_cancelled(database: Database) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(12), hours=2)

    with pytest.raises(LookupError, match=r"begin at 2026-03-01T02:00:00\+00:00"):
        cancel(database, NOW + timedelta(hours=1))
    with pytest.raises(LookupError, match="none is scheduled"):
        cancel(database, NOW, now=NOW - timedelta(hours=1), account_id=OWN)


def test_another_price_can_start_at_the_time_of_a_cancelled_one(database: Database) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(12), hours=2)
    starts_at = NOW + timedelta(hours=2)
    cancel(database, starts_at)

    put(database, price(13), hours=2)
    right = in_force_after(database, 3)

    again = cancel(database, starts_at)
    assert again.price_id == right
    assert in_force_after(database, 3) == in_force_after(database, 0)


def test_cancelled_prices_are_kept_and_only_future_ones_in_sql(database: Database) -> None:
    with database.transaction() as connection:
        put_in_force(connection, "m", price(10), NOW)
    put(database, price(12), hours=2)
    cancel(database, NOW + timedelta(hours=2))
    late = {
        "model": "m",
        "account_id": LIST,
        "effective_from": NOW,
        "cancelled_at": NOW,
        "actor": "x",
        "reason": "x",
    }

    with pytest.raises(DBAPIError, match="append-only"), database.transaction() as connection:
        connection.execute(delete(cancelled_prices))
    with pytest.raises(DBAPIError, match="ahead"), database.transaction() as connection:
        connection.execute(insert(cancelled_prices).values(late))


async def test_gateway_applies_an_accounts_price_override(file: Path, database: Database) -> None:
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
    assert live.has_price_override("talker", OWN)
    assert not live.has_price_override("talker", 18)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"price": [{"unit": "image", "amount": "1"}]}, "not measured in images"),
        ({"price": [{"unit": "input_token", "amount": "1"}]}, "does not cover"),
        ({"price": [{"unit": "request", "amount": 1}]}, "not in quotes"),
        ({"price": [{"unit": "request", "amount": "0.0000000001"}]}, "at most 9 decimals"),
        ({"price": [{"unit": "request", "amount": "1"}], "limits": {}}, "not a field of a price"),
        ({"price": []}, "price"),
    ],
)
def test_price_override_must_follow_the_catalogs_rules(
    told: dict[str, object], message: str, talker: CatalogEntry
) -> None:
    with pytest.raises(InvalidPriceOverride, match=message):
        read_price_override(talker, told)


@pytest.mark.parametrize("text", ["soon", "2026-03-01T12:00:00", "2026-02-28T00:00:00Z"])
def test_start_that_is_too_early_for_other_gateways_is_refused(text: str) -> None:
    with pytest.raises(InvalidPriceOverride):
        read_start(text, NOW)


def test_start_defaults_to_the_earliest_possible_moment() -> None:
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
    with pytest.raises(InvalidPriceOverride, match=r"m: price\[0\].unit"):
        read_prices(bad)
