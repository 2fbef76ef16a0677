"""Exports: complete, exact, reproducible, and equal to the ledger."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet
import pytest
from sqlalchemy import Connection, insert, select

from gateway.billing.exports import focus, pages
from gateway.billing.exports.files import export
from gateway.billing.exports.footer import Footer
from gateway.billing.exports.pages import connection_reader
from gateway.billing.usage.report import Filters, Span, total, usage
from gateway.ids import first_request_id
from gateway.ledger.expenses import ExpenseRates
from gateway.ledger.holds import hold
from gateway.ledger.periods import booking_time
from gateway.ledger.prices import PriceCache, put_in_force
from gateway.ledger.refunds import refund
from gateway.ledger.settle import settle
from gateway.pricing import Component, Line, Price
from gateway.sql.database import Database
from gateway.tables.core import QUANTITIES, receipts, refunds, transfers
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
    books: Books,
    format: str = "csv",
    profile: str = "native",
    *,
    span: Span | None = None,
    margins: bool = False,
    **filters: object,
) -> tuple[bytes, Footer]:
    footer = Footer()
    chosen = Filters((books.account.id,), **filters)  # type: ignore[arg-type]
    with books.database.snapshot() as connection:
        parts = export(
            connection_reader(connection),
            span or SPAN,
            chosen,
            format=format,
            profile=profile,
            footer=footer,  # type: ignore[arg-type]
            margins=margins,
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


@pytest.mark.parametrize("format", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("profile", "cost", "margin", "amount"),
    [
        ("native", "operator_cost", "margin", "amount_nanos"),
        ("focus", "x_OperatorCost", "x_Margin", "x_AmountNanos"),
    ],
)
def test_margins_are_columns_of_exports_for_operators_only(
    books: Books, format: str, profile: str, cost: str, margin: str, amount: str
) -> None:
    order = books.order()
    with books.database.transaction() as connection:
        hold(connection, [order])
    with books.database.transaction() as connection:
        settle(
            connection,
            [done(order.request_id)],
            now=booking_time(connection),
            prices={},
            retention=timedelta(hours=1),
            # Of the seven microseconds that each request took.
            rates=ExpenseRates(hour_nanos=3_600_000_000),
        )

    plain, _ = write(books, format, profile)
    data, footer = write(books, format, profile, margins=True)

    def read(text: bytes) -> list[dict[str, Any]]:
        if format == "csv":
            return [{name: value or None for name, value in row.items()} for row in rows(text)]
        found: list[dict[str, Any]] = pyarrow.parquet.read_table(io.BytesIO(text)).to_pylist()
        return found

    usd, nanos = ("_usd", "_nanos") if profile == "native" else ("", "Nanos")
    names = [cost + usd, cost + nanos, margin + usd, margin + nanos]
    found = read(data)
    bare = [{name: row[name] for name in row if name not in names} for row in found]
    assert bare == read(plain)
    assert footer.rows == len(found)
    id = "request_id" if profile == "native" else "ResourceId"
    own = [row for row in found if row[id] == order.request_id]
    assert [int(row[cost + nanos]) for row in own] == [7, 0][: len(own)]
    assert all(int(row[margin + nanos]) == int(row[amount]) - int(row[cost + nanos]) for row in own)
    assert Decimal(own[0][cost + usd]) == Decimal("0.000000007")
    others = [row for row in found if row[id] != order.request_id and int(row[amount]) > 0]
    assert None in {row[cost + nanos] for row in others}, "their cost is not known"
    (back, *_) = [row for row in found if int(row[amount]) < 0]
    assert (int(back[cost + nanos]), back[margin + nanos]) == (0, back[amount])


def test_filters_and_spans_select_rows(books: Books) -> None:
    assert write(books, models=("other",))[1].rows == 0
    assert write(books, key_ids=(books.key.id,))[1].rows == 9


def test_filters_are_values_and_never_sql(books: Books) -> None:
    for text in ("'", '"', "m' OR '1'='1", "%s", "%(x)s", ":x", "\\'; --"):
        assert write(books, models=(text,))[1].rows == 0
    assert write(books, models=("%s", "m"))[1].rows == 9


BOOKED = datetime(2026, 3, 8, 6, 59, 59, 900_001, tzinfo=UTC)
"""Just before clocks change in New York."""
NATIVE = '''\
"kind","request_id","booked_at","booked_at_local","accepted_at","account_id","key","model","task",\
"status","outcome","reason","service_class","price_id","amount_usd","amount_nanos","input_tokens",\
"cached_input_tokens","output_tokens","images","video_ms","audio_ms","characters","steps","gpu_us",\
"metadata"
"charge","req_001","2026-03-08T06:59:59.900001Z","2026-03-08T01:59:59.900001-05:00",\
"2026-03-08T06:59:59.000000Z",{account},"{key}","ü, ""x""","text-generation","succeeded","charged",\
"completed","standard",{price},"0.000000500",500,5,0,5,0,0,0,0,0,0,\
"{{""a"":""1, \\""2\\"" ü\\n""}}"
"charge","req_002","2026-03-08T07:00:00.900001Z","2026-03-08T03:00:00.900001-04:00",\
"2026-03-08T07:00:00.000000Z",{account},"{key}","two
lines","text-generation","succeeded","charged",\
"completed","standard",{price},"9007199.254740993",9007199254740993,5,0,5,0,0,0,0,0,0,
"refund","req_002","2026-03-08T07:00:00.000000Z","2026-03-08T03:00:00.000000-04:00",\
"2026-03-08T07:00:00.000000Z",{account},"{key}","two
lines","text-generation","succeeded","charged",\
"completed","standard",{price},"-0.000000007",-7,,,,,,,,,,
'''


def test_file_has_exactly_these_bytes(books: Books) -> None:
    """Quotes, line breaks, NULL, an amount that no float can hold, and a change of the clock."""
    rows = [
        {
            **dict.fromkeys(QUANTITIES, 0),
            "request_id": f"req_00{number}",
            "account_id": books.account.id,
            "key_id": books.key.id,
            "model": ('ü, "x"', "two\nlines")[number - 1],
            "task": "text-generation",
            "price_id": books.price_id,
            "outcome": "charged",
            "status": "succeeded",
            "reason": "completed",
            "hold_nanos": 2**60,
            "charge_nanos": (500, 2**53 + 1)[number - 1],
            "requests": 1,
            "input_tokens": 5,
            "output_tokens": 5,
            "timings": {},
            "metadata": ({"a": '1, "2" ü\n'}, None)[number - 1],
            "accepted_at": BOOKED.replace(microsecond=0) + timedelta(seconds=number - 1),
            "settled_at": BOOKED + timedelta(seconds=number - 1),
        }
        for number in (1, 2)
    ]
    with books.database.transaction() as connection:
        ids = list(connection.execute(select(transfers.c.id).limit(3)).scalars())
        for row, transfer_id in zip(rows, ids, strict=False):
            connection.execute(insert(receipts).values(**row, transfer_id=transfer_id))
        connection.execute(
            insert(refunds).values(
                request_id="req_002",
                seq=0,
                kind="refund",
                account_id=books.account.id,
                amount_nanos=7,
                transfer_id=ids[2],
                booked_at=BOOKED.replace(hour=7, minute=0, second=0, microsecond=0),
            )
        )
    day = timedelta(days=1)
    days = Span(BOOKED - day, BOOKED + day, ZoneInfo("America/New_York"))

    data, footer = write(books, span=days)

    expected = NATIVE.format(account=books.account.id, key=books.key.prefix, price=books.price_id)
    assert data.decode() == expected
    assert footer.amount_nanos == 2**53 + 1 + 500 - 7


def test_equal_charges_are_itemised_once(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        order = books.order()
        with books.database.transaction() as connection:
            hold(connection, [order])
        books.settle(done(order.request_id, input_tokens=6, output_tokens=3))
    itemised = []
    original = focus.charged_lines

    def charged_lines(
        connection: Connection, row: Any, prices: PriceCache, steps: None
    ) -> Iterator[Line]:
        itemised.append(row["request_id"])
        return original(connection, row, prices, steps)

    monkeypatch.setattr(focus, "charged_lines", charged_lines)
    found = rows(write(books, profile="focus")[0])

    # Seven different ones, the last of which has three equals.
    assert len(itemised) == 7
    assert sum(row["ConsumedQuantity"] == "6" for row in found) == 4


def test_file_written_in_parts_equals_one_written_at_once(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = write(books)
    monkeypatch.setattr(pages, "PAGE_ROWS", 2)

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
