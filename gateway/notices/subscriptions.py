"""Subscriptions: where the notices of an account or of the operator go, and which ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from gateway.accounts.locks import lock_accounts
from gateway.checks.decoding import ID_MAX
from gateway.notices.kinds import OPERATOR, kinds_of
from gateway.tables.core import SYSTEM_ACCOUNTS
from gateway.tables.notices import notice_deliveries, notice_subscriptions

MAILTO: Final = "mailto:"
SUBSCRIPTIONS_MAX: Final = 20
"""Maximum subscriptions of one account, and of the operator."""

_TABLE: Final = notice_subscriptions


class SubscriptionExists(Exception):
    """The notices of this account already go there."""


class TooManySubscriptions(Exception):
    """The account has the maximum number of subscriptions."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """Where notices go. ``kinds`` is None for all."""

    id: int
    account_id: int
    url: str
    kinds: frozenset[str] | None
    created_at: datetime
    confirmed_at: datetime | None
    """None while the receiver of mail has not agreed: nothing else is sent there."""

    def wants(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds


def address_of(url: str) -> str | None:
    """Return the mail address of a subscription, or None if it has a webhook."""
    return url.removeprefix(MAILTO) if url.startswith(MAILTO) else None


def subscribe(
    connection: Connection,
    account_id: int,
    url: str,
    kinds: Collection[str] | None,
    *,
    confirmed: bool = True,
) -> Subscription:
    """Create a subscription of an account, or of ``OPERATOR``; ``url`` was checked.

    Raise ``ValueError`` if it cannot get a kind of notices, ``SubscriptionExists`` or
    ``TooManySubscriptions``.
    """
    known = kinds_of(account_id)
    if unknown := sorted({*(kinds or ())} - {*known}):
        whose = "the operator" if account_id == OPERATOR else "an account"
        raise ValueError(
            f"{unknown[0]!r} is not a kind of notices for {whose}; send some of {', '.join(known)}"
        )
    # Concurrent calls must not exceed the maximum together; the operator's account is the cash.
    lock_accounts(connection, [account_id or SYSTEM_ACCOUNTS["cash"]])
    own = select(_TABLE).where(_TABLE.c.account_id == account_id)
    if connection.execute(own.where(_TABLE.c.url == url)).first() is not None:
        raise SubscriptionExists(f"notices already go to {url}; remove that subscription first")
    count = select(func.count()).select_from(_TABLE).where(_TABLE.c.account_id == account_id)
    if connection.execute(count).scalar_one() >= SUBSCRIPTIONS_MAX:
        raise TooManySubscriptions(f"there are already {SUBSCRIPTIONS_MAX} subscriptions")
    now = datetime.now(UTC)
    made = (
        insert(_TABLE)
        .values(
            account_id=account_id,
            url=url,
            kinds=None if kinds is None else sorted({*kinds}),
            created_at=now,
            confirmed_at=now if confirmed else None,
        )
        .returning(_TABLE)
    )
    return _subscription(connection.execute(made).mappings().one())


def find_subscription(connection: Connection, subscription_id: int) -> Subscription:
    """Find a subscription. Raise ``LookupError``."""
    known = 0 < subscription_id <= ID_MAX
    query = select(_TABLE).where(_TABLE.c.id == (subscription_id if known else 0))
    row = connection.execute(query).mappings().first()
    if row is None:
        raise LookupError(f"unknown subscription {subscription_id}")
    return _subscription(row)


def confirm(connection: Connection, subscription_id: int) -> Subscription:
    """Record that the receiver agreed; doing so again changes nothing."""
    connection.execute(
        update(_TABLE)
        .where(_TABLE.c.id == subscription_id, _TABLE.c.confirmed_at.is_(None))
        .values(confirmed_at=datetime.now(UTC))
    )
    return find_subscription(connection, subscription_id)


def unsubscribe(connection: Connection, subscription_id: int) -> None:
    """Remove a subscription. What was sent to it stays listed; what was not is not sent."""
    table = notice_deliveries
    connection.execute(
        delete(table).where(table.c.subscription_id == subscription_id, table.c.ended_at.is_(None))
    )
    connection.execute(delete(_TABLE).where(_TABLE.c.id == subscription_id))


def list_subscriptions(
    connection: Connection, *, account_id: int | None, limit: int, after: int
) -> list[Subscription]:
    """List subscriptions in order of their numbers, of one account (or 0) or of all."""
    query = select(_TABLE).where(_TABLE.c.id > after).order_by(_TABLE.c.id).limit(limit)
    if account_id is not None:
        query = query.where(_TABLE.c.account_id == account_id)
    return [_subscription(row) for row in connection.execute(query).mappings()]


def subscriptions_of(
    connection: Connection, account_ids: Collection[int]
) -> dict[int, list[Subscription]]:
    """Return the confirmed subscriptions of some accounts, by account."""
    found: dict[int, list[Subscription]] = {}
    if not account_ids:
        return found
    query = select(_TABLE).where(
        _TABLE.c.account_id.in_(sorted(account_ids)), _TABLE.c.confirmed_at.is_not(None)
    )
    for row in connection.execute(query.order_by(_TABLE.c.id)).mappings():
        found.setdefault(row["account_id"], []).append(_subscription(row))
    return found


def subscribed_accounts(connection: Connection, *, after: int, limit: int) -> Sequence[int]:
    """List accounts with subscriptions, and the operator, in order of their numbers, those greater
    than ``after``."""
    query = (
        select(_TABLE.c.account_id)
        .where(_TABLE.c.account_id > after)
        .group_by(_TABLE.c.account_id)
        .order_by(_TABLE.c.account_id)
        .limit(limit)
    )
    return connection.scalars(query).all()


def _subscription(row: RowMapping) -> Subscription:
    kinds = row["kinds"]
    return Subscription(
        row["id"],
        row["account_id"],
        row["url"],
        None if kinds is None else frozenset(kinds),
        row["created_at"],
        row["confirmed_at"],
    )
