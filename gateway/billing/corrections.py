"""Corrections after a pricing mistake: refund the difference to what requests should have cost.

A receipt never changes and the price promised at acceptance is never exceeded, so a correction only
refunds. It is planned first, and then books one transfer per receipt, once per reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, func, select

from gateway.accounts.locks import lock_accounts, lock_organisations
from gateway.archive.marks import Archive, accepted_archives, archive_changed, refuse_archived
from gateway.billing.charged import (
    NOTED,
    ChargedRequest,
    NoteProgress,
    noted,
    read_charged,
    stored_charged,
)
from gateway.checks.entered import REFERENCE_MAX, check_text
from gateway.ledger.discounts import Discounts, class_price, read_discounts
from gateway.ledger.periods import booking_time
from gateway.ledger.refunds import NotRefundable, refund
from gateway.ledger.transfers import TransferConflict
from gateway.pricing import Price, UnpricedUsage, charge
from gateway.sql.database import exact_sum
from gateway.tables.core import receipts, refunds
from gateway.tables.settlement_time import settled_within

_PART: Final = 1000
"""Requests whose refunds are read by one query."""


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


@dataclass(frozen=True, slots=True)
class ArchivedCorrections:
    """What was charged too much in archived months. Its receipts are in the database again, unless
    nothing is to be booked."""

    archives: Sequence[Archive]
    overpaid: Sequence[Correction]


def plan(
    connection: Connection,
    model: str,
    price: Price,
    *,
    starts_at: datetime,
    ends_at: datetime,
    account_id: int | None = None,
    archived: ArchivedCorrections | None = None,
    progress: NoteProgress | None = None,
) -> list[Correction]:
    """Find requests accepted in a span that were charged more than the right price.

    ``archived``: what was found in archives. Raise ``Gone`` without it if receipts of the span are
    archived, ``Unavailable`` if a month was archived or restored since.
    """
    archives = accepted_archives(connection, starts_at, ends_at)
    if archived is None:
        refuse_archived([archive.month for archive in archives], "a correction")
    elif [each.nonce for each in archives] != [each.nonce for each in archived.archives]:
        raise archive_changed()
    conditions = [
        receipts.c.model == model,
        receipts.c.accepted_at >= starts_at,
        receipts.c.accepted_at < ends_at,
        # What was accepted in the span was settled since: older months are not read.
        *settled_within(connection, starts_at),
    ]
    if account_id is not None:
        conditions.append(receipts.c.account_id == account_id)
    query = stored_charged(archives, *conditions)
    rows = connection.execute(query, execution_options={"yield_per": NOTED}).mappings()
    requests: Iterator[ChargedRequest] = map(read_charged, rows)
    if progress is not None:
        counted = select(func.count()).select_from(query.subquery())
        requests = noted(requests, connection.execute(counted).scalar_one(), progress)
    found = list(overpaid(requests, price, read_discounts(connection)))
    if archived is not None:
        found += archived.overpaid
    return sorted(_less_refunds(connection, found), key=lambda each: each.request_id)


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


def overpaid(
    requests: Iterable[ChargedRequest], price: Price, discounts: Discounts
) -> Iterator[Correction]:
    """Yield the requests whose charge exceeds what they cost at a price."""
    for each in requests:
        # A batch was charged the discounted price; it is due the discounted right price.
        right = class_price(price, each.service_class, discounts, each.model, each.accepted_at)
        try:
            due = charge(right or price, each.usage).total_nanos
        except UnpricedUsage as error:
            raise ValueError(f"this price does not cover {each.request_id}: {error}") from None
        if due < each.charge_nanos:
            yield Correction(each.request_id, each.account_id, each.charge_nanos, due)


def _less_refunds(connection: Connection, found: Sequence[Correction]) -> Iterator[Correction]:
    """Subtract what was refunded; yield what is still paid beyond the right price."""
    for start in range(0, len(found), _PART):
        some = found[start : start + _PART]
        query = (
            select(refunds.c.request_id, exact_sum(refunds.c.amount_nanos))
            .where(refunds.c.request_id.in_([each.request_id for each in some]))
            .group_by(refunds.c.request_id)
        )
        given: dict[str, int] = dict(connection.execute(query).all())
        for each in some:
            paid = each.paid_nanos - given.get(each.request_id, 0)
            if each.due_nanos < paid:
                yield replace(each, paid_nanos=paid)
