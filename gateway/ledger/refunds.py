"""Refunds of charges, full or partial, and never more than was charged.

A refund is a transfer, and a row that links it to its receipt; the receipt itself never changes. It
also reduces what was spent under the key's spend limit and the budgets of the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from sqlalchemy import Connection, func, insert, select, update

from gateway.accounts.locks import lock_accounts, lock_organisations
from gateway.checks.entered import NAME_MAX, REASON_MAX, check_text
from gateway.ledger.lots import open_lot
from gateway.ledger.periods import Clock, booking_time, utc_now
from gateway.ledger.transfers import (
    KEY_MAX,
    Transfer,
    TransferConflict,
    find_transfer,
    is_used,
    move,
)
from gateway.pricing import format_usd
from gateway.sql.database import exact_sum
from gateway.tables.core import SYSTEM_ACCOUNTS, budget_windows, keys, receipts, refunds, transfers
from workers.contract.jobs import RequestId

RefundKind: TypeAlias = Literal["refund", "correction"]


@dataclass(frozen=True, slots=True)
class Refund:
    """A refund or correction, as displayed on the receipt."""

    kind: RefundKind
    amount_nanos: int
    reason: str
    booked_at: datetime


class NotRefundable(Exception):
    """The amount exceeds what is left of the charge."""


def refund(
    connection: Connection,
    request_id: str,
    amount_nanos: int | None = None,
    *,
    key: str,
    actor: str,
    reason: str,
    kind: RefundKind = "refund",
    clock: Clock = utc_now,
) -> Transfer:
    """Refund a part of a charge, once per key; without an amount, all that is left of it.

    Raise ``LookupError`` if the receipt does not exist, ``NotRefundable`` if the amount exceeds
    what is left, ``TransferConflict`` if the key was used for another transfer.
    """
    check_text(key, "the reference", longest=KEY_MAX, required=True)
    check_text(actor, "the actor", longest=NAME_MAX, required=True)
    check_text(reason, "the reason", longest=REASON_MAX, required=True)
    now = booking_time(connection, clock)
    receipt = (
        # Locked, so that the receipt is not archived until its refund refers to it.
        connection.execute(
            select(receipts)
            .where(receipts.c.request_id == request_id)
            .with_for_update(read=True, key_share=True)
        )
        .mappings()
        .first()
    )
    if receipt is None:
        raise LookupError(f"no receipt for request {request_id!r}")
    account_id = receipt["account_id"]
    account = lock_accounts(connection, [account_id])[account_id]
    if account["organised"]:
        lock_organisations(connection, [account_id])
    revenue = SYSTEM_ACCOUNTS["revenue"]
    known = _booked(connection, key, request_id, amount_nanos)
    if known is not None:
        return known

    given, count = connection.execute(
        select(exact_sum(refunds.c.amount_nanos), func.count()).where(
            refunds.c.request_id == request_id
        )
    ).one()
    left = receipt["charge_nanos"] - given
    amount = left if amount_nanos is None else amount_nanos
    if not 0 < amount <= left:
        raise NotRefundable(
            f"{request_id} was charged ${format_usd(receipt['charge_nanos'])}, of which "
            f"${format_usd(left)} can be refunded, not ${format_usd(amount)}"
        )
    made = move(
        connection, account, amount, revenue,
        kind=kind, key=key, actor=actor, reason=reason, now=now,
    )  # fmt: skip
    open_lot(
        connection, account_id, amount,
        kind="paid", posted_before=account["posted_nanos"], transfer_id=made.id, created_at=now,
    )  # fmt: skip
    connection.execute(
        insert(refunds).values(
            request_id=request_id,
            seq=count + 1,
            kind=kind,
            account_id=account_id,
            amount_nanos=amount,
            transfer_id=made.id,
            booked_at=now,
        )
    )
    _release_limits(connection, receipt["key_id"], receipt["windows"] or [], amount)
    return made


def charged_account(connection: Connection, request_id: str) -> int:
    """Return the account that a closed request belongs to. It must exist."""
    query = select(receipts.c.account_id).where(receipts.c.request_id == request_id)
    return int(connection.execute(query).scalar_one())


def refunds_of(connection: Connection, request_id: RequestId) -> list[Refund]:
    """List the refunds of a request, oldest first."""
    query = select(refunds).where(refunds.c.request_id == request_id).order_by(refunds.c.seq)
    rows = connection.execute(query).all()
    if not rows:
        return []
    # Not by a join, which can read all partitions: a refund has the time of its transfer.
    moved = select(transfers.c.id, transfers.c.reason).where(
        transfers.c.id.in_([row.transfer_id for row in rows]),
        transfers.c.booked_at.in_([row.booked_at for row in rows]),
    )
    reasons: dict[int, str] = dict(connection.execute(moved).all())
    return [
        Refund(row.kind, row.amount_nanos, reasons[row.transfer_id], row.booked_at) for row in rows
    ]


def _booked(
    connection: Connection, key: str, request_id: str, amount_nanos: int | None
) -> Transfer | None:
    """Find the refund booked under a key. Without an amount, any amount matches."""
    if not is_used(connection, key):
        return None
    row = (
        connection.execute(
            select(transfers, refunds.c.request_id)
            .join(refunds, refunds.c.transfer_id == transfers.c.id, isouter=True)
            .where(transfers.c.key == key)
        )
        .mappings()
        .first()
    )
    if row is None:
        return None
    if row["request_id"] != request_id:
        raise TransferConflict(f"{key} was already used for a different request")
    amount = row["amount_nanos"] if amount_nanos is None else amount_nanos
    return find_transfer(connection, key, row["from_account"], row["to_account"], amount)


def _release_limits(
    connection: Connection, key_id: int, windows: list[list[int]], amount_nanos: int
) -> None:
    """Reduce what the charge spent of its key's spend limit and of its budget windows."""
    connection.execute(
        update(keys)
        .where(keys.c.id == key_id)
        .values(spent_nanos=keys.c.spent_nanos - amount_nanos)
    )
    for budget_id, starts_us in windows:
        connection.execute(
            update(budget_windows)
            .where(budget_windows.c.budget_id == budget_id, budget_windows.c.starts_us == starts_us)
            .values(spent_nanos=budget_windows.c.spent_nanos - amount_nanos)
        )
