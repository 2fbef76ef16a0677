"""Closes a month: stops bookings into it, seals it, gives rebates and issues invoices.

Each step can be repeated, so an interrupted close resumes where it stopped. Requests are served and
booked during a close; their bookings go into the next month.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, func, insert, or_, select, update

from gateway.accounts.locks import lock_accounts
from gateway.archive.bounds import learn_bounds
from gateway.archive.marks import archived_months
from gateway.archive.seal import SealDigest, month_pages, seal_of_month, sealed_columns
from gateway.audit_log import Author, record
from gateway.billing.statements.statement import (
    Invoice,
    InvoiceLine,
    Statement,
    invoices_of,
    statement,
)
from gateway.checks.entered import NAME_MAX, check_amount, check_text
from gateway.failpoints import reach
from gateway.ledger.periods import (
    Clock,
    booking_time,
    is_month,
    month_of,
    open_period,
    span_of,
    utc_now,
)
from gateway.ledger.transfers import add_credit
from gateway.notices.books import month_closed, statement_ready
from gateway.notices.store import publish
from gateway.pricing import NANOS_MAX, NANOS_PER_CENT, format_usd
from gateway.sql.database import Database, exact_sum, upsert
from gateway.tables.core import accounts, periods, receipts, transfers
from gateway.tables.invoices import counters, invoice_lines, invoices, rebates
from gateway.tables.settlement_time import booked_in, settled_within

SETTLED_AFTER: Final = timedelta(minutes=5)
"""Minimum time between the end of a month and its close."""
ALL_ACCOUNTS: Final = 0
NOTE_REASON_MAX: Final = 400
"""Maximum length of a credit note's reason; its transfer adds the invoice's number to it."""
BASIS: Final = 10_000


@dataclass(frozen=True, slots=True)
class BillingPeriod:
    month: str
    state: str
    closed_at: datetime | None
    receipts: int | None
    charge_nanos: int | None
    transfers: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class ExpectedInvoice:
    """The invoice and the rebate of one account that closing a month would produce."""

    account: str
    total_cents: int
    rebate_nanos: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of closing a month as a dry run. ``obstacle``: why it cannot be closed yet."""

    period: BillingPeriod
    obstacle: str | None
    invoices: tuple[ExpectedInvoice, ...]


class CannotClose(ValueError):
    """The month has not ended, or an earlier one is still open."""


def close_month(
    database: Database, month: str, *, author: Author, clock: Clock = utc_now
) -> BillingPeriod:
    """Close a month in steps, each in a separate transaction; a second call completes the first.

    Long reads use snapshots, so that no booking waits for them. Raise ``CannotClose`` before the
    month's end or while an earlier month is open, and ``ValueError`` if the text is not a month;
    both before anything is written.
    """
    span = span_of(month)
    with database.snapshot() as connection:
        if archived_months(connection, booked=span):
            return find_period(connection, month)
    with database.transaction() as connection:
        _begin(connection, month, clock())
    reach("close_begun")
    learn_bounds(database, month)
    with database.snapshot() as connection:
        period = find_period(connection, month)
    sealed = period if period.state == "closed" else _sealed(database.snapshot, month, clock())
    with database.transaction() as connection:
        _seal(connection, sealed, author)
    reach("close_sealed")
    with database.snapshot() as connection:
        moved = _moved_in(connection, month)
    for account_id in moved:
        with database.transaction() as connection:
            rebate(connection, account_id, month, clock=clock)
        reach("close_rebated")
        with database.snapshot() as connection:
            made = statement(connection, account_id, month)
        with database.transaction() as connection:
            issue(connection, made, author.name, clock=clock)
        reach("close_issued")
    return sealed


def rehearse_close(connection: Connection, month: str, *, now: datetime) -> Rehearsal:
    """Compute what closing a month would write, for any month, without writing anything.

    Raise ``ValueError`` if the text is not a month.
    """
    sealed = _sealed(lambda: contextlib.nullcontext(connection), month, now)
    expected = []
    for account_id in _moved_in(connection, month):
        made = statement(connection, account_id, month)
        due = rebate_due(connection, account_id, month)
        expected.append(ExpectedInvoice(made.account, made.total_cents, due))
    return Rehearsal(sealed, _obstacle(connection, month, now), tuple(expected))


