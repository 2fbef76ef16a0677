"""The FOCUS profile of exports: one row per priced line of a charge, and one per refund.

Columns follow the FinOps Open Cost and Usage Specification 1.2, focus.finops.org. The lines of a
request sum exactly to its charge, so BilledCost sums to what the ledger booked. The specification
describes what a customer pays; what that costs the provider is in columns of our own (``x_``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, Select, String, cast, select

from gateway.billing.exports.archived import ArchivedReceipts, ExportReader
from gateway.billing.exports.footer import Format
from gateway.billing.exports.native import (
    margin_columns,
    usd,
    usd_text,
    utc_text,
    with_margins,
)
from gateway.billing.exports.pages import (
    charge_pages,
    look_up,
    refund_pages,
    span_conditions,
)
from gateway.billing.lines import charged_lines
from gateway.billing.usage.report import Filters, Span
from gateway.checks.moments import timestamp
from gateway.ledger.closed import UNITS
from gateway.ledger.prices import PriceCache, read_price
from gateway.ledger.steps import StepLine
from gateway.pricing import Line, format_usd
from gateway.sql.database import microseconds
from gateway.tables.core import accounts, keys, receipts, refunds

_AMOUNTS: Final = ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost")
_TEXTS: Final = (
    "BillingCurrency",
    "BillingPeriodStart",
    "BillingPeriodEnd",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingQuantity",
    "PricingUnit",
    "PricingCategory",
    "ListUnitPrice",
    "ServiceName",
    "ServiceCategory",
    "ProviderName",
    "PublisherName",
    "InvoiceIssuerName",
    "BillingAccountId",
    "BillingAccountName",
    "SubAccountId",
    "SubAccountName",
    "ResourceId",
    "ResourceName",
    "SkuId",
    "SkuPriceId",
    "Tags",
)
CSV: Final = pa.schema(
    [
        *((name, pa.string()) for name in _AMOUNTS),
        *((name, pa.string()) for name in _TEXTS),
        ("x_AmountNanos", pa.int64()),
    ]
)
PARQUET: Final = pa.schema(
    [
        *((name, pa.decimal128(19, 9)) for name in _AMOUNTS),
        *((name, pa.string()) for name in _TEXTS),
        ("x_AmountNanos", pa.int64()),
    ]
)
AMOUNT: Final = "x_AmountNanos"
_MARGIN: Final = ("x_OperatorCost", "x_OperatorCostNanos", "x_Margin", "x_MarginNanos")
_ITEMIZED: Final = ("request_id", "price_id", "charge_nanos", "attributes", *UNITS)
"""Columns of a page of which the lines of a charge are made."""


def focus_schema(format: Format, *, margins: bool) -> pa.Schema:
    schema = CSV if format == "csv" else PARQUET
    return with_margins(schema, _MARGIN, format) if margins else schema


def focus_tables(
    read: ExportReader, span: Span, filters: Filters, schema: pa.Schema, archived: ArchivedReceipts
) -> Iterator[pa.Table]:
    """Yield the lines of charges booked in a span, then its refunds."""
    prices: PriceCache = {}
    archived = replace(archived, with_steps=True)
    prefixes: dict[int, str] = {}
    names: dict[int, str] = {}

    def named(connection: Connection, page: pa.Table) -> pa.Table:
        account = look_up(connection, page["account_id"], accounts.c.id, accounts.c.name, names)
        prefix = look_up(connection, page["key_id"], keys.c.id, keys.c.prefix, prefixes)
        return page.append_column("account", account).append_column("prefix", prefix)

    def itemize(connection: Connection, page: pa.Table) -> pa.Table:
        return _charge_table(connection, named(connection, page), prices, schema, archived.steps)

    def list_refunds(connection: Connection, page: pa.Table) -> pa.Table:
        return _refund_table(named(connection, page), schema)

    charges = _charged(span, filters)
    if _MARGIN[0] in schema.names:
        charges = charges.add_columns(receipts.c.expense_nanos)
    yield from charge_pages(read, charges, span, filters, itemize, archived)
    yield from refund_pages(read, _returned(), span, filters, list_refunds)


def _charged(span: Span, filters: Filters) -> Select[Any]:
    return (
        _rows(receipts.c.settled_at)
        .add_columns(
            receipts.c.charge_nanos,
            *(receipts.c[unit] for unit in UNITS),
            cast(receipts.c.attributes, String).label("attributes"),
        )
        .where(*span_conditions(span, filters), receipts.c.outcome == "charged")
    )


def _returned() -> Select[Any]:
    rows = _rows(refunds.c.booked_at).add_columns(refunds.c.kind, refunds.c.amount_nanos)
    return rows.join(refunds, refunds.c.request_id == receipts.c.request_id)


def _rows(moment: Any) -> Select[Any]:
    return select(
        microseconds(moment).label("booked_us"),
        microseconds(receipts.c.accepted_at).label("accepted_us"),
        receipts.c.request_id,
        receipts.c.account_id,
        receipts.c.key_id,
        receipts.c.model,
        receipts.c.task,
        receipts.c.price_id,
        cast(receipts.c["metadata"], String).label("metadata"),
    ).select_from(receipts)


def _charge_table(
    connection: Connection,
    page: pa.Table,
    prices: PriceCache,
    schema: pa.Schema,
    steps: dict[str, list[StepLine]],
) -> pa.Table:
    lines = _itemize(connection, page, prices, steps)
    rows = pa.array(lines.rows, pa.int32())
    columns = {name: pc.take(column, rows) for name, column in _common(page).items()}
    priced = lines.columns()
    model, unit = columns["ResourceName"], priced["ConsumedUnit"]
    columns |= priced | {
        "ChargeCategory": pa.repeat("Usage", len(rows)),
        "ChargeDescription": pc.binary_join_element_wise(model, unit, ": "),
        "PricingCategory": pa.repeat("Standard", len(rows)),
        "SkuId": pc.binary_join_element_wise(model, unit, "/"),
    }
    costs = None
    if _MARGIN[0] in schema.names:
        # The cost of a request is on the first of its lines, so that the column sums to it.
        place = zip(lines.rows, (-1, *lines.rows), strict=False)
        is_first = pa.array([row != before for row, before in place], pa.bool_())
        own = pc.take(_column(page, "expense_nanos"), rows)
        costs = pc.if_else(is_first, own, pa.scalar(0, pa.int64()))
    return _table(columns, pa.array(lines.amounts, pa.int64()), schema, costs)


def _refund_table(page: pa.Table, schema: pa.Schema) -> pa.Table:
    kind, rows = page["kind"].combine_chunks(), page.num_rows
    refunded = pc.equal(kind, "refund")
    columns = _common(page) | {
        "ChargeCategory": pc.if_else(refunded, "Credit", "Adjustment"),
        "ChargeClass": pa.repeat("Correction", rows),
        "ChargeDescription": pc.binary_join_element_wise(kind, _column(page, "request_id"), " of "),
    }
    return _table(columns, pc.negate(_column(page, "amount_nanos")), schema)


@dataclass(slots=True)
class _Lines:
    """The lines of a page of charges, by column."""

    rows: list[int] = field(default_factory=list)
    """Place of each line's charge in the page."""
    priced: list[int] = field(default_factory=list)
    """Place of each line in ``distinct``."""
    amounts: list[int] = field(default_factory=list)
    distinct: dict[tuple[str, str, int, int], int] = field(default_factory=dict)
    """Unit, quantity, unit price and its number of units, which are formatted once."""

    def add(self, row: int, line: Line) -> None:
        key = (line.unit, line.quantity, line.price_nanos, line.per)
        self.rows.append(row)
        self.priced.append(self.distinct.setdefault(key, len(self.distinct)))
        self.amounts.append(line.amount_nanos)

    def columns(self) -> dict[str, pa.Array]:
        """Return the columns of units, quantities and unit prices."""
        found: dict[str, list[str]] = {
            "ConsumedUnit": [unit for unit, _, _, _ in self.distinct],
            "ConsumedQuantity": [quantity for _, quantity, _, _ in self.distinct],
            "PricingUnit": [
                unit if per == 1 else f"{per} {unit}" for unit, _, _, per in self.distinct
            ],
            "PricingQuantity": [
                _priced_quantity(quantity, per) for _, quantity, _, per in self.distinct
            ],
            "ListUnitPrice": [format_usd(nanos) for _, _, nanos, _ in self.distinct],
        }
        places = pa.array(self.priced, pa.int32())
        return {name: pa.array(texts, pa.string()).take(places) for name, texts in found.items()}


