"""Credit and chargebacks entered by operators, with limits that catch a mistyped digit.

Called by commands and HTTP handlers. Amounts reported by payment providers are booked without these
limits.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import Literal

from sqlalchemy import Connection

from gateway.checks.entered import (
    BALANCE_MAX_NANOS,
    REFERENCE_MAX,
    check_amount,
    check_text,
)
from gateway.ledger.transfers import Transfer, add_credit, chargeback, owed
from gateway.pricing import format_usd


def enter_credit(
    connection: Connection,
    account_id: int,
    amount_nanos: int,
    *,
    kind: Literal["topup", "grant"],
    reference: str | None,
    actor: str,
    reason: str,
    priority: int | None = None,
    expires_at: datetime | None = None,
) -> Transfer:
    """Book a top-up or a grant, once per reference.

    Raise as ``add_credit`` does, and ``ValueError`` if the credit or the balance is too large.
    """
    check_amount(amount_nanos, "the amount")
    made = add_credit(
        connection,
        account_id,
        amount_nanos,
        kind=kind,
        key=f"{kind}:{_name(reference)}",
        actor=actor,
        reason=reason,
        priority=priority,
        expires_at=expires_at,
    )
    _check_balance("the balance", made.posted_after)
    return made


def enter_chargeback(
    connection: Connection,
    account_id: int,
    amount_nanos: int,
    *,
    reference: str,
    actor: str,
    reason: str,
) -> Transfer:
    """Reverse a payment, once per reference.

    Raise as ``chargeback`` does, and ``ValueError`` if the chargeback or the debt is too large.
    """
    check_amount(amount_nanos, "the amount")
    made = chargeback(
        connection,
        account_id,
        amount_nanos,
        key=f"chargeback:{_name(reference)}",
        actor=actor,
        reason=reason,
    )
    _check_balance("the debt", owed(connection, account_id))
    return made


def _name(reference: str | None) -> str:
    if reference is None:
        return secrets.token_hex(12)
    return check_text(reference, "the reference", longest=REFERENCE_MAX, required=True)


def _check_balance(what: str, nanos: int) -> None:
    """Raise ``ValueError`` if an amount is too large; that rolls back the transaction."""
    if nanos > BALANCE_MAX_NANOS:
        raise ValueError(
            f"{what} would be ${format_usd(nanos)}; the maximum is ${format_usd(BALANCE_MAX_NANOS)}"
        )
