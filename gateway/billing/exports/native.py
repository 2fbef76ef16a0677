"""The native profile of exports, and what both profiles share: streamed CSV and Parquet files.

The same books give the same bytes. Rows are sorted by request, refunds after charges. They are read
in pages, each in a short transaction, because a connection must not wait for a slow client. Rows
booked before the end of the span never change and none are added, so the pages are consistent.
Amounts are given as decimals and as nano-dollars; those of refunds are negative, so that the column
sums to what was paid. ``Footer`` has the number of rows, their sum, and a digest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol, TypeVar
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from sqlalchemy import (
    BigInteger,
    Connection,
    Select,
    String,
    cast,
    func,
    literal,
    null,
    select,
    tuple_,
)

from gateway.billing.exports.footer import Footer, Format
from gateway.billing.usage.report import Filters, Span
from gateway.ids import first_request_id
from gateway.pricing import NANOS_PER_USD
from gateway.sql.database import microseconds
from gateway.tables.core import QUANTITIES, keys, receipts, refunds

T = TypeVar("T")

CHUNK: Final = 20_000
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


class ExportReader(Protocol):
    """Runs a function in a read-only transaction."""

    def __call__(self, function: Callable[[Connection], T], /) -> T: ...


def connection_reader(connection: Connection) -> ExportReader:
    """Return a reader that uses one transaction of this thread."""

    def read(function: Callable[[Connection], T]) -> T:
        return function(connection)

    return read


def native_tables(
    read: ExportReader, span: Span, filters: Filters, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Yield what was booked in a span: charges by request, then refunds by request."""
    for pages in (
        charge_pages(read, _charges(span, filters), span, filters, keep_rows),
        refund_pages(read, _refunds(span, filters), keep_rows),
    ):
        for rows in pages:
            yield _table(rows, span.zone, schema)


def charge_pages(
    read: ExportReader,
    query: Select[Any],
    span: Span,
    filters: Filters,
    make: Callable[[Connection, Sequence[Any]], T],
) -> Iterator[T]:
    """Read receipts in pages by request id; yield ``make`` of each page, run in its transaction."""
    id = receipts.c.request_id
    # An expression, so that the planner uses the index on the time of booking, not that of the ids.
    borders = select(func.min(func.substr(id, 1)), func.max(func.substr(id, 1)))
    borders = borders.where(*span_conditions(span, filters))
    first, last = read(lambda connection: connection.execute(borders).one())
    if first is None:
        return
    place: Any = id >= first
    while True:
        page = query.where(place, id <= last).order_by(id).limit(CHUNK)
        made, rows = read(functools.partial(_page, page=page, make=make))
        if made is not None:
            yield made
        if len(rows) < CHUNK:
            return
        place = id > rows[-1].request_id


def refund_pages(
    read: ExportReader, query: Select[Any], make: Callable[[Connection, Sequence[Any]], T]
) -> Iterator[T]:
    """Read refunds in pages by request and number, as ``charge_pages`` does receipts."""
    order = (refunds.c.request_id, refunds.c.seq)
    query = query.add_columns(refunds.c.seq.label("seq")).order_by(*order).limit(CHUNK)
    page = query
    while True:
        made, rows = read(functools.partial(_page, page=page, make=make))
        if made is not None:
            yield made
        if len(rows) < CHUNK:
            return
        page = query.where(tuple_(*order) > (rows[-1].request_id, rows[-1].seq))


def keep_rows(_: Connection, rows: Sequence[Any]) -> Sequence[Any]:
    return rows


def _page(
    connection: Connection,
    *,
    page: Select[Any],
    make: Callable[[Connection, Sequence[Any]], T],
) -> tuple[T | None, Sequence[Any]]:
    rows = connection.execute(page).all()
    return make(connection, rows) if rows else None, rows


