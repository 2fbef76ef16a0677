"""Charged requests with what prices them, to price them again: from the database and from archives.

A request of an archived month is read from the files only, also if it is still in the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

from sqlalchemy import ColumnElement, RowMapping, Select, select

from gateway.archive.bring_back import as_read
from gateway.archive.marks import Archive, settled_outside
from gateway.checks.moments import microseconds_of
from gateway.ledger.closed import UNITS
from gateway.pricing import ServiceClass
from gateway.tables.core import receipts
from workers.contract.jobs import Usage

COLUMNS: Final = (
    "request_id", "account_id", "model", "service_class", "accepted_at", "charge_nanos",
    "attributes", *UNITS,
)  # fmt: skip
NOTED: Final = 1000
"""Requests after which progress is noted."""

NoteProgress: TypeAlias = Callable[[int, int], None]
"""Is told how many of how many requests have been read; what it raises ends the reading."""


@dataclass(frozen=True, slots=True)
class ChargedRequest:
    """A charged request; refunds are not subtracted."""

    request_id: str
    account_id: int
    model: str
    service_class: ServiceClass
    accepted_at: datetime
    charge_nanos: int
    usage: Usage


def stored_charged(archives: Sequence[Archive], *conditions: ColumnElement[bool]) -> Select[Any]:
    """Return the query of charged requests outside of archives; ``read_charged`` reads its rows."""
    return select(*(receipts.c[name] for name in COLUMNS)).where(
        receipts.c.outcome == "charged", *settled_outside(archives), *conditions
    )


def read_charged(row: Mapping[str, Any] | RowMapping) -> ChargedRequest:
    """Build a charged request from a row with ``COLUMNS``."""
    return ChargedRequest(
        request_id=row["request_id"],
        account_id=row["account_id"],
        model=row["model"],
        service_class=row["service_class"],
        accepted_at=row["accepted_at"],
        charge_nanos=row["charge_nanos"],
        usage=Usage(**{unit: row[unit] for unit in UNITS}, attributes=row["attributes"] or {}),
    )


def archived_charged(
    page: Any, moment: str, starts_at: datetime, ends_at: datetime, **equal: str | int | None
) -> Iterator[ChargedRequest]:
    """Yield the charged requests of a page of an archive with a moment in a span.

    ``equal``: values that columns must have; None selects all.
    """
    # Imported late: it takes a while, and a gateway should start quickly.
    import pyarrow.compute as pc

    wanted = pc.and_(
        pc.greater_equal(page[moment], microseconds_of(starts_at)),
        pc.less(page[moment], microseconds_of(ends_at)),
    )
    for name, value in {"outcome": "charged", **equal}.items():
        if value is not None:
            wanted = pc.and_(wanted, pc.equal(page[name], value))
    for row in page.filter(wanted).to_pylist():
        yield read_charged(as_read(row, receipts))


def noted(
    requests: Iterable[ChargedRequest], expected: int, progress: NoteProgress
) -> Iterator[ChargedRequest]:
    """Yield requests, and note how many of those expected have been read."""
    done = 0
    progress(done, expected)
    for each in requests:
        yield each
        done += 1
        if done % NOTED == 0:
            progress(done, expected)
    progress(done, expected)
