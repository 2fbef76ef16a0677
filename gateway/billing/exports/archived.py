"""Receipts of archived months as pages of an export, merged with those in the database.

The pages are those that the database would have given before, row by row and of the same size, so
the file has the same bytes. Receipts of an archived month are read from its files only, also those
that are still in the database, so each is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection, Select

from gateway.archive.bring_back import as_read
from gateway.archive.files import read_pages
from gateway.archive.marks import Archive
from gateway.billing.usage.report import Filters, Span
from gateway.checks.moments import microseconds_of
from gateway.ledger.steps import StepLine, read_step
from gateway.tables.workflows import receipt_steps
from workers.contract.blobs import Blobs

T = TypeVar("T")


class ExportReader(Protocol):
    """Runs a function in a read-only transaction."""

    def __call__(self, function: Callable[[Connection], T], /) -> T: ...


_STORED_AS: Final = {
    "booked_us": "settled_at",
    "accepted_us": "accepted_at",
    "amount_nanos": "charge_nanos",
}
"""Columns of pages that have another name in files."""
_FILTERED: Final = ("account_id", "key_id", "model", "task")


@dataclass(frozen=True, slots=True)
class ArchivedReceipts:
    """The receipts of a span that are in archives. ``steps``: those of workflow runs of the page
    that is being made, if ``with_steps``."""

    read: ExportReader
    blobs: Blobs | None
    archives: Sequence[Archive]
    with_steps: bool = False
    steps: dict[str, list[StepLine]] = field(default_factory=dict)

    def merged(
        self,
        stored: Iterator[pa.Table],
        query: Select[Any],
        span: Span,
        filters: Filters,
        *,
        rows: int,
    ) -> Iterator[pa.Table]:
        """Merge pages of the database with archived receipts, into pages of ``rows`` rows.

        The pages have the columns of ``query``, which selects charges only if ``with_steps``.
        """
        columns = [column.name for column in query.selected_columns]
        sources = [_Source("", stored)]
        for archive in self.archives:
            pages = self._pages(archive, columns, span, filters)
            sources.append(_Source(archive.first_id or "", pages))
        yield from _repaged(_merge(sources), rows)

    def _pages(
        self, archive: Archive, columns: Sequence[str], span: Span, filters: Filters
    ) -> Iterator[pa.Table]:
        """Yield the receipts of an archive that a query selects, with its columns."""
        assert archive.manifest is not None
        assert self.blobs is not None
        wanted = {_STORED_AS.get(name, name) for name in columns}
        wanted |= {"request_id", "settled_at", "outcome", *_FILTERED}
        steps = Steps(read_pages(self.blobs, archive.manifest, "receipt_steps"))
        for group in read_pages(self.blobs, archive.manifest, "receipts", sorted(wanted)):
            page = group.filter(self._condition(group, span, filters))
            if not page.num_rows:
                continue
            if self.with_steps:
                self.steps.update(steps.until(page["request_id"]))
            yield pa.table({name: page[_STORED_AS.get(name, name)] for name in columns})

    def _condition(self, page: pa.Table, span: Span, filters: Filters) -> Any:
        booked = page["settled_at"]
        found = pc.and_(
            pc.greater_equal(booked, microseconds_of(span.starts_at)),
            pc.less(booked, microseconds_of(span.ends_at)),
        )
        if self.with_steps:
            found = pc.and_(found, pc.equal(page["outcome"], "charged"))
        for name in _FILTERED:
            values = getattr(filters, f"{name}s")
            if values is not None:
                column = page[name]
                found = pc.and_(found, pc.is_in(column, pa.array(values, column.type)))
        return found


class Steps:
    """Steps of archived workflow runs, in the order of their requests."""

    def __init__(self, pages: Iterator[pa.Table]) -> None:
        self._pages = pages
        self._page: pa.Table | None = None

    def until(self, ids: Any) -> dict[str, list[StepLine]]:
        """Return the steps of some requests; later calls name later requests."""
        found: dict[str, list[StepLine]] = {}
        last = ids[-1].as_py()
        while True:
            if self._page is None:
                self._page = next(self._pages, None)
            if self._page is None:
                return found
            own = self._page.filter(pc.is_in(self._page["request_id"], ids.combine_chunks()))
            for row in own.to_pylist():
                step = read_step(as_read(row, receipt_steps))
                found.setdefault(row["request_id"], []).append(step)
            if self._page["request_id"][-1].as_py() > last:
                return found
            self._page = None


class _Source:
    """Pages in the order of request ids; ``first`` is not after the first of them."""

    def __init__(self, first: str, pages: Iterator[pa.Table]) -> None:
        self._pages = pages
        self.page: pa.Table | None = None
        self.first = first
        self.last = first

    def advance(self) -> bool:
        """Read on if there is no page; False at the end."""
        while self.page is None or not self.page.num_rows:
            self.page = next(self._pages, None)
            if self.page is None:
                return False
            self.last = self.page["request_id"][-1].as_py()
        return True

    def take(self, last: str) -> pa.Table:
        """Remove the rows up to a request."""
        assert self.page is not None
        number = pc.sum(pc.less_equal(self.page["request_id"], last)).as_py() or 0
        taken, self.page = self.page.slice(0, number), self.page.slice(number)
        return taken


def _merge(sources: Sequence[_Source]) -> Iterator[pa.Table]:
    """Merge sources by request id. An archive is opened when its first request is reached."""
    waiting = sorted(sources, key=lambda source: source.first)
    reading: list[_Source] = []
    while waiting or reading:
        reading = [source for source in reading if source.advance()]
        last = min((source.last for source in reading), default=None)
        if waiting and (last is None or waiting[0].first <= last):
            reading.append(waiting.pop(0))
            continue
        if last is None:
            continue
        parts = [source.take(last) for source in reading]
        parts = [part for part in parts if part.num_rows]
        if len(parts) == 1:
            yield parts[0]
        elif parts:
            yield pa.concat_tables(parts).sort_by("request_id")


def _repaged(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    number = 0
    for table in tables:
        waiting.append(table)
        number += table.num_rows
        while number >= rows:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, rows).combine_chunks()
            waiting, number = [whole.slice(rows)], number - rows
    if number:
        yield pa.concat_tables(waiting).combine_chunks()
