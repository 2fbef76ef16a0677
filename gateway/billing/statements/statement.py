"""Statements: an account's usage, payments and balance of a month.

The statement of an open month is a draft. Its lines are sums of the lines of receipts, so they
agree with the ledger. The total is rounded down to cents once; the remainder is carried to the next
invoice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from sqlalchemy import Connection, func, or_, select, union_all

from gateway.billing.lines import charged_lines
from gateway.ledger.closed import UNITS
from gateway.ledger.periods import month_of, next_month, starts_at
from gateway.ledger.prices import PriceCache
from gateway.pricing import NANOS_PER_CENT
from gateway.tables.archives import archived_charges
from gateway.tables.core import accounts, periods, receipts, refunds, transfers
from gateway.tables.invoices import invoice_lines, invoices
from gateway.tables.settlement_time import settled_within


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """``kind`` is usage, refund, correction, rebate or credit; all but usage are negative."""

    kind: str
    amount_nanos: int
    model: str | None = None
    unit: str | None = None
    quantity: str | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class Movement:
    """A transfer other than charges and refunds: top-up, grant, expiry or chargeback."""

    booked_at: datetime
    kind: str
    amount_nanos: int
    reason: str
    transfer_id: int


@dataclass(frozen=True, slots=True)
class Invoice:
    id: int
    account_id: int
    number: str
    kind: str
    month: str
    total_cents: int
    carried_in_nanos: int
    carried_out_nanos: int
    issued_at: datetime
    reason: str
    corrects: str | None


@dataclass(frozen=True, slots=True)
class Statement:
    """One month of one account; a draft if ``invoice`` is None."""

    account_id: int
    account: str
    month: str
    opening_nanos: int
    closing_nanos: int
    lines: Sequence[InvoiceLine]
    movements: Sequence[Movement]
    carried_in_nanos: int
    invoice: Invoice | None
    credit_notes: Sequence[Invoice]

    @property
    def sum_nanos(self) -> int:
        return sum(line.amount_nanos for line in self.lines)

    @property
    def total_cents(self) -> int:
        """Total, rounded down to cents; the remainder is carried to the next invoice."""
        return (self.carried_in_nanos + self.sum_nanos) // NANOS_PER_CENT

    @property
    def carried_out_nanos(self) -> int:
        return (self.carried_in_nanos + self.sum_nanos) % NANOS_PER_CENT


def statement(connection: Connection, account_id: int, month: str) -> Statement:
    """Read or draft the statement of a month. Raise ``LookupError`` if the account is unknown."""
    name = connection.execute(
        select(accounts.c.name).where(accounts.c.id == account_id, accounts.c.kind == "customer")
    ).scalar()
    if name is None:
        raise LookupError(f"unknown account {account_id}")
    issued = invoices_of(connection, account_id, month)
    invoice = next((each for each in issued if each.kind == "invoice"), None)
    opening = _balance_at(connection, account_id, starts_at(month))
    return Statement(
        account_id=account_id,
        account=name,
        month=month,
        opening_nanos=opening,
        closing_nanos=_balance_at(connection, account_id, starts_at(next_month(month))),
        lines=_draft(connection, account_id, month)
        if invoice is None
        else _stored(connection, invoice.id),
        movements=_movements(connection, account_id, month),
        carried_in_nanos=_carried(connection, account_id, month)
        if invoice is None
        else invoice.carried_in_nanos,
        invoice=invoice,
        credit_notes=[each for each in issued if each.kind == "credit_note"],
    )


def months_of(connection: Connection, account_id: int) -> list[str]:
    """List the months from an account's first transfer to the current month, newest first."""
    first = connection.execute(
        select(transfers.c.booked_at)
        .where(or_(transfers.c.from_account == account_id, transfers.c.to_account == account_id))
        .order_by(transfers.c.id)
        .limit(1)
    ).scalar()
    archived = connection.execute(
        select(func.min(archived_charges.c.booked_at)).where(
            archived_charges.c.account_id == account_id
        )
    ).scalar()
    first = min((moment for moment in (first, archived) if moment is not None), default=None)
    latest = connection.execute(select(periods.c.month).order_by(periods.c.month.desc())).scalar()
    if first is None or latest is None:
        return []
    months = [month_of(first)]
    while months[-1] < latest:
        months.append(next_month(months[-1]))
    return months[::-1]


def invoices_of(
    connection: Connection,
    account_id: int | None = None,
    month: str | None = None,
    *,
    limit: int | None = None,
    after: int = 0,
) -> list[Invoice]:
    """List invoices and credit notes in order of issue, after an id, up to ``limit``."""
    corrected = invoices.alias()
    query = (
        select(invoices, corrected.c.number.label("corrects_number"))
        .outerjoin(corrected, corrected.c.id == invoices.c.corrects)
        .where(invoices.c.id > after)
        .order_by(invoices.c.id)
        .limit(limit)
    )
    if account_id is not None:
        query = query.where(invoices.c.account_id == account_id)
    if month is not None:
        query = query.where(invoices.c.month == month)
    return [
        Invoice(
            id=row["id"],
            account_id=row["account_id"],
            number=row["number"],
            kind=row["kind"],
            month=row["month"],
            total_cents=row["total_cents"],
            carried_in_nanos=row["carried_in_nanos"],
            carried_out_nanos=row["carried_out_nanos"],
            issued_at=row["issued_at"],
            reason=row["reason"],
            corrects=row["corrects_number"],
        )
        for row in connection.execute(query).mappings()
    ]