def find_period(connection: Connection, month: str) -> BillingPeriod:
    """Find a month. Raise ``LookupError`` if nothing was ever booked in it."""
    row = connection.execute(select(periods).where(periods.c.month == month)).mappings().first()
    if row is None:
        raise LookupError(f"nothing was booked in {month}")
    return BillingPeriod(**row)


def list_periods(connection: Connection) -> list[BillingPeriod]:
    rows = connection.execute(select(periods).order_by(periods.c.month))
    return [BillingPeriod(**row) for row in rows.mappings()]


def months_to_close(connection: Connection, now: datetime) -> list[str]:
    """List the months that have ended and are not closed, the earliest first."""
    present = month_of(now)
    return [
        each.month
        for each in list_periods(connection)
        if each.month < present and each.state != "closed"
    ]


def changed_since_close(connection: Connection, month: str) -> bool:
    """Whether a closed month no longer matches its seal. Raise ``ValueError`` if it is archived."""
    period = find_period(connection, month)
    if archived_months(connection, booked=span_of(month)):
        raise ValueError(f"{month} is archived; check its files: tollgate archive verify {month}")
    return period.sha256 is not None and seal_of_month(connection, month) != period.sha256


def rebate_due(connection: Connection, account_id: int, month: str) -> int:
    """Compute an account's rebate of a month: a share of its spending within each tier."""
    tiers = list((tiers_of(connection, account_id) or tiers_of(connection, ALL_ACCOUNTS)).items())
    span = span_of(month)
    spent = connection.execute(
        select(exact_sum(receipts.c.charge_nanos)).where(
            receipts.c.account_id == account_id,
            *settled_within(connection, *span),
        )
    ).scalar_one()
    due = 0
    for place, (start, points) in enumerate(tiers):
        end = tiers[place + 1][0] if place + 1 < len(tiers) else spent
        due += max(min(spent, end) - start, 0) * points
    return due // BASIS


def set_rebates(connection: Connection, account_id: int, tiers: dict[int, int]) -> None:
    """Replace the rebate tiers of an account, or the default ones (0): threshold → basis points.

    Thresholds are in nano-dollars. Raise ``ValueError`` if a threshold is negative or a rebate is
    not between 0 and 100 %.
    """
    for start, points in tiers.items():
        check_amount(start, "the start of a tier", least=0, most=NANOS_MAX)
        if not 0 <= points <= BASIS:
            raise ValueError(f"a rebate is {points / 100:g} %; it must be between 0 and 100")
    connection.execute(rebates.delete().where(rebates.c.account_id == account_id))
    if tiers:
        connection.execute(
            insert(rebates),
            [
                {"account_id": account_id, "from_nanos": start, "basis_points": points}
                for start, points in sorted(tiers.items())
            ],
        )


def tiers_of(connection: Connection, account_id: int) -> dict[int, int]:
    """Return the rebate tiers of an account, or the default ones (0): threshold → basis points."""
    rows = connection.execute(
        select(rebates.c.from_nanos, rebates.c.basis_points)
        .where(rebates.c.account_id == account_id)
        .order_by(rebates.c.from_nanos)
    )
    return {row.from_nanos: row.basis_points for row in rows}


def all_tiers(connection: Connection) -> dict[int, dict[int, int]]:
    """Return the rebate tiers of every account that has some, and the default ones (0)."""
    rows = connection.execute(select(rebates).order_by(rebates.c.account_id, rebates.c.from_nanos))
    found: dict[int, dict[int, int]] = {}
    for row in rows:
        found.setdefault(row.account_id, {})[row.from_nanos] = row.basis_points
    return found


