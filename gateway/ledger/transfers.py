"""Transfers: movements of money into and out of an account, other than charges.

Append-only, each with its reason and actor. Idempotent by key: the same key never books twice. The
month's row is locked first, then the account.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    RowMapping,
    String,
    Table,
    insert,
    select,
    update,
)

from gateway.accounts.locks import lock_accounts
from gateway.checks.entered import NAME_MAX, REASON_MAX, check_amount, check_moment, check_text
from gateway.ledger.lots import LotKind, consume, open_lot
from gateway.ledger.periods import Clock, booking_time, utc_now
from gateway.pricing import NANOS_MAX, format_usd
from gateway.sql.database import wide_sum
from gateway.sql.partitions import is_partitioned
from gateway.sql.statements import Row
from gateway.tables.core import SYSTEM_ACCOUNTS, accounts, transfers

CreditKind: TypeAlias = Literal["topup", "grant", "rebate", "correction", "refund"]
TransferKind: TypeAlias = Literal[CreditKind, "charge", "expiry", "chargeback"]

KEY_MAX: Final = 200

# Only on PostgreSQL, where a trigger fills it, and so without the other tables' metadata.
_keys: Final = Table("transfer_keys", MetaData(), Column("key", String(KEY_MAX), primary_key=True))

_CREDITS: Final[Mapping[CreditKind, tuple[str, LotKind]]] = {
    # Source account, and kind of the lot.
    "topup": ("cash", "paid"),
    "grant": ("promo", "promo"),
    "rebate": ("revenue", "paid"),
    "correction": ("revenue", "paid"),
    "refund": ("revenue", "paid"),
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """A booked transfer. ``repeated``: it had already been booked under the same key."""

    id: int
    amount_nanos: int
    posted_after: int
    booked_at: datetime
    repeated: bool


class TransferConflict(Exception):
    """The key was already used with a different amount or account."""


def add_credit(
    connection: Connection,
    account_id: int,
    amount_nanos: int,
    *,
    kind: CreditKind,
    key: str,
    actor: str,
    reason: str,
    lot: LotKind | None = None,
    priority: int | None = None,
    expires_at: datetime | None = None,
    clock: Clock = utc_now,
) -> Transfer:
    """Move money into an account, once per key, and open a lot for it.

    A top-up first repays what the account owes from chargebacks. Raise ``LookupError`` if the
    account does not exist, ``ValueError`` if the amount is not positive, has already expired or
    exceeds what can be booked, ``TransferConflict`` if the key was used for another transfer.
    """
    check_amount(amount_nanos, "the amount", most=NANOS_MAX)
    _check_texts(key, actor, reason)
    if expires_at is not None:
        expires_at = check_moment(expires_at, "the expiry of the credit")
    now = booking_time(connection, clock)
    if expires_at is not None and expires_at <= now:
        raise ValueError(f"the credit would have expired already, at {expires_at.isoformat()}")
    account = _lock(connection, account_id)
    source, lot_kind = _CREDITS[kind]
    source_id = SYSTEM_ACCOUNTS[source]
    known = find_transfer(connection, key, source_id, account_id, amount_nanos)
    if known is not None:
        return known
    made = move(
        connection, account, amount_nanos, source_id,
        kind=kind, key=key, actor=actor, reason=reason, now=now,
    )  # fmt: skip
    open_lot(
        connection,
        account_id,
        amount_nanos,
        kind=lot or lot_kind,
        posted_before=account["posted_nanos"],
        transfer_id=made.id,
        created_at=now,
        priority=priority,
        expires_at=expires_at,
    )
    if kind == "topup":
        _repay(connection, account_id, key=key, actor=actor, now=now)
    return made


def chargeback(
    connection: Connection,
    account_id: int,
    amount_nanos: int,
    *,
    key: str,
    actor: str,
    reason: str,
    clock: Clock = utc_now,
) -> Transfer:
    """Reverse a payment, once per key, from the account's unheld balance.

    An amount that the balance does not cover becomes a debt in ``receivable:<id>`` and suspends the
    account. Return the transfer from the account or, if it had nothing, that of the debt. Raise as
    ``add_credit`` does.
    """
    check_amount(amount_nanos, "the amount", most=NANOS_MAX)
    _check_texts(key, actor, reason)
    now = booking_time(connection, clock)
    account = _lock(connection, account_id)
    cash = SYSTEM_ACCOUNTS["cash"]
    known = _chargeback_of(connection, key, account_id, amount_nanos)
    if known is not None:
        return known
    covered = min(amount_nanos, max(account["posted_nanos"] - account["held_nanos"], 0))
    made = None
    if covered:
        made = move(
            connection, account, -covered, cash,
            kind="chargeback", key=key, actor=actor, reason=reason, now=now,
        )  # fmt: skip
        consume(connection, {account_id: covered}, first="paid")
    if covered < amount_nanos:
        owing = _insert(
            connection,
            key=f"{key}:owed" if covered else key,
            kind="chargeback",
            source=_receivable(connection, account_id, now),
            target=cash,
            amount_nanos=amount_nanos - covered,
            posted_after=account["posted_nanos"] - covered,
            version=account["version"] + (1 if covered else 0),
            actor=actor,
            reason=reason,
            now=now,
        )
        connection.execute(
            update(accounts).where(accounts.c.id == account_id).values(status="suspended")
        )
        made = made or owing
    assert made is not None
    return made


def owed(connection: Connection, account_id: int) -> int:
    """Return an account's debt beyond its balance, from chargebacks of money that it had spent."""
    receivable = _find_receivable(connection, account_id)
    if receivable is None:
        return 0
    given = select(wide_sum(transfers.c.amount_nanos)).where(transfers.c.from_account == receivable)
    got = select(wide_sum(transfers.c.amount_nanos)).where(transfers.c.to_account == receivable)
    return connection.execute(given).scalar_one() - connection.execute(got).scalar_one()