def _draft(connection: Connection, account_id: int, month: str) -> list[InvoiceLine]:
    """Sum the lines of receipts by model and unit, followed by refunds, corrections and rebates."""
    amounts: defaultdict[tuple[str, str], int] = defaultdict(int)
    quantities: defaultdict[tuple[str, str], Decimal] = defaultdict(Decimal)
    prices: PriceCache = {}
    charged = select(
        receipts.c.request_id,
        receipts.c.model,
        receipts.c.price_id,
        receipts.c.charge_nanos,
        receipts.c.attributes,
        *(receipts.c[unit] for unit in UNITS),
    ).where(
        receipts.c.account_id == account_id,
        receipts.c.outcome == "charged",
        *settled_within(connection, starts_at(month), starts_at(next_month(month))),
    )
    rows = connection.execute(charged, execution_options={"yield_per": 1000}).mappings()
    for row in rows:
        for line in charged_lines(connection, row, prices):
            place = (row["model"], line.unit)
            amounts[place] += line.amount_nanos
            quantities[place] += Decimal(line.quantity)
    lines = [
        InvoiceLine("usage", amounts[place], *place, quantity=format(quantities[place], "f"))
        for place in sorted(amounts)
    ]
    return lines + _returned(connection, account_id, month)


def _returned(connection: Connection, account_id: int, month: str) -> list[InvoiceLine]:
    span = (starts_at(month), starts_at(next_month(month)))
    given = connection.execute(
        select(refunds.c.kind, refunds.c.request_id, refunds.c.amount_nanos, transfers.c.reason)
        .join(transfers, transfers.c.id == refunds.c.transfer_id)
        .where(
            refunds.c.account_id == account_id,
            refunds.c.booked_at >= span[0],
            refunds.c.booked_at < span[1],
            # A refund and its transfer have the same time, so one partition is read.
            transfers.c.booked_at >= span[0],
            transfers.c.booked_at < span[1],
        )
        .order_by(refunds.c.request_id, refunds.c.seq)
    )
    lines = [
        InvoiceLine(row.kind, -row.amount_nanos, description=f"{row.request_id}: {row.reason}")
        for row in given
    ]
    others = connection.execute(
        select(transfers)
        .where(
            transfers.c.to_account == account_id,
            transfers.c.kind.in_(["rebate", "correction"]),
            # A credit note is a separate document, not a line of the next invoice.
            ~transfers.c.key.startswith("credit_note:", autoescape=True),
            ~select(refunds.c.seq).where(refunds.c.transfer_id == transfers.c.id).exists(),
            transfers.c.booked_at >= span[0],
            transfers.c.booked_at < span[1],
        )
        .order_by(transfers.c.id)
    )
    return lines + [
        InvoiceLine(row.kind, -row.amount_nanos, description=row.reason) for row in others
    ]


def _stored(connection: Connection, invoice_id: int) -> list[InvoiceLine]:
    rows = connection.execute(
        select(invoice_lines)
        .where(invoice_lines.c.invoice_id == invoice_id)
        .order_by(invoice_lines.c.seq)
    )
    return [
        InvoiceLine(
            row.kind,
            row.amount_nanos,
            model=row.model,
            unit=row.unit,
            quantity=row.quantity,
            description=row.description,
        )
        for row in rows
    ]


def _movements(connection: Connection, account_id: int, month: str) -> list[Movement]:
    rows = connection.execute(
        select(transfers)
        .where(
            or_(transfers.c.from_account == account_id, transfers.c.to_account == account_id),
            transfers.c.kind.in_(["topup", "grant", "expiry", "chargeback"]),
            transfers.c.booked_at >= starts_at(month),
            transfers.c.booked_at < starts_at(next_month(month)),
        )
        .order_by(transfers.c.id)
    )
    return [
        Movement(
            row.booked_at,
            row.kind,
            row.amount_nanos if row.to_account == account_id else -row.amount_nanos,
            row.reason,
            row.id,
        )
        for row in rows
    ]


def _carried(connection: Connection, account_id: int, month: str) -> int:
    """Return the remainder that the account's last invoice before a month carried over."""
    last = connection.execute(
        select(invoices.c.carried_out_nanos)
        .where(
            invoices.c.account_id == account_id,
            invoices.c.kind == "invoice",
            invoices.c.month < month,
        )
        .order_by(invoices.c.month.desc())
        .limit(1)
    ).scalar()
    return last or 0


def _balance_at(connection: Connection, account_id: int, moment: datetime) -> int:
    """Return the balance just before a moment, as of the last transfer before it."""
    carried = archived_charges.c
    last = [
        select(transfers.c.posted_after, transfers.c.account_version.label("version"))
        .where(
            or_(transfers.c.from_account == account_id, transfers.c.to_account == account_id),
            transfers.c.booked_at < moment,
        )
        .order_by(transfers.c.account_version.desc())
        .limit(1),
        select(carried.posted_after, carried.last_version.label("version"))
        .where(carried.account_id == account_id, carried.booked_at < moment)
        .order_by(carried.last_version.desc())
        .limit(1),
    ]
    either = union_all(*(select(query.subquery()) for query in last)).subquery()
    found = connection.execute(
        select(either.c.posted_after).order_by(either.c.version.desc()).limit(1)
    ).scalar()
    return found or 0
