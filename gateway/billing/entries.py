"""An account's side of the ledger: each movement of its balance, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, literal_column, select

from gateway.tables.core import receipts, refunds, transfers

REQUESTS_MAX = 1000
"""Shown of one charge; a batch of charges has at most 128."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One movement: what came in is positive. ``requests`` counts what a charge is for."""

    id: int
    kind: str
    amount_nanos: int
    balance_nanos: int
    actor: str
    reason: str
    booked_at: datetime
    requests: int
    request_id: str | None
    """Of a refund or correction: the request that it is for."""


@dataclass(frozen=True, slots=True)
class ChargedEntry:
    """One request's part of a charge."""

    request_id: str
    model: str
    cost_nanos: int


def entries(
    connection: Connection,
    account_id: int,
    *,
    limit: int,
    below: int | None = None,
    kind: str | None = None,
) -> list[LedgerEntry]:
    """Read movements by falling number, from below a number on."""
    found = []
    for side in (transfers.c.from_account, transfers.c.to_account):
        query = _entries().where(side == account_id).order_by(transfers.c.id.desc())
        if below is not None:
            query = query.where(transfers.c.id < below)
        if kind is not None:
            query = query.where(transfers.c.kind == kind)
            if kind != "charge":
                # In these words the index of the rare kinds has it.
                query = query.where(transfers.c.kind != literal_column("'charge'"))
        inward = side is transfers.c.to_account
        found += [_entry(row, inward) for row in connection.execute(query.limit(limit))]
    found.sort(key=lambda entry: entry.id, reverse=True)
    return found[:limit]


def find_entry(
    connection: Connection, account_id: int, id: int
) -> tuple[LedgerEntry, list[ChargedEntry]]:
    """Read one movement and the requests of a charge. Raise ``LookupError``."""
    for side in (transfers.c.from_account, transfers.c.to_account):
        row = connection.execute(_entries().where(transfers.c.id == id, side == account_id)).first()
        if row is not None:
            rows = connection.execute(
                select(receipts.c.request_id, receipts.c.model, receipts.c.charge_nanos)
                .where(receipts.c.transfer_id == id)
                .order_by(receipts.c.request_id)
                .limit(REQUESTS_MAX)
            )
            return _entry(row, side is transfers.c.to_account), [
                ChargedEntry(*each) for each in rows
            ]
    raise LookupError(f"there is no entry {id}")


def _entries() -> Any:
    counted = select(func.count()).where(receipts.c.transfer_id == transfers.c.id).scalar_subquery()
    return select(
        transfers.c.id,
        transfers.c.kind,
        transfers.c.amount_nanos,
        transfers.c.posted_after,
        transfers.c.actor,
        transfers.c.reason,
        transfers.c.booked_at,
        counted.label("requests"),
        refunds.c.request_id,
    ).outerjoin(refunds, refunds.c.transfer_id == transfers.c.id)


def _entry(row: Any, inward: bool) -> LedgerEntry:
    return LedgerEntry(
        id=row.id,
        kind=row.kind,
        amount_nanos=row.amount_nanos if inward else -row.amount_nanos,
        balance_nanos=row.posted_after,
        actor=row.actor,
        reason=row.reason,
        booked_at=row.booked_at,
        requests=row.requests,
        request_id=row.request_id,
    )
