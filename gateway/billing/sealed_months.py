"""R10, R13: the hours, the days and the closed months are as they were sealed.

Each day is compared with its seal and with its hours. The seal of each closed month is compared
with its sealed hours. The rows of a month are compared with its seal in turn: those of the month
that was read the longest ago, and of months that differed when they were last read. They are read
in pages; the digest goes on from page to page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, select

from gateway.archive.bounds import learn
from gateway.archive.marks import REMOVED, Archive, find_archive, list_archives
from gateway.archive.seal import SealDigest, digest_columns, month_pages, sealed_columns
from gateway.billing.statements.close import BillingPeriod, list_periods
from gateway.billing.usage.days import (
    DAY,
    built_days,
    day_seal,
    floor_day,
    stored_day,
    summed_day,
)
from gateway.billing.usage.minutes import HOUR
from gateway.billing.usage.rollups import Seal, seal_of, seals
from gateway.checks.moments import EPOCH
from gateway.ledger.periods import is_month, span_of
from gateway.ledger.proof.accounts import Proof
from gateway.ledger.proof.findings import Finding
from gateway.pricing import format_usd
from gateway.sql.database import exact_sum, upsert
from gateway.tables.archives import archived_charges
from gateway.tables.core import receipts, refunds, transfers
from gateway.tables.proofs import proven_months
from gateway.tables.usage import usage_hours


def prove_months(proof: Proof) -> Iterator[Finding]:
    """Compare the seals of all closed months, and the rows of one of them or, if the proof is
    ``whole``, of all."""
    with proof.snapshots.open() as connection:
        known = list_periods(connection)
        archived = {each.month: each for each in list_archives(connection)}
        built = connection.execute(select(func.max(usage_hours.c.hour))).scalar()
        read = {row.month: row for row in connection.execute(select(proven_months))}
    for period in known:
        if not is_month(period.month):
            yield Finding("R13", f"month {period.month!r}", "is not a month; delete its row")
    closed = [each for each in known if each.state == "closed" and is_month(each.month)]
    removed = {each.month for each in archived.values() if each.state in REMOVED}
    stay = [each for each in closed if each.month not in removed]
    if proof.whole:
        chosen = stay
    else:
        moments = {month: row.read_at for month, row in read.items()}
        # Of several that were never read, the latest.
        stay.sort(key=lambda each: each.month, reverse=True)
        stay.sort(key=lambda each: moments.get(each.month, EPOCH))
        chosen = [
            each
            for number, each in enumerate(stay)
            if number == 0 or (each.month in read and not read[each.month].agrees)
        ]
    since = None if proof.whole or not closed else span_of(closed[-1].month).starts_at
    yield from _hours_are_sealed(proof, since)
    for period in closed:
        span = span_of(period.month)
        if period.month in removed or (built is not None and built + HOUR >= span.ends_at):
            yield from _hours_add_up(proof, period)
        if period.month in removed:
            yield from _adds_up_to_its_seal(proof, period, archived[period.month])
    for period in chosen:
        yield from _prove_rows(proof, period)


def _prove_rows(proof: Proof, period: BillingPeriod) -> Iterator[Finding]:
    """R10, R13: compare the rows of a closed month with its seal, and with those of its hours."""
    month = _Month(proof, period.month)
    findings = list(month.prove(period))
    if findings and _is_removed(proof, period.month):
        # It has been archived meanwhile: its files are compared with its seal.
        return
    if proof.keep is not None:
        row = {"month": period.month, "read_at": datetime.now(UTC), "agrees": not findings}

        def keep(connection: Connection) -> None:
            statement = upsert(connection, proven_months).values(**row)
            connection.execute(statement.on_conflict_do_update(index_elements=["month"], set_=row))

        proof.keep(keep)
    yield from findings


def _is_removed(proof: Proof, month: str) -> bool:
    with proof.snapshots.open() as connection:
        archive = find_archive(connection, month)
    return archive is not None and archive.state in REMOVED


@dataclass
class _Sums:
    """Sums of one hour, or of a month."""

    requests: int = 0
    charged: int = 0
    returned: int = 0


class _Month:
    """The rows of a month, in pages."""

    def __init__(self, proof: Proof, month: str) -> None:
        self._proof = proof
        self._month = month
        self._span = span_of(month)
        if proof.keep is not None:
            learn(proof.snapshots.open, proof.keep, month)

    def prove(self, period: BillingPeriod) -> Iterator[Finding]:
        digest, hours = SealDigest(), defaultdict[datetime, _Sums](_Sums)
        settled_at, charged = _places(receipts, "settled_at", "charge_nanos")
        for rows in self.receipts(digest_columns(receipts)):
            digest.add(rows)
            for row in rows:
                hour = hours[EPOCH + row[settled_at] // 3_600_000_000 * HOUR]
                hour.requests += 1
                hour.charged += row[charged]
        for rows in self.transfers(digest_columns(transfers)):
            digest.add(rows)
        if period.sha256 is not None and digest.sha256 != period.sha256:
            yield Finding("R13", f"month {period.month}", "has changed since it was closed")
        start = self._span.starts_at
        while start < self._span.ends_at:
            until = min(start + DAY, self._span.ends_at)
            with self._proof.snapshots.open() as connection:
                returned = refunds.c.booked_at
                query = select(returned, refunds.c.amount_nanos)
                query = query.where(returned >= start, returned < until)
                for booked_at, nanos in connection.execute(query):
                    hours[booked_at.replace(minute=0, second=0, microsecond=0)].returned += nanos
                sealed = seals(connection, start, until)
                yield from _sealed_as_stored(connection, sealed)
                yield from _day_is_its_hours(connection, start)
            for seal in sealed:
                yield from _sealed_as_booked(seal, hours[seal.hour])
            start = until

    def receipts(self, columns: Sequence[ColumnElement[Any]]) -> Iterator[Sequence[Any]]:
        """Read the receipts that were settled in the month, by request id."""
        return self._pages(receipts, columns)

    def transfers(self, columns: Sequence[ColumnElement[Any]]) -> Iterator[Sequence[Any]]:
        """Read the transfers that were booked in the month, by id."""
        return self._pages(transfers, columns)

    def _pages(
        self, table: Table, columns: Sequence[ColumnElement[Any]]
    ) -> Iterator[Sequence[Any]]:
        snapshots = self._proof.snapshots
        return month_pages(
            snapshots.open, table, self._month, columns,
            page=snapshots.page, bounded=not self._proof.whole,
        )  # fmt: skip


def _hours_are_sealed(proof: Proof, since: datetime | None) -> Iterator[Finding]:
    """R10: the stored rows of each hour and day match its seal, and days their hours."""
    with proof.snapshots.open() as connection:
        first, last = connection.execute(
            select(func.min(usage_hours.c.hour), func.max(usage_hours.c.hour))
        ).one()
    if first is None:
        return
    start = floor_day(first if since is None else max(first, since))
    while start <= last:
        with proof.snapshots.open() as connection:
            yield from _sealed_as_stored(connection, seals(connection, start, start + DAY))
            yield from _day_is_its_hours(connection, start)
        start += DAY


def _sealed_as_stored(connection: Connection, sealed: Sequence[Seal]) -> Iterator[Finding]:
    for seal in sealed:
        if seal_of(connection, seal.hour) != seal:
            yield Finding("R10", _named(seal.hour), "does not match its seal")


def _day_is_its_hours(connection: Connection, day: datetime) -> Iterator[Finding]:
    seal, built = day_seal(connection, day), built_days(connection)
    if built is None or not built[0] <= day < built[1]:
        return
    if seal is None:
        yield Finding("R10", f"day {day:%Y-%m-%d}", "has no sums, although earlier and later have")
    elif stored_day(connection, day) != seal:
        yield Finding("R10", f"day {day:%Y-%m-%d}", "does not match its seal")
    elif summed_day(connection, day) != seal:
        yield Finding("R10", f"day {day:%Y-%m-%d}", "is not the sum of its hours")


def _sealed_as_booked(seal: Seal, due: _Sums) -> Iterator[Finding]:
    sums = _Sums(seal.requests, seal.charge_nanos, seal.refund_nanos)
    if sums != due:
        yield Finding(
            "R10",
            _named(seal.hour),
            f"is sealed with {sums.requests} requests, {format_usd(sums.charged)} charged and "
            f"{format_usd(sums.returned)} refunded, but {due.requests}, "
            f"{format_usd(due.charged)} and {format_usd(due.returned)} were booked",
        )


def _named(hour: datetime) -> str:
    return f"hour {hour.isoformat(timespec='minutes')}"


def _hours_add_up(proof: Proof, period: BillingPeriod) -> Iterator[Finding]:
    """R10: the sealed hours of a closed month add up to its seal."""
    span, hour = span_of(period.month), usage_hours.c.hour
    query = select(exact_sum(usage_hours.c.requests), exact_sum(usage_hours.c.charge_nanos))
    with proof.snapshots.open() as connection:
        requests, charged = connection.execute(
            query.where(hour >= span.starts_at, hour < span.ends_at)
        ).one()
    if (requests, charged) != (period.receipts, period.charge_nanos):
        yield Finding(
            "R10",
            f"month {period.month}",
            f"is sealed with {period.receipts} requests and "
            f"{format_usd(period.charge_nanos or 0)} charged, but its hours have "
            f"{requests} and {format_usd(charged)}",
        )


def _adds_up_to_its_seal(
    proof: Proof, period: BillingPeriod, archive: Archive
) -> Iterator[Finding]:
    """R13: what is left of an archived month and what was removed add up to its seal."""
    subject, month = f"archive {period.month}", _Month(proof, period.month)
    left = sum(len(rows) for rows in month.receipts([receipts.c.request_id]))
    moved = charged = 0
    for rows in month.transfers([transfers.c.kind, transfers.c.amount_nanos]):
        moved += len(rows)
        charged += sum(row.amount_nanos for row in rows if row.kind == "charge")
    net = archived_charges.c.amount_nanos - archived_charges.c.returned_nanos
    with proof.snapshots.open() as connection:
        now = find_archive(connection, period.month)
        carried = connection.execute(
            select(exact_sum(net)).where(archived_charges.c.month == period.month)
        ).scalar_one()
    if now != archive:
        return  # Rows were removed or restored meanwhile; the next proof compares them.
    if archive.sha256 != period.sha256:
        yield Finding("R13", subject, "is not of the month as it was closed")
    for what, found, due in (
        ("receipts", left + archive.removed_receipts, period.receipts),
        ("transfers", moved + archive.removed_transfers, period.transfers),
        ("nano-dollars charged", charged + archive.removed_nanos, period.charge_nanos),
        ("nano-dollars carried", carried, archive.removed_nanos),
    ):
        if found != due:
            yield Finding("R13", subject, f"has {found} {what}, but it should be {due}")


def _places(table: Table, *names: str) -> tuple[int, ...]:
    """Return the places of columns in rows of ``digest_columns``."""
    columns = [column.name for column in sealed_columns(table)]
    return tuple(columns.index(name) for name in names)