def rebate(connection: Connection, account_id: int, month: str, *, clock: Clock = utc_now) -> int:
    """Book an account's rebate of a closed month, once, into the open month."""
    due = rebate_due(connection, account_id, month)
    if due:
        add_credit(
            connection,
            account_id,
            due,
            kind="rebate",
            key=f"rebate:{account_id}:{month}",
            actor="calendar",
            reason=f"volume rebate of {month}",
            clock=clock,
        )
    return due


def issue(
    connection: Connection, made: Statement, actor: str, *, clock: Clock = utc_now
) -> Invoice:
    """Issue an account's invoice of a closed month, once. Invoices are final."""
    now = booking_time(connection, clock)
    lock_accounts(connection, [made.account_id])
    for known in invoices_of(connection, made.account_id, made.month):
        if known.kind == "invoice":
            return known
    _write(connection, made, made.lines, kind="invoice", actor=actor, now=now)
    issued = invoices_of(connection, made.account_id, made.month)[-1]
    ready = statement_ready(
        made.account_id,
        made.account,
        made.month,
        invoice=issued.number,
        total_cents=issued.total_cents,
    )
    publish(connection, [ready])
    return issued


def credit_note(
    connection: Connection,
    number: str,
    amount_nanos: int,
    *,
    actor: str,
    reason: str,
    clock: Clock = utc_now,
) -> Invoice:
    """Issue a credit note: refund a part of an invoice, in whole cents, with its transfer.

    Raise ``LookupError`` if the invoice does not exist, ``ValueError`` if the amount exceeds what
    is left of its total.
    """
    check_text(reason, "the reason", longest=NOTE_REASON_MAX, required=True)
    check_text(actor, "the actor", longest=NAME_MAX)
    now = booking_time(connection, clock)
    row = connection.execute(
        select(invoices).where(invoices.c.number == number, invoices.c.kind == "invoice")
    ).first()
    if row is None:
        raise LookupError(f"unknown invoice {number!r}")
    lock_accounts(connection, [row.account_id])
    notes = select(func.coalesce(func.sum(invoices.c.total_cents), 0), func.count()).where(
        invoices.c.corrects == row.id
    )
    given, count = connection.execute(notes).one()
    left = row.total_cents + int(given)
    cents, odd = divmod(amount_nanos, NANOS_PER_CENT)
    if odd or not 0 < cents <= left:
        raise ValueError(
            f"whole cents up to ${format_usd(max(left, 0) * NANOS_PER_CENT)} of {number} can be "
            f"credited, not ${format_usd(amount_nanos)}"
        )
    add_credit(
        connection,
        row.account_id,
        amount_nanos,
        kind="correction",
        key=f"credit_note:{number}:{count + 1}",
        actor=actor,
        reason=f"credit note to {number}: {reason}",
        clock=clock,
    )
    made = statement(connection, row.account_id, month_of(now))
    lines = [InvoiceLine("credit", -amount_nanos, description=reason)]
    _write(
        connection, made, lines, kind="credit_note", actor=actor, now=now,
        corrects=row.id, reason=reason,
    )  # fmt: skip
    return invoices_of(connection, row.account_id, month_of(now))[-1]


def _begin(connection: Connection, month: str, now: datetime) -> None:
    """Stop further bookings into a month, and wait for open ones."""
    obstacle = _obstacle(connection, month, now)
    if obstacle is not None:
        raise CannotClose(obstacle)
    open_period(connection, month)
    state = connection.execute(
        select(periods.c.state).where(periods.c.month == month).with_for_update()
    ).scalar_one()
    if state == "open":
        connection.execute(update(periods).where(periods.c.month == month).values(state="closing"))


def _obstacle(connection: Connection, month: str, now: datetime) -> str | None:
    """Return why a month cannot be closed yet, or None if it can."""
    ends_at = span_of(month).ends_at
    if now < ends_at + SETTLED_AFTER:
        return f"{month} ends at {ends_at.isoformat()} and can be closed five minutes later"
    earlier = select(periods.c.month).where(periods.c.month < month, periods.c.state != "closed")
    # A row whose name is not a month has no bookings, and must not block the close of others.
    known = (name for name in connection.execute(earlier).scalars() if is_month(name))
    open_before = min(known, default=None)
    if open_before is None:
        return None
    return f"{open_before} is still open; months are closed in order"


