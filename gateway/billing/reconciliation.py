"""All rules of the books: the ledger's, and those for rollups, closed months and payments.

It runs nightly on one gateway, by ``tollgate reconcile``, and when an administrator calls the API.
Findings are stored, counted and displayed; nothing is corrected automatically.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, case, func, insert, select

from gateway.archive.marks import archived_months, find_archive
from gateway.audit_log import Author, record
from gateway.billing.statements.close import changed_since_close, find_period, list_periods
from gateway.billing.usage.rollups import Seal, seal_of, seals
from gateway.ledger.periods import is_month, month_of, span_of
from gateway.ledger.reconcile import Finding, reconcile
from gateway.notices.books import problems_found
from gateway.notices.store import publish
from gateway.payments.payments import compare_payments
from gateway.payments.provider import PaymentProvider, ProviderFailed
from gateway.pricing import format_usd
from gateway.sql.database import Database, exact_sum, time_bucket
from gateway.tables.archives import archived_charges
from gateway.tables.core import receipts, reconciliations, refunds, transfers

HOUR_S = 3600
PAYMENTS_WITHIN = timedelta(days=35)
SEALS_CHECKED = 2
KEPT = 400
"""Number of stored results: more than a year of nightly runs."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """One run of all rules; without findings, the books agree."""

    started_at: datetime
    finished_at: datetime
    findings: tuple[Finding, ...]


def check_books(connection: Connection, *, now: datetime) -> list[Finding]:
    """Check all rules in one transaction; an empty list proves that the books agree."""
    return [
        *reconcile(connection, now=now),
        *_rollups_are_receipts(connection),
        *_closed_months_are_as_sealed(connection),
    ]


async def run_reconciliation(
    database: Database, provider: PaymentProvider | None = None, *, author: Author | None = None
) -> Reconciliation:
    """Check all rules, including R12 if there is a payment provider, and store the result.

    With an author, it is recorded as an act.
    """
    started_at = datetime.now(UTC)
    findings = await database.slow(lambda connection: check_books(connection, now=started_at))
    if provider is not None:
        findings += await payments_agree(database, provider, now=started_at)
    found = Reconciliation(started_at, datetime.now(UTC), tuple(findings))

    def keep(connection: Connection) -> None:
        connection.execute(
            insert(reconciliations).values(
                started_at=found.started_at,
                finished_at=found.finished_at,
                findings=[asdict(finding) for finding in found.findings],
            )
        )
        last = connection.execute(select(func.max(reconciliations.c.id))).scalar_one()
        connection.execute(reconciliations.delete().where(reconciliations.c.id <= last - KEPT))
        if findings:
            publish(connection, [problems_found(findings, found.finished_at)])
        if author is not None:
            after = {"findings": len(found.findings)}
            record(connection, author, "ledger.reconcile", "ledger", after=after)

    await database.write(keep)
    return found


async def payments_agree(
    database: Database, provider: PaymentProvider, *, now: datetime
) -> list[Finding]:
    """R12: compare the provider's payments of the last weeks with what was booked."""
    try:
        paid = await provider.paid_since(now - PAYMENTS_WITHIN)
    except ProviderFailed as error:
        return [Finding("R12", provider.name, f"payments could not be listed: {error}")]
    return await database.slow(
        lambda connection: compare_payments(connection, paid, provider=provider.name)
    )


def last_reconciliation(connection: Connection) -> Reconciliation | None:
    """Read the latest stored result, of any gateway."""
    row = connection.execute(
        select(reconciliations).order_by(reconciliations.c.id.desc()).limit(1)
    ).first()
    if row is None:
        return None
    findings = tuple(Finding(**finding) for finding in row.findings)
    return Reconciliation(row.started_at, row.finished_at, findings)


def _closed_months_are_as_sealed(connection: Connection) -> Iterator[Finding]:
    """R13: the latest closed months have not changed; ``tollgate period verify`` checks others."""
    known = list_periods(connection)
    for period in known:
        if not is_month(period.month):
            yield Finding("R13", f"month {period.month!r}", "is not a month; delete its row")
    closed = [each.month for each in known if each.state == "closed" and is_month(each.month)]
    archived = archived_months(connection)
    for month in archived:
        yield from _adds_up_to_its_seal(connection, month)
    for month in closed[-SEALS_CHECKED:]:
        if month not in archived and changed_since_close(connection, month):
            yield Finding("R13", f"month {month}", "has changed since it was closed")


