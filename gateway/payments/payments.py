"""Payments and their states: requested, paid, refunded, disputed; each event is booked once.

An event is recorded and its money booked in one transaction, under the provider's event id, so
events can be delivered repeatedly and in any order. A provider's refund charges back the total
refunded so far, less earlier chargebacks. A dispute charges back its amount, which is credited
again if the dispute is won. Knows no provider.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from sqlalchemy import Connection, RowMapping, insert, select, tuple_, update

from gateway import metrics
from gateway.accounts.locks import lock_accounts
from gateway.errors import InvalidRequest
from gateway.ledger.periods import booking_time
from gateway.ledger.reconcile import Finding
from gateway.ledger.transfers import add_credit, chargeback
from gateway.payments.provider import PaidEvent, PaymentEvent
from gateway.pricing import NANOS_PER_CENT, format_usd
from gateway.sql.database import upsert
from gateway.tables.payments import payment_events, payments

log = logging.getLogger(__name__)

Status: TypeAlias = Literal["open", "paid", "expired", "failed", "refunded", "disputed"]
Applied: TypeAlias = Literal["booked", "noted", "repeated", "unknown", "refused"]


@dataclass(frozen=True, slots=True)
class Payment:
    id: str
    account_id: int
    provider: str
    reference: str
    amount_nanos: int
    returned_nanos: int
    status: Status
    created_at: datetime


def new_payment_id() -> str:
    return f"pay_{secrets.token_hex(16)}"


def record_payment(
    connection: Connection,
    payment_id: str,
    account_id: int,
    amount_nanos: int,
    *,
    provider: str,
) -> Payment:
    """Record a payment before the provider's checkout is opened; no money moves yet."""
    made = connection.execute(
        insert(payments)
        .values(
            id=payment_id,
            account_id=account_id,
            provider=provider,
            reference=payment_id,
            amount_nanos=amount_nanos,
            status="open",
            created_at=booking_time(connection),
        )
        .returning(payments)
    )
    return _payment(made.mappings().one())


def set_reference(connection: Connection, payment_id: str, reference: str) -> None:
    """Store the provider's reference of a payment."""
    connection.execute(
        update(payments).where(payments.c.id == payment_id).values(reference=reference)
    )


def list_payments(
    connection: Connection,
    account_id: int | None,
    *,
    payment_id: str | None = None,
    limit: int = 100,
    after: str | None = None,
) -> list[Payment]:
    """List the payments of an account or of all, newest first, or only the one with an id.

    ``after``: the id of the last payment of the page before.
    """
    query = select(payments)
    if account_id is not None:
        query = query.where(payments.c.account_id == account_id)
    if payment_id is not None:
        query = query.where(payments.c.id == payment_id)
    if after is not None:
        last = select(payments.c.created_at, payments.c.id).where(payments.c.id == after)
        place = connection.execute(last).first()
        if place is None:
            raise InvalidRequest(
                "invalid_value", f"cursor is {after!r}, which no page has.", param="cursor"
            )
        query = query.where(tuple_(payments.c.created_at, payments.c.id) < tuple(place))
    query = query.order_by(payments.c.created_at.desc(), payments.c.id.desc()).limit(limit)
    return [_payment(row) for row in connection.execute(query).mappings()]


def apply(connection: Connection, event: PaymentEvent, *, provider: str) -> Applied:
    """Book an event, once."""
    now = booking_time(connection)
    noted = connection.execute(
        upsert(connection, payment_events)
        .values(provider=provider, event_id=event.id, kind=event.name, received_at=now)
        .on_conflict_do_nothing()
        .returning(payment_events.c.event_id)
    )
    if noted.first() is None:
        return "repeated"
    if event.kind == "other":
        return "noted"
    row = _find(connection, event, provider)
    if row is None:
        log.warning("ignored event %s %s: unknown payment", event.name, event.id)
        return "unknown"
    lock_accounts(connection, [row["account_id"]])
    row = _find(connection, event, provider)
    assert row is not None
    if event.currency != "usd" or (
        event.kind == "paid" and event.amount_cents * NANOS_PER_CENT != row["amount_nanos"]
    ):
        metrics.PAYMENTS.labels(provider, "refused").inc()
        log.error(
            "%s: paid %d cents (%s) instead of $%s; nothing was booked",
            row["id"],
            event.amount_cents,
            event.currency,
            format_usd(row["amount_nanos"]),
        )
        return "refused"
    metrics.PAYMENTS.labels(provider, event.kind).inc()
    return _book(connection, row, event, provider)


