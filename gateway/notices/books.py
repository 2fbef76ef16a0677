"""Notices of the books: months that were closed, and problems that reconciliation found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from gateway.ledger.reconcile import Finding
from gateway.notices.kinds import OPERATOR, Notice
from gateway.pricing import NANOS_PER_CENT, format_usd

LISTED: Final = 10
"""Findings that a notice lists; the others are counted."""


def month_closed(month: str, *, receipts: int, charge_nanos: int) -> Notice:
    """Tell the operator that a month is sealed."""
    charged = format_usd(charge_nanos)
    return Notice(
        key=f"month:{OPERATOR}:{month}",
        account_id=OPERATOR,
        kind="month.closed",
        subject=f"month {month}",
        title=f"{month} is closed",
        text=(
            f"The month {month} is closed and sealed: {receipts} requests, ${charged} charged. "
            "The invoices of its accounts are being issued. Later bookings go into the next month."
        ),
        data={"month": month, "receipts": receipts, "charged": charged},
    )


def statement_ready(
    account_id: int, account: str, month: str, *, invoice: str, total_cents: int
) -> Notice:
    """Tell an account that the invoice of a month was issued."""
    total = format_usd(total_cents * NANOS_PER_CENT)
    return Notice(
        key=f"month:{account_id}:{month}",
        account_id=account_id,
        kind="month.closed",
        subject=f"month {month}",
        title=f"The statement of {month} for {account} is ready",
        text=(
            f"The month {month} is closed for account {account}: invoice {invoice} over ${total}. "
            f"Get the statement at /v1/statements/{month}."
        ),
        data={"month": month, "invoice": invoice, "total": total},
    )


def problems_found(findings: Sequence[Finding], now: datetime) -> Notice:
    """Tell the operator what reconciliation found: the same findings once a day."""
    lines = [str(finding) for finding in findings]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    count = f"{len(lines)} problem" + ("s" if len(lines) != 1 else "")
    listed = "\n".join(f"- {line}" for line in lines[:LISTED])
    more = f"\n- and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    return Notice(
        key=f"reconciliation:{digest}:{now:%Y-%m-%d}",
        account_id=OPERATOR,
        kind="reconciliation.failed",
        subject="ledger",
        title=f"Reconciliation found {count}",
        text=(
            f"Reconciliation found {count} in the books. Nothing was corrected; `tollgate "
            f"reconcile` lists all of them.\n\n{listed}{more}"
        ),
        data={
            "findings": [
                {"rule": one.rule, "subject": one.subject, "message": one.message}
                for one in findings[:LISTED]
            ],
            "count": len(lines),
        },
    )