def _itemize(
    connection: Connection,
    page: pa.Table,
    prices: PriceCache,
    steps: dict[str, list[StepLine]],
) -> _Lines:
    """Recompute the lines of each charge, once for all charges that look the same.

    ``steps`` are those of archived requests, which are taken from it.
    """
    lines = _Lines()
    known: dict[tuple[Any, ...], list[Line]] = {}
    columns = (page[name].to_pylist() for name in _ITEMIZED)
    for number, values in enumerate(zip(*columns, strict=True)):
        # All values but the request's id.
        found = known.get(values[1:])
        if found is None:
            row = dict(zip(_ITEMIZED, values, strict=True))
            row["attributes"] = msgspec.json.decode(row["attributes"] or "null")
            own = steps.pop(row["request_id"], None)
            found = list(charged_lines(connection, row, prices, own))
            # A workflow without a price is charged for its steps, which are its own.
            if read_price(connection, row["price_id"], prices).components:
                known[values[1:]] = found
        for line in found:
            lines.add(number, line)
    return lines


@functools.lru_cache(100_000)
def _priced_quantity(quantity: str, per: int) -> str:
    return quantity if per == 1 else format(Decimal(quantity) / per, "f")


def _common(page: pa.Table) -> dict[str, pa.Array]:
    """Return the columns that charges and refunds have in common, one row for each."""
    booked = _column(page, "booked_us")
    starts, ends = _billing_period(booked)
    same = {
        "BillingCurrency": "USD",
        "ChargeFrequency": "Usage-Based",
        "ServiceCategory": "AI and Machine Learning",
        "ProviderName": "Tollgate",
        "PublisherName": "Tollgate",
        "InvoiceIssuerName": "Tollgate",
    }
    return {
        **{name: pa.repeat(text, page.num_rows) for name, text in same.items()},
        "BillingPeriodStart": starts,
        "BillingPeriodEnd": ends,
        "ChargePeriodStart": utc_text(_column(page, "accepted_us")),
        "ChargePeriodEnd": utc_text(booked),
        "ServiceName": _column(page, "task"),
        "BillingAccountId": _column(page, "account_id").cast(pa.string()),
        "BillingAccountName": _column(page, "account"),
        "SubAccountId": _column(page, "key_id").cast(pa.string()),
        "SubAccountName": _column(page, "prefix"),
        "ResourceId": _column(page, "request_id"),
        "ResourceName": _column(page, "model"),
        "SkuPriceId": _column(page, "price_id").cast(pa.string()),
        "Tags": _each_once(_column(page, "metadata").fill_null("{}"), _tags),
    }


