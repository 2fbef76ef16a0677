"""Exports: complete, exact, reproducible, and equal to the ledger."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pyarrow.parquet
import pytest

from gateway.billing.exports import native
from gateway.billing.exports.files import export
from gateway.billing.exports.footer import Footer
from gateway.billing.exports.native import connection_reader
from gateway.billing.usage.report import Filters, Span, total, usage
from gateway.ids import first_request_id
from gateway.ledger.holds import hold
from gateway.ledger.prices import put_in_force
from gateway.ledger.refunds import refund
from gateway.pricing import Component, Price
from gateway.sql.database import Database
from tests.ledger.books import HOLD, Books, done, open_books


@pytest.fixture
def books(database: Database) -> Books:
    """Seven charged requests, one released, two refunds, one of them a correction."""
    made = open_books(database, credit=100 * HOLD)
    ids = []
    for number in range(8):
        order = made.order(metadata={"project": 'a "quoted", name', "n": str(number)})
        with database.transaction() as connection:
            hold(connection, [order])
        ids.append(order.request_id)
        if number < 7:
            made.settle(done(order.request_id, input_tokens=number, output_tokens=3))
    with database.transaction() as connection:
        refund(connection, ids[0], 7, key="a", actor="test", reason="test")
        refund(connection, ids[1], 9, key="b", actor="test", reason="test", kind="correction")
    return made


def span(zone: str = "Asia/Kathmandu") -> Span:
    now = datetime.now(UTC)
    return Span(now - timedelta(days=1), now + timedelta(days=1), ZoneInfo(zone))


def write(
    books: Books, format: str = "csv", profile: str = "native", **filters: object
) -> tuple[bytes, Footer]:
    footer = Footer()
    chosen = Filters((books.account.id,), **filters)  # type: ignore[arg-type]
    with books.database.snapshot() as connection:
        parts = export(
            connection_reader(connection),
            SPAN,
            chosen,
            format=format,
            profile=profile,
            footer=footer,  # type: ignore[arg-type]
        )
        return b"".join(parts), footer


SPAN = span()


def rows(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode())))


def spent(books: Books) -> int:
    with books.database.snapshot() as connection:
        whole = total(usage(connection, SPAN, (), Filters((books.account.id,))))
    return whole.cost_nanos - whole.refund_nanos


@pytest.mark.parametrize("profile", ["native", "focus"])
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_files_sum_to_the_ledger_and_are_reproducible(
    format: str, profile: str, books: Books
) -> None:
    data, footer = write(books, format, profile)
    again, _ = write(books, format, profile)

    assert data == again
    assert footer.sha256 == hashlib.sha256(data).hexdigest()
    assert footer.amount_nanos == spent(books) == 100 * HOLD - books.balance().posted_nanos
    if format == "parquet":
        table = pyarrow.parquet.read_table(io.BytesIO(data))
        assert table.num_rows == footer.rows
        told = pyarrow.parquet.read_metadata(io.BytesIO(data)).metadata
        assert told[b"rows"] == str(footer.rows).encode()
    else:
        assert len(rows(data)) == footer.rows


def test_rows_have_time_usage_and_amount(books: Books) -> None:
    data, _ = write(books)

    found = rows(data)

    assert [row["kind"] for row in found] == ["charge"] * 7 + ["refund", "correction"]
    assert [row["request_id"] for row in found[:7]] == sorted(
        row["request_id"] for row in found[:7]
    )
    sixth = found[6]
    assert sixth["amount_usd"] == "0.000000360"
    assert Decimal(found[7]["amount_usd"]) == Decimal(-7).scaleb(-9)
    assert (sixth["input_tokens"], sixth["output_tokens"]) == ("6", "3")
    assert json.loads(sixth["metadata"]) == {"project": 'a "quoted", name', "n": "6"}
    booked = datetime.fromisoformat(sixth["booked_at"])
    local = datetime.fromisoformat(sixth["booked_at_local"])
    assert booked == local
    assert local.utcoffset() == timedelta(hours=5, minutes=45)


def test_the_lines_of_the_focus_profile_are_those_of_the_receipts(books: Books) -> None:
    data, _ = write(books, profile="focus")

    found = rows(data)

    used = [row for row in found if row["ChargeCategory"] == "Usage"]
    # The first request has no input tokens, so it has one line.
    assert len(used) == 13
    assert {row["ConsumedUnit"] for row in used} == {"input_token", "output_token"}
    assert {row["ChargeCategory"] for row in found} == {"Usage", "Credit", "Adjustment"}
    assert used[0]["SkuId"] == "m/output_token"
    assert used[0]["ListUnitPrice"] == "0.00000008"
    assert used[0]["BilledCost"] == used[0]["EffectiveCost"] == "0.000000240"
    assert used[0]["ServiceCategory"] == "AI and Machine Learning"


def test_filters_and_spans_select_rows(books: Books) -> None:
    assert write(books, models=("other",))[1].rows == 0
    assert write(books, key_ids=(books.key.id,))[1].rows == 9


def test_parts_make_the_same_file_as_one_whole(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = write(books)
    monkeypatch.setattr(native, "CHUNK", 2)

    assert write(books)[0] == whole
    parquet, footer = write(books, "parquet")
    assert pyarrow.parquet.read_table(io.BytesIO(parquet)).num_rows == footer.rows == 9


def test_an_empty_file_has_its_columns(database: Database) -> None:
    books = open_books(database, credit=0)

    data, footer = write(books)

    assert (footer.rows, footer.amount_nanos) == (0, 0)
    assert data.decode().startswith('"kind","request_id"')
    assert pyarrow.parquet.read_table(io.BytesIO(write(books, "parquet")[0])).num_rows == 0


def test_request_settled_long_after_its_acceptance_is_exported(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    order = books.order(
        accepted_at=datetime.now(UTC) - timedelta(days=9),
        request_id=f"req_{first_request_id(datetime.now(UTC) - timedelta(days=9))[4:]}{'0' * 20}",
    )
    with database.transaction() as connection:
        hold(connection, [order])
    books.settle(done(order.request_id))

    assert write(books)[1].amount_nanos == spent(books) == 500


def test_pricing_quantities_follow_the_unit_of_the_price(database: Database) -> None:
    books = open_books(database, credit=10 * HOLD)
    price = Price((Component("input_token", 20_000_000, per=1_000_000),))
    with database.transaction() as connection:
        price_id = put_in_force(connection, "n", price, datetime(2020, 1, 1, tzinfo=UTC))
        order = books.order(model="n", price_id=price_id)
        hold(connection, [order])
    books.settle(done(order.request_id))

    (row,) = rows(write(books, profile="focus")[0])

    assert (row["ConsumedQuantity"], row["PricingUnit"]) == ("5", "1000000 input_token")
    assert Decimal(row["PricingQuantity"]) * Decimal(row["ListUnitPrice"]) == Decimal(
        row["ListCost"]
    )
