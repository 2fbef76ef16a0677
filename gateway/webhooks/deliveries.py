"""The deliveries of requests' webhooks in SQL: list, find, send again, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

from sqlalchemy import Connection, Row, RowMapping, delete, func, or_, select, update

from gateway.tables.webhooks import webhook_attempts, webhook_deliveries
from gateway.webhooks.outbox import Outbox

Status: TypeAlias = Literal["pending", "delivered", "gone", "failed"]

OUTBOX: Final = Outbox(webhook_deliveries, webhook_attempts)

_TABLE: Final = webhook_deliveries


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    started_at: datetime
    duration_ms: int
    code: int | None
    error: str | None
    answer: str | None
    """The first characters of what the receiver answered; None if it sent no text."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery with the attempts whose result is known."""

    request_id: str
    account_id: int
    url: str
    status: Status
    queued_at: datetime
    due_at: datetime | None
    ended_at: datetime | None
    attempts: Sequence[Attempt] = field(default_factory=tuple)


def list_deliveries(
    connection: Connection,
    *,
    account_id: int | None,
    limit: int,
    status: Status | None = None,
    before: str | None = None,
) -> list[Delivery]:
    """List deliveries of one account, or of all for None, newest request first."""
    query = select(_TABLE).order_by(_TABLE.c.request_id.desc()).limit(limit)
    if account_id is not None:
        query = query.where(_TABLE.c.account_id == account_id)
    if status is not None:
        outcome = _TABLE.c.outcome
        query = query.where(outcome.is_(None) if status == "pending" else outcome == status)
    if before is not None:
        query = query.where(_TABLE.c.request_id < before)
    return _with_attempts(connection, connection.execute(query).mappings().all())


def count_failing(connection: Connection, since: datetime) -> int:
    """Count the deliveries that were given up since a moment, and those that wait after a failed
    attempt."""
    gave_up = (_TABLE.c.outcome == "failed") & (_TABLE.c.ended_at >= since)
    waits = _TABLE.c.outcome.is_(None) & (_TABLE.c.attempts > 0)
    query = select(func.count()).select_from(_TABLE).where(or_(gave_up, waits))
    return int(connection.execute(query).scalar_one())


def find_delivery(
    connection: Connection, request_id: str, *, account_id: int | None
) -> Delivery | None:
    """Find the delivery of a request of an account, or of any for None."""
    query = select(_TABLE).where(_TABLE.c.request_id == request_id)
    if account_id is not None:
        query = query.where(_TABLE.c.account_id == account_id)
    found = _with_attempts(connection, connection.execute(query).mappings().all())
    return found[0] if found else None


def send_again(
    connection: Connection, request_id: str, *, account_id: int | None, now: datetime
) -> Delivery | None:
    """Start a new series of attempts, whatever the result of the last one. None if not found."""
    mine = [_TABLE.c.request_id == request_id]
    if account_id is not None:
        mine.append(_TABLE.c.account_id == account_id)
    connection.execute(
        update(_TABLE)
        .where(*mine)
        .values(attempts=0, due_at=now, queued_at=now, outcome=None, ended_at=None)
    )
    return find_delivery(connection, request_id, account_id=account_id)


def delete_ended(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some deliveries that ended before a moment, with attempts; return their number."""
    ids = connection.scalars(
        select(_TABLE.c.request_id)
        .where(_TABLE.c.ended_at < before)
        .order_by(_TABLE.c.ended_at)
        .limit(limit)
    ).all()
    if ids:
        connection.execute(delete(_TABLE).where(_TABLE.c.request_id.in_(ids)))
    return len(ids)


def read_attempt(row: Row[Any]) -> Attempt:
    """Read a row of a table of attempts."""
    return Attempt(
        row.number, row.started_at, row.duration_ms, row.code, row.error, row.answer or None
    )


def _with_attempts(connection: Connection, rows: Sequence[RowMapping]) -> list[Delivery]:
    table = webhook_attempts
    attempts: dict[str, list[Attempt]] = {row["request_id"]: [] for row in rows}
    query = (
        select(table)
        .where(table.c.request_id.in_(attempts))
        .order_by(table.c.request_id, table.c.number)
    )
    for row in connection.execute(query) if rows else ():
        attempts[row.request_id].append(read_attempt(row))
    return [
        Delivery(
            row["request_id"],
            row["account_id"],
            row["url"],
            row["outcome"] or "pending",
            row["queued_at"],
            None if row["ended_at"] else row["due_at"],
            row["ended_at"],
            attempts[row["request_id"]],
        )
        for row in rows
    ]
