"""The native profile of exports, and what both profiles share: streamed CSV and Parquet files.

The same books give the same bytes. Amounts are given as decimals and as nano-dollars; those of
refunds are negative, so that the column sums to what was paid. ``Footer`` has the number of rows,
their sum, and a digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from sqlalchemy import BigInteger, Connection, Select, String, cast, literal, null, select

from gateway.billing.exports.archived import ArchivedReceipts, ExportReader
from gateway.billing.exports.footer import Footer, Format
from gateway.billing.exports.pages import (
    charge_pages,
    look_up,
    refund_pages,
    span_conditions,
)
from gateway.billing.usage.report import Filters, Span
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import microseconds
from gateway.tables.core import QUANTITIES, keys, receipts, refunds

ROW_GROUP: Final = 100_000

_USD: Final = pa.decimal128(19, 9)
_DETAILS: Final = ("key", "model", "task", "status", "outcome", "reason", "service_class")
_QUARTER_US: Final = 900_000_000

CSV_SCHEMA: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("request_id", pa.string()),
        ("booked_at", pa.string()),
        ("booked_at_local", pa.string()),
        ("accepted_at", pa.string()),
        ("account_id", pa.int64()),
        *((name, pa.string()) for name in _DETAILS),
        ("price_id", pa.int64()),
        ("amount_usd", pa.string()),
        ("amount_nanos", pa.int64()),
        *((name, pa.int64()) for name in QUANTITIES),
        ("metadata", pa.string()),
    ]
)

# Amounts are text in CSV and decimals in Parquet.
PARQUET_SCHEMA: Final = CSV_SCHEMA.set(
    CSV_SCHEMA.get_field_index("amount_usd"), pa.field("amount_usd", _USD)
)
_MARGIN: Final = ("operator_cost_usd", "operator_cost_nanos", "margin_usd", "margin_nanos")


def write(
    tables: Iterator[pa.Table], schema: pa.Schema, format: Format, footer: Footer, *, amount: str
) -> Iterator[bytes]:
    """Yield a file of tables with one schema, in parts; ``footer`` sums the column ``amount``."""
    sink = _Sink()
    if format == "csv":
        options = pyarrow.csv.WriteOptions(quoting_style="needed")
        csv = pyarrow.csv.CSVWriter(sink.file, schema, write_options=options)
        put: Callable[[pa.Table], None] = csv.write_table
        close = csv.close
        wait = 0
    else:
        parquet = pyarrow.parquet.ParquetWriter(sink.file, schema, compression="zstd")
        put, wait = parquet.write_table, ROW_GROUP

        def close() -> None:
            parquet.add_key_value_metadata(
                {"rows": str(footer.rows), "amount_nanos": str(footer.amount_nanos)}
            )
            parquet.close()

    waiting: list[pa.Table] = []
    for table in tables:
        footer.rows += table.num_rows
        footer.amount_nanos += pc.sum(table[amount]).as_py() or 0
        waiting.append(table)
        if sum(each.num_rows for each in waiting) >= wait:
            put(pa.concat_tables(waiting).combine_chunks())
            waiting.clear()
            if data := sink.take():
                footer.digest.update(data)
                yield data
    if waiting:
        put(pa.concat_tables(waiting).combine_chunks())
    close()
    data = sink.take()
    footer.digest.update(data)
    yield data


def native_schema(format: Format, *, margins: bool) -> pa.Schema:
    schema = CSV_SCHEMA if format == "csv" else PARQUET_SCHEMA
    return with_margins(schema, _MARGIN, format) if margins else schema


def with_margins(schema: pa.Schema, names: Sequence[str], format: Format) -> pa.Schema:
    """Add the columns of ``margin_columns`` to a schema."""
    amount = pa.string() if format == "csv" else _USD
    for name, kind in zip(names, (amount, pa.int64(), amount, pa.int64()), strict=True):
        schema = schema.append(pa.field(name, kind))
    return schema


def margin_columns(nanos: pa.Array, costs: pa.Array, *, decimals: bool) -> list[pa.Array]:
    """Return the cost to the operator and the margin of each row, as USD and as nano-dollars; null
    where the cost is not known."""
    costs = costs.cast(pa.int64())
    margins = pc.subtract(nanos, costs)
    as_usd = usd if decimals else usd_text
    return [as_usd(costs), costs, as_usd(margins), margins]


def native_tables(
    read: ExportReader,
    span: Span,
    filters: Filters,
    schema: pa.Schema,
    archived: ArchivedReceipts,
) -> Iterator[pa.Table]:
    """Yield what was booked in a span: charges by request, then refunds by request."""

    prefixes: dict[int, str] = {}

    def make(connection: Connection, page: pa.Table) -> pa.Table:
        key = look_up(connection, page["key_id"], keys.c.id, keys.c.prefix, prefixes)
        return _table(page, key, span.zone, schema)

    charges, returned = _charges(span, filters), _refunds()
    if _MARGIN[0] in schema.names:
        charges = charges.add_columns(receipts.c.expense_nanos)
        # What a request cost is in the row of its charge.
        returned = returned.add_columns(literal(0, BigInteger).label("expense_nanos"))
    yield from charge_pages(read, charges, span, filters, make, archived)
    yield from refund_pages(read, returned, span, filters, make)


def _charges(span: Span, filters: Filters) -> Select[Any]:
    quantities = [receipts.c[name] for name in QUANTITIES]
    return _rows(receipts.c.settled_at, receipts.c.charge_nanos, quantities).where(
        *span_conditions(span, filters)
    )


def _refunds() -> Select[Any]:
    none = [cast(null(), BigInteger).label(name) for name in QUANTITIES]
    rows = _rows(refunds.c.booked_at, -refunds.c.amount_nanos, none).add_columns(refunds.c.kind)
    return rows.join(refunds, refunds.c.request_id == receipts.c.request_id)


def _rows(moment: Any, amount: Any, quantities: Sequence[Any]) -> Select[Any]:
    return select(
        receipts.c.request_id,
        microseconds(moment).label("booked_us"),
        microseconds(receipts.c.accepted_at).label("accepted_us"),
        receipts.c.account_id,
        receipts.c.key_id,
        *(receipts.c[name] for name in _DETAILS[1:]),
        receipts.c.price_id,
        amount.label("amount_nanos"),
        *quantities,
        cast(receipts.c["metadata"], String).label("metadata"),
    ).select_from(receipts)


def _table(page: pa.Table, key: pa.Array, zone: ZoneInfo, schema: pa.Schema) -> pa.Table:
    """Build a table of charges, or of refunds if the page has their kinds."""
    booked, amounts = (page[name].combine_chunks() for name in ("booked_us", "amount_nanos"))
    decimals = schema.field("amount_usd").type == _USD
    made = {
        "booked_at": utc_text(booked),
        "booked_at_local": local_text(booked, zone),
        "accepted_at": utc_text(page["accepted_us"].combine_chunks()),
        "key": key,
        "amount_usd": usd(amounts) if decimals else usd_text(amounts),
    }
    if "kind" not in page.column_names:
        made["kind"] = pa.repeat("charge", page.num_rows)
    if _MARGIN[0] in schema.names:
        costs = page["expense_nanos"].combine_chunks()
        columns = margin_columns(amounts, costs, decimals=decimals)
        made |= dict(zip(_MARGIN, columns, strict=True))
    arrays = [made[name] if name in made else page[name] for name in schema.names]
    return pa.Table.from_arrays(arrays, schema=schema)


def usd(nanos: pa.Array) -> pa.Array:
    """Convert nano-dollars to decimals of USD by reinterpreting the digits at scale 9."""
    keep_rows = nanos.cast(pa.decimal128(19, 0))
    return pa.Array.from_buffers(_USD, len(keep_rows), keep_rows.buffers(), offset=keep_rows.offset)


def usd_text(nanos: pa.Array) -> pa.Array:
    """Format nano-dollars as decimals of USD with nine digits after the point."""
    size = pc.abs(nanos)
    keep_rows = pc.divide(size, NANOS_PER_USD)
    rest = pc.subtract(size, pc.multiply(keep_rows, NANOS_PER_USD))
    digits = pc.utf8_lpad(rest.cast(pa.string()), 9, "0")
    text = pc.binary_join_element_wise(keep_rows.cast(pa.string()), digits, ".")
    sign = pc.if_else(pc.less(nanos, 0), "-", "")
    return pc.binary_join_element_wise(sign, text, "")


def utc_text(moments_us: pa.Array) -> pa.Array:
    """Format moments as RFC 3339 in UTC, to the microsecond."""
    return pc.binary_join_element_wise(_wall_clock(moments_us), "Z", "")


def local_text(moments_us: pa.Array, zone: ZoneInfo) -> pa.Array:
    """Format moments in a time zone; its offset is looked up once per quarter of an hour."""
    quarters = pc.divide(moments_us, _QUARTER_US)
    distinct = pc.unique(quarters)
    offsets = [
        datetime.fromtimestamp(quarter * 900, UTC).astimezone(zone).utcoffset() or timedelta(0)
        for quarter in distinct.to_pylist()
    ]
    places = pc.index_in(quarters, distinct)
    shift = pa.array([offset // timedelta(microseconds=1) for offset in offsets], pa.int64())
    suffix = pa.array([_offset(offset) for offset in offsets], pa.string())
    text = _wall_clock(pc.add(moments_us, pc.take(shift, places)))
    return pc.binary_join_element_wise(text, pc.take(suffix, places), "")


def _wall_clock(moments_us: pa.Array) -> pa.Array:
    # Casting takes a thirtieth of the time of ``strftime``, and separates by a space.
    text = moments_us.cast(pa.timestamp("us")).cast(pa.string())
    return pc.binary_replace_slice(text, 10, 11, "T")


class _Sink:
    """A file-like object that collects what a writer writes until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0
        self.file = pa.PythonFile(self, mode="w")
        self.closed = False

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def _offset(offset: timedelta) -> str:
    minutes = offset // timedelta(minutes=1)
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
