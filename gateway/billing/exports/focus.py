"""The FOCUS profile of exports: one row per priced line of a charge, and one per refund.

Columns follow the FinOps Open Cost and Usage Specification 1.2, focus.finops.org. The lines of a
request sum exactly to its charge, so BilledCost sums to what the ledger booked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa
from sqlalchemy import BigInteger, Connection, Select, cast, literal, null, select

from gateway.billing.exports.native import (
    ExportReader,
    charge_pages,
    filter_conditions,
    refund_pages,
    span_conditions,
    usd,
    usd_text,
)
from gateway.billing.lines import charged_lines
from gateway.billing.usage.report import Filters, Span
from gateway.checks.moments import timestamp
from gateway.ledger.closed import UNITS
from gateway.ledger.prices import PriceCache
from gateway.pricing import format_usd
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


def focus_tables(
    read: ExportReader, span: Span, filters: Filters, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Yield the lines of charges booked in a span, then its refunds."""
    prices: PriceCache = {}

    def itemize(connection: Connection, rows: Sequence[Any]) -> list[dict[str, Any]]:
        return [line for row in rows for line in _lines(connection, row._mapping, prices)]

    for pages in (
        charge_pages(read, _charged(span, filters), span, filters, itemize),
        refund_pages(read, _returned(span, filters), itemize),
    ):
        for lines in pages:
            if lines:
                yield _table(lines, schema)


def _charged(span: Span, filters: Filters) -> Select[Any]:
    none = cast(null(), BigInteger)
    return _rows(
        literal("charge").label("kind"), receipts.c.settled_at, none.label("returned")
    ).where(*span_conditions(span, filters), receipts.c.outcome == "charged")


def _returned(span: Span, filters: Filters) -> Select[Any]:
    return (
        _rows(refunds.c.kind, refunds.c.booked_at, refunds.c.amount_nanos.label("returned"))
        .join(refunds, refunds.c.request_id == receipts.c.request_id)
        .where(
            refunds.c.booked_at >= span.starts_at,
            refunds.c.booked_at < span.ends_at,
            *filter_conditions(filters),
        )
    )


def _rows(kind: Any, moment: Any, returned: Any) -> Select[Any]:
    return (
        select(
            kind,
            moment.label("moment"),
            returned,
            receipts.c.request_id,
            receipts.c.account_id,
            accounts.c.name.label("account"),
            receipts.c.key_id,
            keys.c.prefix,
            receipts.c.model,
            receipts.c.task,
            receipts.c.price_id,
            receipts.c.charge_nanos,
            receipts.c.accepted_at,
            receipts.c.attributes,
            receipts.c["metadata"],
            *(receipts.c[unit] for unit in UNITS),
        )
        .select_from(receipts)
        .join(accounts, accounts.c.id == receipts.c.account_id)
        .join(keys, keys.c.id == receipts.c.key_id)
    )


def _lines(connection: Connection, row: Any, prices: PriceCache) -> Iterator[dict[str, Any]]:
    common = _common(row)
    if row["kind"] != "charge":
        yield {
            **common,
            "nanos": -row["returned"],
            "ChargeCategory": "Credit" if row["kind"] == "refund" else "Adjustment",
            "ChargeClass": "Correction",
            "ChargeDescription": f"{row['kind']} of {row['request_id']}",
        }
        return
    for line in charged_lines(connection, row, prices):
        yield {
            **common,
            "nanos": line.amount_nanos,
            "ChargeCategory": "Usage",
            "ChargeDescription": f"{row['model']}: {line.unit}",
            "ConsumedQuantity": line.quantity,
            "ConsumedUnit": line.unit,
            "PricingQuantity": format(Decimal(line.quantity) / line.per, "f"),
            "PricingUnit": line.unit if line.per == 1 else f"{line.per} {line.unit}",
            "PricingCategory": "Standard",
            "ListUnitPrice": format_usd(line.price_nanos),
            "SkuId": f"{row['model']}/{line.unit}",
        }


def _common(row: Any) -> dict[str, Any]:
    moment: datetime = row["moment"]
    month = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (month + timedelta(days=32)).replace(day=1)
    return {
        "BillingCurrency": "USD",
        "BillingPeriodStart": timestamp(month),
        "BillingPeriodEnd": timestamp(following),
        "ChargePeriodStart": timestamp(row["accepted_at"]),
        "ChargePeriodEnd": timestamp(moment),
        "ChargeFrequency": "Usage-Based",
        "ServiceName": row["task"],
        "ServiceCategory": "AI and Machine Learning",
        "ProviderName": "Tollgate",
        "PublisherName": "Tollgate",
        "InvoiceIssuerName": "Tollgate",
        "BillingAccountId": str(row["account_id"]),
        "BillingAccountName": row["account"],
        "SubAccountId": str(row["key_id"]),
        "SubAccountName": row["prefix"],
        "ResourceId": row["request_id"],
        "ResourceName": row["model"],
        "SkuPriceId": str(row["price_id"]),
        "Tags": msgspec.json.encode(row["metadata"] or {}, order="sorted").decode(),
    }


def _table(lines: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    nanos = pa.array([line["nanos"] for line in lines], pa.int64())
    amounts = usd(nanos) if schema is PARQUET else usd_text(nanos)
    texts = [pa.array([line.get(name) for line in lines], pa.string()) for name in _TEXTS]
    return pa.Table.from_arrays([amounts] * len(_AMOUNTS) + texts + [nanos], schema=schema)