def _sealed(
    open: Callable[[], AbstractContextManager[Connection]], month: str, now: datetime
) -> BillingPeriod:
    """Compute totals and digest of a month into which nothing more is booked, page by page."""
    digest, counts, charged = SealDigest(), {receipts: 0, transfers: 0}, 0
    charge = [column.name for column in sealed_columns(receipts)].index("charge_nanos")
    for table in counts:
        for rows in month_pages(open, table, month):
            digest.add(rows)
            counts[table] += len(rows)
            charged += sum(row[charge] for row in rows) if table is receipts else 0
    return BillingPeriod(
        month, "closed", now, counts[receipts], charged, counts[transfers], digest.sha256
    )


def _seal(connection: Connection, sealed: BillingPeriod, author: Author) -> None:
    closed = connection.execute(
        update(periods)
        .where(periods.c.month == sealed.month, periods.c.state == "closing")
        .values(**asdict(sealed))
    )
    if closed.rowcount:
        after = {
            "receipts": sealed.receipts,
            "charged": format_usd(sealed.charge_nanos or 0),
            "transfers": sealed.transfers,
            "sha256": sealed.sha256,
        }
        record(connection, author, "period.close", f"month {sealed.month}", after=after)
        told = month_closed(
            sealed.month,
            receipts=sealed.receipts or 0,
            charge_nanos=sealed.charge_nanos or 0,
        )
        publish(connection, [told])


def _moved_in(connection: Connection, month: str) -> list[int]:
    """List customer accounts with a transfer in a month, ordered by number."""
    moved = select(transfers.c.id).where(
        or_(transfers.c.from_account == accounts.c.id, transfers.c.to_account == accounts.c.id),
        *booked_in(connection, span_of(month)),
    )
    rows = connection.execute(
        select(accounts.c.id)
        .where(accounts.c.kind == "customer", moved.exists())
        .order_by(accounts.c.id)
    )
    return list(rows.scalars())


def _write(
    connection: Connection,
    made: Statement,
    lines: Any,
    *,
    kind: str,
    actor: str,
    now: datetime,
    corrects: int | None = None,
    reason: str = "",
) -> None:
    note = kind == "credit_note"
    total = sum(line.amount_nanos for line in lines) // NANOS_PER_CENT if note else made.total_cents
    invoice_id = connection.execute(
        insert(invoices)
        .values(
            number=_next_number(connection, now),
            account_id=made.account_id,
            kind=kind,
            month=made.month,
            corrects=corrects,
            total_cents=total,
            carried_in_nanos=0 if note else made.carried_in_nanos,
            carried_out_nanos=0 if note else made.carried_out_nanos,
            opening_nanos=made.opening_nanos,
            closing_nanos=made.closing_nanos,
            actor=actor,
            reason=reason,
            issued_at=now,
        )
        .returning(invoices.c.id)
    ).scalar_one()
    if lines:
        connection.execute(
            insert(invoice_lines),
            [
                {
                    "invoice_id": invoice_id,
                    "seq": seq,
                    "kind": line.kind,
                    "model": line.model,
                    "unit": line.unit,
                    "quantity": line.quantity,
                    "description": line.description[:500],
                    "amount_nanos": line.amount_nanos,
                }
                for seq, line in enumerate(lines, start=1)
            ],
        )


def _next_number(connection: Connection, now: datetime) -> str:
    """Take the year's next invoice number, in the invoice's transaction: there are no gaps."""
    name = f"invoices:{now.year}"
    statement = upsert(connection, counters).values(name=name, value=1)
    value = connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name"], set_={"value": counters.c.value + 1}
        ).returning(counters.c.value)
    ).scalar_one()
    return f"{now.year}-{value:06d}"
