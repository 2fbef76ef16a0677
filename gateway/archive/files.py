"""The files of an archive: Parquet with the rows of a month, exactly as they are in SQL.

Moments are microseconds since 1970, and JSON is the text that the database stores, so that a row
that is read back equals the row that was written, bit for bit. Rows are sorted by their key, and a
row group is a page of them, so its minimum and maximum tell which group has a key. The digest of
each file is in the manifest. Whatever moves money reads whole files and compares their digest; a
single receipt that is only displayed is read by its row group, which has checksums of its pages.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Select,
    String,
    Table,
    cast,
    exists,
    func,
    select,
    tuple_,
)

from gateway.archive.manifest import ArchiveFile, Manifest, Name, Sum
from gateway.archive.seal import SealDigest, sealed_columns
from gateway.errors import Unavailable
from gateway.ledger.periods import span_of
from gateway.sql.arrow import read_table
from gateway.sql.database import microseconds
from gateway.tables.core import receipts, transfers
from gateway.tables.settlement_time import booked_in, receipt_ids_of, settled_in
from gateway.tables.workflows import receipt_steps
from workers.contract.blobs import BlobError, BlobMissing, Blobs

PREFIX: Final = "archive"
"""First part of the keys of its blobs, where those of requests have the number of an account."""
TABLES: Final[dict[Name, Table]] = {
    "receipts": receipts,
    "receipt_steps": receipt_steps,
    "transfers": transfers,
}
ORDER: Final[dict[Name, tuple[str, ...]]] = {
    "receipts": ("request_id",),
    "receipt_steps": ("request_id", "seq"),
    "transfers": ("id",),
}
PAGE_ROWS: Final = 20_000
"""Rows of a row group; they are read in one short transaction."""
FILE_PAGES: Final = 10
"""Row groups of a file, which is read and written in memory: some 20 MB."""


class ArchiveDamaged(ValueError):
    """The files of an archive do not contain what was archived. Nothing was changed."""


class Totals:
    """Recomputes a manifest from rows, which are added in the order of ``TABLES``."""

    def __init__(self, month: str) -> None:
        self._month = month
        self._seal = SealDigest()
        self._rows = dict.fromkeys(TABLES, 0)
        self._charged = 0
        self._personal = 0
        self._transfers: dict[str, Sum] = {}

    def add(self, name: Name, page: pa.Table) -> None:
        self._rows[name] += page.num_rows
        personal = [page[c].is_valid() for c in ("metadata", "error") if c in page.column_names]
        if personal:
            self._personal += pc.sum(functools.reduce(pc.or_, personal)).as_py() or 0
        if name == "receipt_steps":
            return
        columns = [page[column.name].to_pylist() for column in sealed_columns(TABLES[name])]
        self._seal.add(zip(*columns, strict=True))
        if name == "receipts":
            self._charged += pc.sum(page["charge_nanos"]).as_py() or 0
            return
        for kind, amount in zip(
            *(page[c].to_pylist() for c in ("kind", "amount_nanos")), strict=True
        ):
            known = self._transfers.get(kind, Sum(0, 0))
            self._transfers[kind] = Sum(known.count + 1, known.nanos + amount)

    def manifest(self, files: Sequence[ArchiveFile] = ()) -> Manifest:
        return Manifest(
            self._month,
            self._seal.sha256,
            self._rows["receipts"],
            self._charged,
            self._rows["receipt_steps"],
            self._personal,
            self._transfers,
            tuple(files),
        )


def read_page(
    connection: Connection, month: str, name: Name, after: tuple[Any, ...] | None, rows: int
) -> pa.Table | None:
    """Read the rows of a month after a key from the database; None if there are none."""
    table, order = TABLES[name], _order(name)
    query: Select[Any] = select(*map(_stored, table.c))
    query = query.where(*_of_month(connection, table, month))
    if after is not None:
        query = query.where(order[0] > after[0] if len(order) == 1 else tuple_(*order) > after)
    page = read_table(connection, query.order_by(*order).limit(rows))
    return None if page is None else page.cast(schema_of(name))


def key_of(name: Name, page: pa.Table, row: int = -1) -> tuple[Any, ...]:
    """Return the key of a row of a page."""
    return tuple(page[column][row].as_py() for column in ORDER[name])


def write_file(key: str, name: Name, pages: Sequence[pa.Table]) -> tuple[bytes, ArchiveFile]:
    """Encode pages as one file, with a row group for each."""
    sink = io.BytesIO()
    writer = pyarrow.parquet.ParquetWriter(
        sink, schema_of(name), compression="zstd", write_page_checksum=True
    )
    for page in pages:
        writer.write_table(page, row_group_size=page.num_rows)
    writer.close()
    charges: tuple[int | None, int | None] = (None, None)
    if name == "receipts":
        ranges = [pc.min_max(page["transfer_id"]).as_py() for page in pages]
        lows = [each["min"] for each in ranges if each["min"] is not None]
        highs = [each["max"] for each in ranges if each["max"] is not None]
        charges = (min(lows, default=None), max(highs, default=None))
    data = sink.getvalue()
    first, last = key_of(name, pages[0], 0)[0], key_of(name, pages[-1])[0]
    rows = sum(page.num_rows for page in pages)
    return data, ArchiveFile(name, key, rows, len(data), "", first, last, *charges)


async def read_file(blobs: Blobs, file: ArchiveFile) -> list[pa.Table]:
    """Read a whole file, compare it with its digest, and return its row groups."""
    return open_groups(await blobs.get(file.ref), file.table)


def read_pages(
    blobs: Blobs, manifest: Manifest, name: Name, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the row groups of a table, in the order of its keys, from files that have their
    digests.

    Blocks: use it in a thread. Raise ``Unavailable``, which names the file, if one is missing,
    damaged or cannot be read.
    """
    schema = schema_of(name)
    if columns is not None:
        schema = pa.schema([schema.field(column) for column in columns])
    for file in manifest.of(name):
        data = read_verified(blobs, file)
        found = pyarrow.parquet.ParquetFile(pa.BufferReader(data))
        for group in range(found.num_row_groups):
            yield _completed(found.read_row_group(group, columns=columns), schema).cast(schema)


