"""Sight of prompts and outputs that an owner of an account gives to operators for a while.

Operators never see contents otherwise. A grant ends by itself, or at once when an owner ends it;
its row stays, so that both sides can read later who could see what.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, RowMapping, insert, select, update

from gateway.tables.core import accounts
from gateway.tables.users import content_asks, content_grants

HOURS: Final = (1, 8, 24)
ASKED_FOR: Final = timedelta(days=7)
"""Time for which an operator's question stays open."""
ACTIVE_MAX: Final = 100
"""Grants and questions that are read at a time."""
PAST: Final = 20


@dataclass(frozen=True, slots=True)
class ContentGrant:
    id: int
    account_id: int
    account: str
    actor: str
    reason: str
    starts_at: datetime
    ends_at: datetime
    ended_by: str | None


@dataclass(frozen=True, slots=True)
class ContentAsk:
    """An operator's question for a grant, because of a request if one is named."""

    id: int
    account_id: int
    account: str
    request_id: str | None
    actor: str
    reason: str
    asked_at: datetime


def give(
    connection: Connection, account_id: int, *, actor: str, reason: str, hours: int, now: datetime
) -> ContentGrant:
    """Give sight of an account's contents. An open grant is replaced, and questions are answered.

    Raise ``ValueError`` if the time is not one of ``HOURS``.
    """
    if hours not in HOURS:
        raise ValueError(f"sight is given for {', '.join(map(str, HOURS))} hours, not {hours}")
    end(connection, account_id, actor=actor, now=now)
    close_asks(connection, account_id, now=now)
    made = connection.execute(
        insert(content_grants)
        .values(
            account_id=account_id,
            actor=actor,
            reason=reason,
            starts_at=now,
            ends_at=now + timedelta(hours=hours),
        )
        .returning(content_grants.c.id)
    ).scalar_one()
    return next(each for each in grants_of(connection, account_id) if each.id == made)


def end(
    connection: Connection, account_id: int, *, actor: str, now: datetime
) -> ContentGrant | None:
    """End the open grant of an account at once; return it, or None if there is none."""
    found = active_grants(connection, [account_id], now=now)
    if not found:
        return None
    change = update(content_grants).where(content_grants.c.id.in_([each.id for each in found]))
    connection.execute(change.values(ends_at=now, ended_by=actor))
    return found[0]


def active_grants(
    connection: Connection, account_ids: Collection[int] | None, *, now: datetime
) -> list[ContentGrant]:
    """List grants in force: of some accounts, or of all for None."""
    query = _GRANTS.where(content_grants.c.ends_at > now)
    if account_ids is not None:
        query = query.where(content_grants.c.account_id.in_(sorted(account_ids)))
    rows = connection.execute(query.order_by(content_grants.c.id.desc()).limit(ACTIVE_MAX))
    return [_grant(row) for row in rows.mappings()]


def grants_of(connection: Connection, account_id: int) -> list[ContentGrant]:
    """List the latest grants of an account, also those that have ended."""
    query = _GRANTS.where(content_grants.c.account_id == account_id)
    rows = connection.execute(query.order_by(content_grants.c.id.desc()).limit(PAST))
    return [_grant(row) for row in rows.mappings()]


def ask(
    connection: Connection,
    account_id: int,
    *,
    actor: str,
    reason: str,
    request_id: str | None,
    now: datetime,
) -> ContentAsk:
    """Ask the owners of an account for a grant."""
    made = connection.execute(
        insert(content_asks)
        .values(
            account_id=account_id,
            request_id=request_id,
            actor=actor,
            reason=reason,
            asked_at=now,
            ends_at=now + ASKED_FOR,
        )
        .returning(content_asks.c.id)
    ).scalar_one()
    rows = connection.execute(_ASKS.where(content_asks.c.id == made)).mappings()
    return _ask(rows.one())


def open_asks(
    connection: Connection, account_ids: Collection[int], *, now: datetime
) -> Sequence[ContentAsk]:
    """List the questions to some accounts that wait for an answer, newest first."""
    if not account_ids:
        return ()
    query = _ASKS.where(
        content_asks.c.account_id.in_(sorted(account_ids)), content_asks.c.ends_at > now
    )
    rows = connection.execute(query.order_by(content_asks.c.id.desc()).limit(ACTIVE_MAX))
    return [_ask(row) for row in rows.mappings()]


def close_asks(connection: Connection, account_id: int, *, now: datetime) -> int:
    """Answer the open questions to an account; return their number."""
    mine = content_asks.c.account_id == account_id, content_asks.c.ends_at > now
    return connection.execute(update(content_asks).where(*mine).values(ends_at=now)).rowcount


_GRANTS: Final = select(content_grants, accounts.c.name.label("account")).join(
    accounts, accounts.c.id == content_grants.c.account_id
)
_ASKS: Final = select(content_asks, accounts.c.name.label("account")).join(
    accounts, accounts.c.id == content_asks.c.account_id
)


def _grant(row: RowMapping) -> ContentGrant:
    return ContentGrant(**row)


def _ask(row: RowMapping) -> ContentAsk:
    return ContentAsk(**{name: value for name, value in row.items() if name != "ends_at"})