def span_conditions(span: Span, filters: Filters) -> list[Any]:
    """Return SQL conditions for receipts that were booked in a span."""
    conditions: list[Any] = [
        receipts.c.settled_at >= span.starts_at,
        receipts.c.settled_at < span.ends_at,
        # Ids are time-ordered and never later than their booking, but can be arbitrarily earlier:
        # an upper bound only.
        receipts.c.request_id < first_request_id(span.ends_at + timedelta(hours=1)),
    ]
    return conditions + filter_conditions(filters)


def filter_conditions(filters: Filters) -> list[Any]:
    """Return SQL conditions for receipts of the requested accounts, keys, models and tasks."""
    return [
        receipts.c[name].in_(values)
        for name in ("account_id", "key_id", "model", "task")
        if (values := getattr(filters, f"{name}s")) is not None
    ]


def _charges(span: Span, filters: Filters) -> Select[Any]:
    return (
        select(
            literal("charge"),
            receipts.c.request_id,
            microseconds(receipts.c.settled_at),
            microseconds(receipts.c.accepted_at),
            receipts.c.account_id,
            keys.c.prefix,
            *(receipts.c[name] for name in _DETAILS[1:]),
            receipts.c.price_id,
            receipts.c.charge_nanos,
            *(receipts.c[name] for name in QUANTITIES),
            cast(receipts.c["metadata"], String),
        )
        .join(keys, keys.c.id == receipts.c.key_id)
        .where(*span_conditions(span, filters))
    )


def _refunds(span: Span, filters: Filters) -> Select[Any]:
    none = cast(null(), BigInteger)
    return (
        select(
            refunds.c.kind,
            receipts.c.request_id,
            microseconds(refunds.c.booked_at),
            microseconds(receipts.c.accepted_at),
            receipts.c.account_id,
            keys.c.prefix,
            *(receipts.c[name] for name in _DETAILS[1:]),
            receipts.c.price_id,
            -refunds.c.amount_nanos,
            *(none.label(name) for name in QUANTITIES),
            cast(receipts.c["metadata"], String),
        )
        .join(receipts, receipts.c.request_id == refunds.c.request_id)
        .join(keys, keys.c.id == receipts.c.key_id)
        .where(
            refunds.c.booked_at >= span.starts_at,
            refunds.c.booked_at < span.ends_at,
            *filter_conditions(filters),
        )
    )


def _table(rows: Sequence[Any], zone: ZoneInfo, schema: pa.Schema) -> pa.Table:
    # Rows of refunds end with their number, which is not a column of the file.
    columns: list[Any] = list(zip(*rows, strict=True))[: len(CSV_SCHEMA) - 2]
    count = len(_DETAILS)
    kind, request, booked, accepted, account = columns[:5]
    details, price, nanos = columns[5 : 5 + count], columns[5 + count], columns[6 + count]
    quantities, metadata = columns[7 + count : -1], columns[-1]
    booked_us = pa.array(booked, pa.int64())
    amounts = pa.array(nanos, pa.int64())
    arrays = [
        pa.array(kind, pa.string()),
        pa.array(request, pa.string()),
        utc_text(booked_us),
        local_text(booked_us, zone),
        utc_text(pa.array(accepted, pa.int64())),
        pa.array(account, pa.int64()),
        *(pa.array(values, pa.string()) for values in details),
        pa.array(price, pa.int64()),
        usd(amounts) if schema is PARQUET_SCHEMA else usd_text(amounts),
        amounts,
        *(pa.array(values, pa.int64()) for values in quantities),
        pa.array(metadata, pa.string()),
    ]
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
    text = pc.strftime(moments_us.cast(pa.timestamp("us")), format="%Y-%m-%dT%H:%M:%S")
    return pc.binary_join_element_wise(text, "Z", "")


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
    local = pc.add(moments_us, pc.take(shift, places)).cast(pa.timestamp("us"))
    text = pc.strftime(local, format="%Y-%m-%dT%H:%M:%S")
    return pc.binary_join_element_wise(text, pc.take(suffix, places), "")


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