def move(
    connection: Connection,
    account: Row,
    amount_nanos: int,
    other: int,
    *,
    kind: TransferKind,
    key: str,
    actor: str,
    reason: str,
    now: datetime,
) -> Transfer:
    """Book one transfer into (positive) or out of (negative) a locked customer account.

    The caller updates the lots. ``account`` is the row as it was locked.
    """
    posted_after = account["posted_nanos"] + amount_nanos
    if abs(posted_after) > NANOS_MAX:
        raise ValueError(f"the balance would exceed ${format_usd(NANOS_MAX)}")
    connection.execute(
        update(accounts)
        .where(accounts.c.id == account["id"])
        .values(posted_nanos=posted_after, version=account["version"] + 1)
    )
    inward = amount_nanos > 0
    return _insert(
        connection,
        key=key,
        kind=kind,
        source=other if inward else account["id"],
        target=account["id"] if inward else other,
        amount_nanos=abs(amount_nanos),
        posted_after=posted_after,
        version=account["version"] + 1,
        actor=actor,
        reason=reason,
        now=now,
    )


def find_transfer(
    connection: Connection, key: str, source: int, target: int, amount_nanos: int
) -> Transfer | None:
    """Find the transfer booked under a key. Raise ``TransferConflict`` if it is a different one."""
    if not is_used(connection, key):
        return None
    known = connection.execute(select(transfers).where(transfers.c.key == key)).mappings().first()
    if known is None:
        return None
    if (known["from_account"], known["to_account"], known["amount_nanos"]) != (
        source,
        target,
        amount_nanos,
    ):
        raise TransferConflict(f"{key} was already used with a different amount or account")
    return _repeated(known)


def is_used(connection: Connection, *keys: str) -> bool:
    """Whether a transfer other than a charge can have one of some keys.

    A transfer itself would be looked for in each of PostgreSQL's partitions.
    """
    if not is_partitioned(connection):
        return True
    query = select(_keys.c.key).where(_keys.c.key.in_(keys)).limit(1)
    return connection.execute(query).first() is not None


def _chargeback_of(
    connection: Connection, key: str, account_id: int, amount_nanos: int
) -> Transfer | None:
    """Find a chargeback booked under a key, whether it was covered fully, partly or not at all."""
    if not is_used(connection, key, f"{key}:owed"):
        return None
    rows = connection.execute(
        select(transfers).where(transfers.c.key.in_([key, f"{key}:owed"])).order_by(transfers.c.id)
    )
    known = rows.mappings().all()
    if not known:
        return None
    sources = {row["from_account"] for row in known}
    if not sources <= {account_id, _find_receivable(connection, account_id)} or amount_nanos != sum(
        row["amount_nanos"] for row in known
    ):
        raise TransferConflict(f"{key} was already used with a different amount or account")
    return _repeated(known[0])


def _repay(connection: Connection, account_id: int, *, key: str, actor: str, now: datetime) -> None:
    """Repay a debt from new money. The account stays suspended until an operator reactivates it."""
    debt = owed(connection, account_id)
    account = _lock(connection, account_id)
    amount = min(debt, max(account["posted_nanos"] - account["held_nanos"], 0))
    if amount:
        move(
            connection, account, -amount, _receivable(connection, account_id, now),
            kind="chargeback", key=f"repay:{key}", actor=actor,
            reason="repayment of a chargeback", now=now,
        )  # fmt: skip
        consume(connection, {account_id: amount}, first="paid")


def _receivable(connection: Connection, account_id: int, now: datetime) -> int:
    """Return the id of the system account for a customer's debt; create it if necessary."""
    id = _find_receivable(connection, account_id)
    if id is None:
        name = f"receivable:{account_id}"
        made = insert(accounts).values(name=name, kind="system", created_at=now)
        id = int(connection.execute(made.returning(accounts.c.id)).scalar_one())
    return id


def _find_receivable(connection: Connection, account_id: int) -> int | None:
    query = select(accounts.c.id).where(
        accounts.c.name == f"receivable:{account_id}", accounts.c.kind == "system"
    )
    return connection.execute(query).scalar()


def _insert(
    connection: Connection,
    *,
    key: str,
    kind: TransferKind,
    source: int,
    target: int,
    amount_nanos: int,
    posted_after: int,
    version: int,
    actor: str,
    reason: str,
    now: datetime,
) -> Transfer:
    id = connection.execute(
        insert(transfers)
        .values(
            key=key,
            kind=kind,
            from_account=source,
            to_account=target,
            amount_nanos=amount_nanos,
            posted_after=posted_after,
            account_version=version,
            actor=actor,
            reason=reason,
            booked_at=now,
        )
        .returning(transfers.c.id)
    ).scalar_one()
    return Transfer(id, amount_nanos, posted_after, now, repeated=False)


def _repeated(row: RowMapping) -> Transfer:
    return Transfer(
        row["id"], row["amount_nanos"], row["posted_after"], row["booked_at"], repeated=True
    )


def _lock(connection: Connection, account_id: int) -> Row:
    account = lock_accounts(connection, [account_id]).get(account_id)
    if account is None:
        raise LookupError(f"unknown account {account_id}")
    return account


def _check_texts(key: str, actor: str, reason: str) -> None:
    check_text(key, "the reference", longest=KEY_MAX, required=True)
    check_text(actor, "the actor", longest=NAME_MAX, required=True)
    check_text(reason, "the reason", longest=REASON_MAX, required=True)
