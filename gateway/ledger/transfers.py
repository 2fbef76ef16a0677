"""Transfers: how money comes into an account. Append-only, idempotent by the payer's reference."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from sqlalchemy import Connection, insert, select, update

from gateway.ledger.holds import lock_accounts
from gateway.tables import SYSTEM_ACCOUNTS, accounts, transfers

CreditKind: TypeAlias = Literal["topup", "grant"]

_SOURCE: dict[CreditKind, str] = {"topup": "cash", "grant": "promo"}


@dataclass(frozen=True, slots=True)
class Transfer:
    """A booked movement; ``repeated`` if it had been booked before under the same key."""

    id: int
    amount_nanos: int
    posted_after: int
    repeated: bool


class TransferConflict(Exception):
    """The key was used before for another amount or account."""


def add_credit(
    connection: Connection,
    account_id: int,
    amount_nanos: int,
    *,
    kind: CreditKind,
    key: str,
    actor: str,
    reason: str,
) -> Transfer:
    """Move money into an account, from cash (paid) or from promo (given), once per key.

    Locks the account. Raise ``LookupError`` if there is no such account, ``ValueError`` if the
    amount is not positive, ``TransferConflict`` if the key stands for another movement.
    """
    if amount_nanos <= 0:
        raise ValueError("the amount must be positive")
    account = lock_accounts(connection, [account_id]).get(account_id)
    if account is None:
        raise LookupError(f"there is no account {account_id}")
    source = SYSTEM_ACCOUNTS[_SOURCE[kind]]
    known = connection.execute(select(transfers).where(transfers.c.key == key)).mappings().first()
    if known is not None:
        if (known["from_account"], known["to_account"], known["amount_nanos"]) != (
            source,
            account_id,
            amount_nanos,
        ):
            raise TransferConflict(f"{key} was used before, for another amount or account")
        return Transfer(known["id"], amount_nanos, known["posted_after"], repeated=True)
    posted_after = account["posted_nanos"] + amount_nanos
    connection.execute(
        update(accounts)
        .where(accounts.c.id == account_id)
        .values(posted_nanos=posted_after, version=account["version"] + 1)
    )
    id = connection.execute(
        insert(transfers)
        .values(
            key=key,
            kind=kind,
            from_account=source,
            to_account=account_id,
            amount_nanos=amount_nanos,
            posted_after=posted_after,
            account_version=account["version"] + 1,
            actor=actor,
            reason=reason,
            booked_at=datetime.now(UTC),
        )
        .returning(transfers.c.id)
    ).scalar_one()
    return Transfer(id, amount_nanos, posted_after, repeated=False)
