"""Which months are archived, and the refusal of reports that would need their receipts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, bindparam, or_, select

from gateway.archive.manifest import Manifest
from gateway.checks.months import month_of
from gateway.errors import Gone, Unavailable
from gateway.ids import first_request_id
from gateway.ledger.periods import MonthSpan, span_of
from gateway.tables.archives import archives
from gateway.tables.core import receipts

REMOVED: Final = ("removing", "removed", "restoring")
"""States in which receipts of the month can be missing in the database."""

_REMOVED: Final = select(archives).where(
    archives.c.state.in_(REMOVED), archives.c.first_id.is_not(None)
)
_ACCEPTED_SINCE: Final = _REMOVED.where(archives.c.last_id >= bindparam("first")).order_by(
    archives.c.month
)
_ACCEPTED_WITHIN: Final = _ACCEPTED_SINCE.where(archives.c.first_id < bindparam("end"))
_REMOVED_WITHIN: Final = _REMOVED.where(
    archives.c.month >= bindparam("first_month"), archives.c.month <= bindparam("last_month")
).order_by(archives.c.first_id)


@dataclass(frozen=True, slots=True)
class Archive:
    """An archived month. ``manifest`` is None until its files are verified."""

    month: str
    state: str
    nonce: str
    sha256: str
    manifest: Manifest | None
    first_id: str | None
    last_id: str | None
    removed_receipts: int
    removed_transfers: int
    removed_nanos: int
    changed_at: datetime

    @property
    def span(self) -> MonthSpan:
        return span_of(self.month)


def list_archives(connection: Connection) -> list[Archive]:
    rows = connection.execute(select(archives).order_by(archives.c.month)).mappings()
    return [_read(row) for row in rows]


def find_archive(connection: Connection, month: str, *, lock: bool = False) -> Archive | None:
    """Find the archive of a month; ``lock`` its row, so that nothing else is moved meanwhile."""
    query = select(archives).where(archives.c.month == month)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    return None if row is None else _read(row)


def archives_with(connection: Connection, request_id: str) -> list[Archive]:
    """List the archives whose files can contain a request that is not in the database."""
    query = select(archives).where(
        archives.c.state.in_(REMOVED),
        archives.c.first_id <= request_id,
        archives.c.last_id >= request_id,
    )
    return [_read(row) for row in connection.execute(query).mappings()]


def archived_months(
    connection: Connection,
    *,
    booked: tuple[datetime, datetime] | None = None,
    accepted: tuple[datetime | None, datetime | None] = (None, None),
) -> list[str]:
    """List the archived months in which something of a span was booked, or accepted."""
    found = []
    for archive in accepted_archives(connection, *accepted):
        starts_at, ends_at = archive.span
        if booked is None or (booked[0] < ends_at and booked[1] > starts_at):
            found.append(archive.month)
    return found


def accepted_archives(
    connection: Connection, starts_at: datetime | None, ends_at: datetime | None
) -> list[Archive]:
    """List the archives that can have requests accepted in a span."""
    ids = {"first": "" if starts_at is None else first_request_id(starts_at)}
    query = _ACCEPTED_SINCE
    if ends_at is not None:
        query, ids = _ACCEPTED_WITHIN, {**ids, "end": first_request_id(ends_at)}
    return [_read(row) for row in connection.execute(query, ids).mappings()]


def removed_archives(
    connection: Connection, booked: tuple[datetime, datetime]
) -> tuple[Archive, ...]:
    """List the archives whose receipts were booked in a span, by their first request."""
    rows = connection.execute(_REMOVED_WITHIN, _months_of(booked)).mappings()
    return tuple(_read(row) for row in rows)


def settled_outside(known: Iterable[Archive]) -> list[ColumnElement[bool]]:
    """Return SQL conditions for receipts that were not settled in the months of some archives."""
    moment = receipts.c.settled_at
    spans = (archive.span for archive in known)
    return [or_(moment < starts_at, moment >= ends_at) for starts_at, ends_at in spans]


def check_unchanged(
    connection: Connection, booked: tuple[datetime, datetime], known: Sequence[Archive]
) -> None:
    """Raise ``Unavailable`` if a month of a span was archived, restored or rewritten since its
    archives were listed."""
    query = _REMOVED_WITHIN.with_only_columns(archives.c.month, archives.c.nonce)
    rows = connection.execute(query, _months_of(booked))
    found = {(row.month, row.nonce) for row in rows}
    if found != {(archive.month, archive.nonce) for archive in known}:
        raise archive_changed()


def archive_changed() -> Unavailable:
    return Unavailable(
        "archive_unavailable",
        "A month of the span was archived or restored meanwhile; send the request again.",
    )


def _months_of(booked: tuple[datetime, datetime]) -> dict[str, str]:
    last = booked[1] - timedelta(microseconds=1)
    return {"first_month": month_of(booked[0]), "last_month": month_of(last)}


def unfinished_months(connection: Connection) -> list[str]:
    """List the months whose files are being written, or were not completed."""
    return [archive.month for archive in list_archives(connection) if archive.manifest is None]


def refuse_archived(months: list[str], what: str) -> None:
    """Raise ``Gone`` if there are archived months, without whose receipts ``what`` is wrong."""
    if months:
        named = ", ".join(months)
        raise Gone(
            "archived",
            f"The receipts of {named} are archived, so {what} cannot be computed. Exclude "
            "archived months, export them, or ask the operator to restore them.",
        )


def _read(row: RowMapping) -> Archive:
    stored = row["manifest"]
    manifest = None if stored is None else msgspec.convert(stored, Manifest)
    return Archive(**{**row, "manifest": manifest})