def compare_payments(
    connection: Connection, paid: Sequence[PaidEvent], *, provider: str
) -> list[Finding]:
    """R12: the payments that the provider reports are booked with the same amounts."""
    rows = connection.execute(
        select(payments.c.reference, payments.c.amount_nanos, payments.c.transfer_id).where(
            payments.c.provider == provider,
            payments.c.reference.in_([each.reference for each in paid]),
        )
    )
    booked = {row.reference: row.amount_nanos for row in rows if row.transfer_id is not None}
    findings = []
    for each in paid:
        amount = each.amount_cents * NANOS_PER_CENT
        if booked.get(each.reference) != amount:
            here = format_usd(booked.get(each.reference, 0))
            message = f"is ${format_usd(amount)} at {provider}, but ${here} in the ledger"
            findings.append(Finding("R12", each.reference, message))
    return findings


def _book(connection: Connection, row: RowMapping, event: PaymentEvent, provider: str) -> Applied:
    payment_id, account_id = row["id"], row["account_id"]
    amount = event.amount_cents * NANOS_PER_CENT
    match event.kind:
        case "paid":
            _pay(connection, row, event.intent, provider)
        case "failed" | "expired":
            if row["status"] == "open":
                _set(connection, payment_id, status=event.kind)
        case "refunded":
            # A refund implies a payment, even if the payment event has not arrived yet.
            _pay(connection, row, event.intent, provider)
            due = min(amount, row["amount_nanos"]) - row["returned_nanos"]
            if due > 0:
                chargeback(
                    connection, account_id, due,
                    key=f"refunded:{provider}:{payment_id}:{event.amount_cents}",
                    actor=provider, reason=f"refund of {payment_id}",
                )  # fmt: skip
                _set(connection, payment_id, status="refunded", returned=amount)
        case "disputed":
            _pay(connection, row, event.intent, provider)
            chargeback(
                connection, account_id, amount,
                key=f"disputed:{provider}:{event.subject}",
                actor=provider, reason=f"dispute of {payment_id}",
            )  # fmt: skip
            _set(connection, payment_id, status="disputed")
        case "dispute_won":
            add_credit(
                connection, account_id, amount,
                kind="topup", key=f"dispute_won:{provider}:{event.subject}",
                actor=provider, reason=f"dispute of {payment_id} was won",
            )  # fmt: skip
            _set(connection, payment_id, status="paid")
    return "booked"


def _pay(connection: Connection, row: RowMapping, intent: str | None, provider: str) -> None:
    """Book a payment's money, unless it is booked already."""
    if row["transfer_id"] is not None:
        return
    made = add_credit(
        connection, row["account_id"], row["amount_nanos"],
        kind="topup", key=f"topup:{provider}:{row['id']}",
        actor=provider, reason=f"payment {row['id']}",
    )  # fmt: skip
    connection.execute(
        update(payments)
        .where(payments.c.id == row["id"])
        .values(status="paid", intent=intent or row["intent"], transfer_id=made.id)
    )


def _set(
    connection: Connection, payment_id: str, *, status: Status, returned: int | None = None
) -> None:
    values: dict[str, object] = {"status": status}
    if returned is not None:
        values["returned_nanos"] = returned
    connection.execute(update(payments).where(payments.c.id == payment_id).values(**values))


def _find(connection: Connection, event: PaymentEvent, provider: str) -> RowMapping | None:
    """Find an event's payment by our id if the event carries it, else by the provider's ids."""
    for column, value in (
        (payments.c.id, event.payment_id),
        (payments.c.reference, event.reference),
        (payments.c.intent, event.intent),
    ):
        if value is not None:
            query = select(payments).where(payments.c.provider == provider, column == value)
            row = connection.execute(query).mappings().first()
            if row is not None:
                return row
    return None


def _payment(row: RowMapping) -> Payment:
    return Payment(
        id=row["id"],
        account_id=row["account_id"],
        provider=row["provider"],
        reference=row["reference"],
        amount_nanos=row["amount_nanos"],
        returned_nanos=row["returned_nanos"],
        status=row["status"],
        created_at=row["created_at"],
    )