def _billing_period(moments_us: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the start and the end of the calendar month (UTC) of each moment."""
    starts = pc.floor_temporal(moments_us.cast(pa.timestamp("us")), unit="month")

    def following(start: datetime) -> datetime:
        return (start + timedelta(days=32)).replace(day=1)

    return (
        _each_once(starts, lambda start: timestamp(start.replace(tzinfo=UTC))),
        _each_once(starts, lambda start: timestamp(following(start.replace(tzinfo=UTC)))),
    )


def _tags(metadata: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(metadata), order="sorted").decode()


def _each_once(values: pa.Array, function: Callable[[Any], str]) -> pa.Array:
    """Apply a function to each distinct value."""
    encoded = values.dictionary_encode()
    texts = [function(value) for value in encoded.dictionary.to_pylist()]
    return pc.take(pa.array(texts, pa.string()), encoded.indices)


def _column(page: pa.Table, name: str) -> pa.Array:
    return page[name].combine_chunks()


def _table(
    columns: Mapping[str, pa.Array],
    nanos: pa.Array,
    schema: pa.Schema,
    costs: pa.Array | None = None,
) -> pa.Table:
    """Build a table; with margins, rows without ``costs`` cost nothing."""
    decimals = not pa.types.is_string(schema.field(_AMOUNTS[0]).type)
    amounts = usd(nanos) if decimals else usd_text(nanos)
    none = pa.nulls(len(nanos), pa.string())
    texts = [columns.get(name, none) for name in _TEXTS]
    arrays = [amounts] * len(_AMOUNTS) + texts + [nanos]
    if _MARGIN[0] in schema.names:
        if costs is None:
            costs = pa.repeat(pa.scalar(0, pa.int64()), len(nanos))
        arrays += margin_columns(nanos, costs, decimals=decimals)
    return pa.Table.from_arrays(arrays, schema=schema)