def read_verified(blobs: Blobs, file: ArchiveFile) -> bytes:
    """Read a file that has its digest. Blocks; raise ``Unavailable`` like ``read_pages``."""
    try:
        with blobs.open(file.key) as source:
            data = source.read(file.bytes + 1) or b""
    except BlobMissing:
        problem = "is missing"
    except BlobError:
        problem = "cannot be read"
    else:
        if hashlib.sha256(data).hexdigest() == file.sha256:
            return data
        problem = "is damaged: it does not have the SHA-256 of the manifest"
    raise _unavailable(file, problem)


def open_groups(data: bytes, name: Name) -> list[pa.Table]:
    found = pyarrow.parquet.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    return [
        _completed(found.read_row_group(group), schema_of(name)).cast(schema_of(name))
        for group in range(found.num_row_groups)
    ]


def rows_with(blobs: Blobs, manifest: Manifest, name: Name, value: str) -> list[dict[str, Any]]:
    """Read the rows of a request from the row groups that can have it. Blocks."""
    rows: list[dict[str, Any]] = []
    for file in manifest.of(name):
        if str(file.first) <= value <= str(file.last):
            for page in read_groups(blobs, file, "request_id", [(value, value)]):
                rows += matching(page, "request_id", [value])
    return rows


def read_groups(
    blobs: Blobs,
    file: ArchiveFile,
    column: str,
    ranges: Sequence[tuple[Any, Any]],
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """Yield the row groups of a file that can have values of a column in one of the ranges, whose
    ends are included.

    Only these row groups are transferred, so the digest of the file is not compared: use it for
    what is displayed. Blocks; raise ``Unavailable`` like ``read_pages``.
    """
    schema = schema_of(file.table)
    place = schema.get_field_index(column)
    if columns is not None:
        schema = pa.schema([schema.field(each) for each in columns])
    try:
        with blobs.open(file.key) as source:
            found = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
            for group in range(found.num_row_groups):
                known = found.metadata.row_group(group).column(place).statistics
                if known.has_min_max and any(
                    known.min <= last and first <= known.max for first, last in ranges
                ):
                    page = found.read_row_group(group, columns=columns)
                    yield _completed(page, schema).cast(schema)
    except BlobMissing as error:
        raise _unavailable(file, "is missing") from error
    except BlobError as error:
        raise _unavailable(file, "cannot be read") from error
    except (OSError, pa.ArrowException) as error:
        raise _unavailable(file, "is damaged: its pages do not have their checksums") from error


def _unavailable(file: ArchiveFile, problem: str) -> Unavailable:
    return Unavailable(
        "archive_unavailable", f"The file {file.key} of the archive {problem}.", should_retry=False
    )


def _completed(page: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema. Those that did not exist when a file was written are NULL."""
    known = set(page.column_names)
    for field in schema:
        if field.name not in known:
            page = page.append_column(field, pa.nulls(page.num_rows, field.type))
    return page.select(schema.names)


def matching(page: pa.Table, column: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the rows of a page whose column has one of the values."""
    wanted = pc.is_in(page[column], pa.array(values, page.schema.field(column).type))
    rows: list[dict[str, Any]] = page.filter(wanted).to_pylist()
    return rows


def schema_of(name: Name) -> pa.Schema:
    return pa.schema(
        [
            (column.name, pa.string() if _is_text(column) else pa.int64())
            for column in TABLES[name].c
        ]
    )


@dataclass(frozen=True, slots=True)
class Size:
    """Number of rows of a month, and about how many bytes its files would have."""

    receipts: int
    steps: int
    transfers: int
    bytes: int


def estimate(connection: Connection, month: str) -> Size:
    """Count the rows of a month, and estimate the bytes of its files from the first of them."""
    counts, size = {}, 0
    for name, table in TABLES.items():
        counted = select(func.count()).select_from(table)
        counts[name] = connection.execute(
            counted.where(*_of_month(connection, table, month))
        ).scalar_one()
        page = read_page(connection, month, name, None, PAGE_ROWS)
        if page is not None:
            data, file = write_file("", name, [page])
            size += len(data) * counts[name] // file.rows
    return Size(counts["receipts"], counts["receipt_steps"], counts["transfers"], size)


def _of_month(connection: Connection, table: Table, month: str) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the rows of a month, which is read in the order of its keys."""
    span = span_of(month)
    if table is transfers:
        return booked_in(connection, span)
    if table is receipts:
        return settled_in(connection, span)
    of_step = receipts.c.request_id == table.c.request_id
    return [
        exists().where(of_step, *settled_in(connection, span)),
        *receipt_ids_of(connection, span, table.c.request_id),
    ]


def chunks(rows: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _order(name: Name) -> list[Column[Any]]:
    return [TABLES[name].c[column] for column in ORDER[name]]


def _stored(column: Column[Any]) -> Any:
    if column.name.endswith("_at"):
        return microseconds(column).label(column.name)
    return cast(column, String).label(column.name) if isinstance(column.type, JSON) else column


def _is_text(column: Column[Any]) -> bool:
    return isinstance(column.type, String | JSON)
