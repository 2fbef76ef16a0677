"""Corrections after a pricing mistake: refund the difference to what requests should have cost.

A receipt never changes and the price promised at acceptance is never exceeded, so a correction only
refunds. It is planned first, and then books one transfer per receipt, once per reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from gateway.accounts.locks import lock_accounts, lock_organisations
from gateway.archive.marks import archived_months, refuse_archived
from gateway.checks.entered import REFERENCE_MAX, check_text
from gateway.ledger.closed import UNITS
from gateway.ledger.discounts import class_price, read_discounts
from gateway.ledger.periods import booking_time
from gateway.ledger.refunds import NotRefundable, refund
from gateway.ledger.transfers import TransferConflict
from gateway.pricing import Price, UnpricedUsage, charge
from gateway.sql.database import exact_sum
from gateway.tables.core import receipts, refunds
from gateway.tables.settlement_time import settled_within
from workers.contract.jobs import Usage


@dataclass(frozen=True, slots=True)
class Correction:
    """What a request was charged (less refunds), and what it should have cost."""

    request_id: str
    account_id: int
    paid_nanos: int
    due_nanos: int

    @property
    def back_nanos(self) -> int:
        return self.paid_nanos - self.due_nanos


def plan(
    connection: Connection,
    model: str,
    price: Price,
    *,
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None = None,
) -> list[Correction]:
    """Find requests accepted in a span that were charged more than the right price.

    Raise ``Gone`` if receipts of the span are archived.
    """
    refuse_archived(archived_months(connection, accepted=(starts_at, ends_at)), "a correction")
    return list(_overpaid(connection, model, price, starts_at, ends_at, account_id))


def post(
    connection: Connection,
    corrections: Sequence[Correction],
    *,
    reference: str,
    actor: str,
    reason: str,
) -> int:
    """Refund what was planned, once per reference; return the amount booked by this call."""
    check_text(reference, "the reference", longest=REFERENCE_MAX, required=True)
    booked = 0
    # In the global lock order: the month, all accounts, all organisations.
    booking_time(connection)
    lock_organisations(
        connection, lock_accounts(connection, {one.account_id for one in corrections})
    )
    for each in sorted(corrections, key=lambda each: (each.account_id, each.request_id)):
        try:
            made = refund(
                connection,
                each.request_id,
                each.back_nanos,
                key=f"correction:{reference}:{each.request_id}",
                actor=actor,
                reason=reason,
                kind="correction",
            )
        except (TransferConflict, NotRefundable):
            # Planned again after a part was booked, or refunded since: nothing more is due.
            continue
        if not made.repeated:
            booked += made.amount_nanos
    return booked


def _overpaid(
    connection: Connection,
    model: str,
    price: Price,
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None,
) -> Iterator[Correction]:
    given = (
        select(exact_sum(refunds.c.amount_nanos))
        .where(refunds.c.request_id == receipts.c.request_id)
        .scalar_subquery()
    )
    discounts = read_discounts(connection)
    query = (
        select(
            receipts.c.request_id,
            receipts.c.account_id,
            receipts.c.service_class,
            receipts.c.accepted_at,
            receipts.c.charge_nanos - given,
            receipts.c.attributes,
            *(receipts.c[unit] for unit in UNITS),
        )
        .where(
            receipts.c.model == model,
            receipts.c.outcome == "charged",
            receipts.c.accepted_at >= starts_at,
            receipts.c.accepted_at < ends_at,
            # What was accepted in the span was settled since: older months are not read.
            *settled_within(connection, starts_at),
        )
        .order_by(receipts.c.request_id)
    )
    if account_id is not None:
        query = query.where(receipts.c.account_id == account_id)
    for row in connection.execute(query):
        request_id, owner, service_class, accepted_at, paid, attributes, *quantities = row
        usage = Usage(**dict(zip(UNITS, quantities, strict=True)), attributes=attributes or {})
        # A batch was charged the discounted price; it is due the discounted right price.
        right = class_price(price, service_class, discounts, model, accepted_at) or price
        try:
            due = charge(right, usage).total_nanos
        except UnpricedUsage as error:
            raise ValueError(f"this price does not cover {request_id}: {error}") from None
        if due < paid:
            yield Correction(request_id, owner, paid, due)
