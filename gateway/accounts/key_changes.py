"""Changes of keys, and their replacement by new ones.

Each runs under the account's lock, as do the holds that read a key's limits.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, insert, select, update

from gateway.accounts.budgets import create_budget, list_budgets
from gateway.accounts.keys import (
    KeyInfo,
    KeyValues,
    check_values,
    create_key,
    key_by_id,
    successors,
)
from gateway.accounts.locks import lock_accounts
from gateway.pricing import format_usd
from gateway.tables.core import keys, rate_limits

OVERLAP_MAX: Final = timedelta(days=366)


def change_key(connection: Connection, key_id: int, values: KeyValues) -> KeyInfo:
    """Change the attributes that are given, from the next request on.

    Raise ``LookupError`` if the key does not exist, ``ValueError`` if a value is not valid, the
    spend limit is less than what the key has used, or the key has been revoked.
    """
    found = _lock(connection, key_id)
    if found.revoked_at is not None:
        raise ValueError(f"the key {found.prefix}… has been revoked and cannot be changed")
    checked = check_values(values)
    used = found.spent_nanos + found.held_nanos
    limit = checked.get("spend_limit_nanos")
    if limit is not None and limit < used:
        raise ValueError(
            f"the spend limit cannot be ${format_usd(limit)}: the key has already used "
            f"${format_usd(used)}"
        )
    if checked:
        connection.execute(update(keys).where(keys.c.id == key_id).values(**checked))
    return key_by_id(connection, key_id)


def rotate_key(
    connection: Connection, key_id: int, *, pepper: bytes, overlap: timedelta, now: datetime
) -> tuple[str, KeyInfo, KeyInfo]:
    """Create a key that replaces another one, which expires after ``overlap``.

    Return the secret, the new key and the old one. The new key has the same attributes, copies of
    the rate limits and budgets, the rest of the spend limit and, if the old one has an expiry, the
    same lifetime. Raise ``LookupError`` if the key does not exist, ``ValueError`` if it has been
    revoked, replaced or has expired, or the overlap is not from 0 to ``OVERLAP_MAX``.
    """
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise ValueError(
            f"the overlap is {overlap.total_seconds():g} s; it must be between 0 and "
            f"{OVERLAP_MAX.total_seconds():g}"
        )
    old = _lock(connection, key_id)
    if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
        raise ValueError(f"the key {old.prefix}… has been revoked or has expired; create another")
    lifetime = None if old.expires_at is None else old.expires_at - old.created_at
    if (number := successors(connection, [old.id]).get(old.id)) is not None:
        # Its own expiry is the end of that overlap, and says nothing about the new key's.
        earlier = key_by_id(connection, number)
        if earlier.revoked_at is None:
            raise ValueError(
                f"the key {old.prefix}… has been replaced by {earlier.prefix}…; rotate that one "
                "or, if its secret was lost, revoke it first"
            )
        lifetime = None if earlier.expires_at is None else earlier.expires_at - earlier.created_at
    rest = None
    if old.spend_limit_nanos is not None:
        rest = max(old.spend_limit_nanos - old.spent_nanos - old.held_nanos, 0)
    secret, made = create_key(
        connection,
        old.account_id,
        pepper=pepper,
        name=old.name,
        scopes=old.scopes,
        expires_at=None if lifetime is None else now + lifetime,
        requests_per_minute=old.requests_per_minute,
        tokens_per_minute=old.tokens_per_minute,
        spend_limit_nanos=rest,
        models=old.models,
        replaces=old.id,
        role=old.role,
        user_id=old.user_id,
    )
    _copy_limits(connection, old, made.id, now)
    ends_at = now + overlap
    if old.expires_at is None or ends_at < old.expires_at:
        connection.execute(update(keys).where(keys.c.id == old.id).values(expires_at=ends_at))
    return secret, made, key_by_id(connection, old.id)


def _lock(connection: Connection, key_id: int) -> KeyInfo:
    """Lock the account of a key, and return the key as it is under the lock."""
    lock_accounts(connection, [key_by_id(connection, key_id).account_id])
    return key_by_id(connection, key_id)


def _copy_limits(connection: Connection, old: KeyInfo, new_id: int, now: datetime) -> None:
    """Copy the rate limits and budgets of a key. Copied budgets start anew."""
    own = select(rate_limits).where(
        rate_limits.c.account_id == old.account_id, rate_limits.c.key_id == old.id
    )
    limits: list[dict[str, Any]] = [
        {**row, "key_id": new_id} for row in connection.execute(own).mappings()
    ]
    if limits:
        connection.execute(insert(rate_limits), limits)
    for budget in list_budgets(connection, old.account_id):
        if budget.key_id == old.id:
            create_budget(
                connection,
                old.account_id,
                budget.limit_nanos,
                window=budget.window,
                hard=budget.hard,
                key_id=new_id,
                model=budget.model,
                name=budget.name,
                tz=budget.tz,
                now=now,
            )
