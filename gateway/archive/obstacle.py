"""What keeps a month from being archived: it is open, incomplete, or its metadata must expire."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection, func, or_, select

from gateway.ledger.periods import is_month, span_of
from gateway.tables.core import accounts, periods, receipts, transfers
from gateway.tables.invoices import invoices
from gateway.tables.settlement_time import booked_in, settled_within
from gateway.tables.usage import usage_hours


def obstacle(connection: Connection, month: str, *, metadata_expires: bool) -> str | None:
    """Return why a month cannot be archived, or None if it can."""
    if not is_month(month):
        return f"{month!r} is not a month; use YYYY-MM, such as 2026-11"
    span = span_of(month)
    state = connection.execute(select(periods.c.state).where(periods.c.month == month)).scalar()
    if state != "closed":
        return f"{month} is not closed; run: tollgate period close {month}"
    built = connection.execute(select(func.max(usage_hours.c.hour))).scalar()
    if built is None or built < span.ends_at - timedelta(hours=1):
        return f"the hourly sums of {month} are not complete; a running gateway builds them"
    moved = or_(transfers.c.from_account == accounts.c.id, transfers.c.to_account == accounts.c.id)
    invoiced = select(invoices.c.id).where(
        invoices.c.account_id == accounts.c.id,
        invoices.c.month == month,
        invoices.c.kind == "invoice",
    )
    tagged = select(receipts.c.request_id).where(
        *settled_within(connection, *span), receipts.c["metadata"].is_not(None)
    )
    if metadata_expires and connection.execute(tagged.limit(1)).first() is not None:
        return (
            f"requests of {month} still have metadata, whose retention could not be kept in files; "
            "archive it when the retention has cleared them: tollgate retention show"
        )
    without = connection.execute(
        select(accounts.c.name)
        .where(
            accounts.c.kind == "customer",
            select(transfers.c.id).where(moved, *booked_in(connection, span)).exists(),
            ~invoiced.exists(),
        )
        .limit(1)
    ).scalar()
    if without is not None:
        return (
            f"{without} has no invoice of {month}, because its close was interrupted; "
            f"run: tollgate period close {month}"
        )
    return None