def _adds_up_to_its_seal(connection: Connection, month: str) -> Iterator[Finding]:
    """R13: what is left of an archived month and what was removed add up to its seal."""
    period, archive = find_period(connection, month), find_archive(connection, month)
    assert archive is not None
    subject = f"archive {month}"
    if archive.sha256 != period.sha256:
        yield Finding("R13", subject, "is not of the month as it was closed")
    span = span_of(month)
    left = connection.execute(
        select(func.count())
        .select_from(receipts)
        .where(receipts.c.settled_at >= span.starts_at, receipts.c.settled_at < span.ends_at)
    ).scalar_one()
    charge = transfers.c.kind == "charge"
    moved, charged = connection.execute(
        select(func.count(), exact_sum(case((charge, transfers.c.amount_nanos), else_=0))).where(
            transfers.c.booked_at >= span.starts_at, transfers.c.booked_at < span.ends_at
        )
    ).one()
    carried = connection.execute(
        select(
            exact_sum(archived_charges.c.amount_nanos - archived_charges.c.returned_nanos)
        ).where(archived_charges.c.month == month)
    ).scalar_one()
    for what, found, due in (
        ("receipts", left + archive.removed_receipts, period.receipts),
        ("transfers", moved + archive.removed_transfers, period.transfers),
        ("nano-dollars charged", charged + archive.removed_nanos, period.charge_nanos),
        ("nano-dollars carried", carried, archive.removed_nanos),
    ):
        if found != due:
            yield Finding("R13", subject, f"has {found} {what}, but it should be {due}")


def _rollups_are_receipts(connection: Connection) -> Iterator[Finding]:
    """R10: the rows of each sealed hour match its seal, and the seal matches the receipts.

    The hours of an archived month, whose receipts are in files, match the seal of their month.
    """
    booked = _booked_by_hour(connection)
    archived = dict.fromkeys(archived_months(connection), (0, 0))
    for seal in seals(connection):
        hour = seal.hour.isoformat(timespec="minutes")
        if seal_of(connection, seal.hour) != seal:
            yield Finding("R10", f"hour {hour}", "does not match its seal")
        requests, charged, returned = booked.get(seal.hour, (0, 0, 0))
        if (month := month_of(seal.hour)) in archived:
            before = archived[month]
            archived[month] = (before[0] + seal.requests, before[1] + seal.charge_nanos)
            requests, charged = seal.requests, seal.charge_nanos
        if (seal.requests, seal.charge_nanos, seal.refund_nanos) != (requests, charged, returned):
            yield Finding("R10", f"hour {hour}", _difference(seal, requests, charged, returned))
    for month, (requests, charged) in archived.items():
        period = find_period(connection, month)
        if (requests, charged) != (period.receipts, period.charge_nanos):
            yield Finding(
                "R10",
                f"month {month}",
                f"is sealed with {period.receipts} requests and "
                f"{format_usd(period.charge_nanos or 0)} charged, but its hours have "
                f"{requests} and {format_usd(charged)}",
            )


def _booked_by_hour(connection: Connection) -> dict[datetime, tuple[int, int, int]]:
    """Sum requests, charges and refunds by hour, from receipts and refunds."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    sums: dict[datetime, tuple[int, int, int]] = {}
    settled = select(
        time_bucket(receipts.c.settled_at, HOUR_S), func.count(), exact_sum(receipts.c.charge_nanos)
    ).group_by(time_bucket(receipts.c.settled_at, HOUR_S))
    for number, requests, charged in connection.execute(settled):
        hour = epoch + timedelta(hours=number)
        before = sums.get(hour, (0, 0, 0))
        sums[hour] = (before[0] + requests, before[1] + charged, before[2])
    returned = select(
        time_bucket(refunds.c.booked_at, HOUR_S), exact_sum(refunds.c.amount_nanos)
    ).group_by(time_bucket(refunds.c.booked_at, HOUR_S))
    for number, amount in connection.execute(returned):
        hour = epoch + timedelta(hours=number)
        before = sums.get(hour, (0, 0, 0))
        sums[hour] = (before[0], before[1], before[2] + amount)
    return sums


def _difference(seal: Seal, requests: int, charged: int, returned: int) -> str:
    return (
        f"is sealed with {seal.requests} requests, {format_usd(seal.charge_nanos)} charged and "
        f"{format_usd(seal.refund_nanos)} refunded, but {requests}, {format_usd(charged)} and "
        f"{format_usd(returned)} were booked"
    )
