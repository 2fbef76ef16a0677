"""Sums the receipts of a file of an archive for a usage report, with Arrow.

Only the row groups that have something of the report's ranges are read, and of these the columns
that it needs; one row group is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from gateway.archive.files import read_groups
from gateway.archive.manifest import ArchiveFile
from gateway.billing.usage.report import RUN, TAG, TIMES, ArchivedPart, UsageSums
from gateway.checks.moments import microseconds_of
from gateway.tables.core import QUANTITIES
from workers.contract.blobs import Blobs

LABEL_IDS: Final = {"account": "account_id", "key": "key_id"}
"""Labels whose values are ids in these columns."""
_FILTERED: Final = ("account_id", "key_id", "model", "task")
_COLUMNS: Final = (
    "settled_at", "outcome", "charge_nanos", "expense_nanos", "metadata", "run",
    *_FILTERED, *QUANTITIES,
)  # fmt: skip

Interval = tuple[int, int]
"""An interval in microseconds since 1970, whose end is included."""


def file_sums(
    blobs: Blobs, file: ArchiveFile, part: ArchivedPart, report: UsageSums
) -> list[dict[str, Any]]:
    """Sum the receipts of a file by labels and by their interval of the report, ``at``.

    Blocks; raise ``Unavailable`` if the file cannot be read.
    """
    ranges = [(microseconds_of(a), microseconds_of(b) - 1) for a, b in part.ranges]
    rows: list[dict[str, Any]] = []
    for group in read_groups(blobs, file, "settled_at", ranges, _COLUMNS):
        page = group.filter(_condition(group, ranges, report))
        if page.num_rows:
            labels = _labels(page, report)
            sums = _measures(page)
            table = pa.table({**labels, **sums}).group_by(list(labels))
            found = table.aggregate([(name, "sum") for name in sums])
            rows += found.rename_columns([*labels, *sums]).to_pylist()
    return rows


def _condition(page: pa.Table, ranges: Sequence[Interval], report: UsageSums) -> Any:
    booked, found = page["settled_at"], pa.repeat(False, page.num_rows)
    for first, last in ranges:
        within = pc.and_(pc.greater_equal(booked, first), pc.less_equal(booked, last))
        found = pc.or_(found, within)
    for name in _FILTERED:
        values = getattr(report.filters, f"{name}s")
        if values is not None:
            found = pc.and_(found, pc.is_in(page[name], pa.array(values, page[name].type)))
    for tag, value in report.filters.tags.items():
        found = pc.and_(found, pc.equal(_tag(page, tag), value))
    return found


def _tag(page: pa.Table, name: str) -> Any:
    """Return the values of a tag; one that a request lacks is empty."""
    return pc.fill_null(_member(page["metadata"], name), "")


def _labels(page: pa.Table, report: UsageSums) -> dict[str, Any]:
    labels: dict[str, Any] = {"at": pa.repeat(0, page.num_rows)}
    for name in report.by:
        if name in TIMES:
            labels["at"] = pc.divide(page["settled_at"], report.bucket_s * 1_000_000)
        elif name in LABEL_IDS:
            labels[name] = page[LABEL_IDS[name]]
        elif name in RUN:
            unknown = page["model"] if name == "served_by" else ""
            labels[name] = pc.coalesce(_member(page["run"], name), unknown)
        elif name.startswith(TAG):
            labels[name] = _tag(page, name.removeprefix(TAG))
        else:
            labels[name] = page[name]
    return labels


def _measures(page: pa.Table) -> dict[str, Any]:
    charged = pc.equal(page["outcome"], "charged")
    return {
        "requests": pa.repeat(1, page.num_rows),
        "charged": pc.cast(charged, pa.int64()),
        "cost_nanos": page["charge_nanos"],
        "expense_nanos": pc.fill_null(page["expense_nanos"], 0),
        "expensed": pc.cast(page["expense_nanos"].is_valid(), pa.int64()),
        **{unit: pc.if_else(charged, page[unit], 0) for unit in QUANTITIES},
    }


def _member(texts: Any, name: str) -> Any:
    """Return a member of JSON objects, or NULL. Each distinct text is decoded once."""
    encoded = texts.combine_chunks().dictionary_encode()
    values = [
        (msgspec.json.decode(text) or {}).get(name) for text in encoded.dictionary.to_pylist()
    ]
    return pa.array(values, pa.string()).take(encoded.indices)
