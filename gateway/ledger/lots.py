"""Lots: the credits that make up a positive balance, and the order in which they are consumed.

Every credit opens a lot; every charge consumes lots by priority, then expiry, then id. Invariant,
under the account's lock: the remaining amounts of an account's lots sum to its posted balance, or
to zero if the balance is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

from sqlalchemy import Connection, bindparam, insert, literal_column, select, update

from gateway.sql.statements import CompiledStatement, any_of
from gateway.tables.core import lots

LotKind: TypeAlias = Literal["paid", "promo", "free"]


@dataclass(frozen=True, slots=True)
class Lot:
    """A credit that has not been fully consumed."""

    kind: LotKind
    amount_nanos: int
    remaining_nanos: int
    expires_at: datetime | None
    transfer_id: int | None = None
    """The transfer that booked it."""


PRIORITY: Final[Mapping[LotKind, int]] = {"free": 10, "promo": 50, "paid": 100}
"""Default priority by kind, lowest first: granted credit is consumed before paid credit."""

_OPEN: Final = CompiledStatement(
    select(
        lots.c.id,
        lots.c.account_id,
        lots.c.kind,
        lots.c.amount_nanos,
        lots.c.remaining_nanos,
        lots.c.expires_at,
        lots.c.transfer_id,
    )
    # A literal: with a parameter, a prepared plan could not use the partial index.
    .where(any_of(lots.c.account_id, "accounts"), lots.c.remaining_nanos > literal_column("0"))
    .order_by(
        lots.c.account_id,
        lots.c.priority,
        lots.c.expires_at.is_(None),
        lots.c.expires_at,
        lots.c.id,
    )
)
_TAKE: Final = CompiledStatement(
    update(lots)
    .where(lots.c.id == bindparam("lot"))
    .values(remaining_nanos=lots.c.remaining_nanos - bindparam("taken"))
)


def open_lot(
    connection: Connection,
    account_id: int,
    amount_nanos: int,
    *,
    kind: LotKind,
    posted_before: int,
    transfer_id: int,
    created_at: datetime,
    priority: int | None = None,
    expires_at: datetime | None = None,
) -> None:
    """Open a lot for a credit. A negative balance reduces the lot immediately."""
    connection.execute(
        insert(lots).values(
            account_id=account_id,
            kind=kind,
            amount_nanos=amount_nanos,
            remaining_nanos=min(amount_nanos, max(posted_before + amount_nanos, 0)),
            priority=PRIORITY[kind] if priority is None else priority,
            expires_at=expires_at,
            transfer_id=transfer_id,
            created_at=created_at,
        )
    )


def consume(
    connection: Connection, amounts: Mapping[int, int], *, first: LotKind | None = None
) -> None:
    """Consume lots of locked accounts, those of kind ``first`` first; the rest becomes debt."""
    due = {account: amount for account, amount in amounts.items() if amount}
    if not due:
        return
    rows = _OPEN.rows(connection, accounts=sorted(due))
    if first is not None:
        rows.sort(key=lambda row: row["kind"] != first)
    taken = []
    for row in rows:
        amount = min(row["remaining_nanos"], due[row["account_id"]])
        if amount:
            due[row["account_id"]] -= amount
            taken.append({"lot": row["id"], "taken": amount})
    _TAKE.run(connection, taken)


def open_lots(connection: Connection, account_id: int) -> list[Lot]:
    """List an account's lots in the order in which they are consumed."""
    return [
        Lot(
            row["kind"],
            row["amount_nanos"],
            row["remaining_nanos"],
            row["expires_at"],
            row["transfer_id"],
        )
        for row in _OPEN.rows(connection, accounts=[account_id])
    ]


def consume_lot(connection: Connection, lot_id: int, amount_nanos: int) -> None:
    """Consume a part of one lot of a locked account."""
    _TAKE.run(connection, [{"lot": lot_id, "taken": amount_nanos}])
