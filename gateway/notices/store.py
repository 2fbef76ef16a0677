"""Notices in SQL: written once with their deliveries, listed, deleted after their retention.

A notice that no subscription wants is not written. One that is written has a delivery for each
subscription that wants it, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, delete, insert, select

from gateway.ids import new_id
from gateway.notices.kinds import TITLE_MAX, Notice
from gateway.notices.subscriptions import Subscription, subscriptions_of
from gateway.sql.database import upsert
from gateway.tables.notices import notice_attempts, notice_deliveries, notices
from gateway.webhooks.deliveries import Attempt, read_attempt
from gateway.webhooks.outbox import Outbox

ID_PREFIX: Final = "notice_"
CHUNK: Final = 200
"""Notices per statement."""

# As its partial index says it, or PostgreSQL would not use that.
ENDING: Final = ~notices.c.lasting
OUTBOX: Final = Outbox(notice_deliveries, notice_attempts)


@dataclass(frozen=True, slots=True)
class StoredNotice:
    """A notice as it was told."""

    id: str
    account_id: int
    kind: str
    subject: str
    title: str
    text: str
    data: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class NoticeDelivery:
    """A notice on its way to one subscription, with the attempts whose result is known."""

    id: str
    notice_id: str
    subscription_id: int
    url: str
    status: str
    due_at: datetime | None
    ended_at: datetime | None
    attempts: Sequence[Attempt]


def publish(connection: Connection, told: Sequence[Notice], *, now: datetime | None = None) -> int:
    """Write the notices that are new and wanted, with their deliveries. Return their number."""
    wanted = _wanted(connection, told)
    return sum(
        _write(connection, wanted[start : start + CHUNK], now or datetime.now(UTC))
        for start in range(0, len(wanted), CHUNK)
    )


def publish_to(connection: Connection, to: Subscription, told: Notice) -> str:
    """Write a notice for one subscription, whatever kinds it wants; return the notice's id."""
    _write(connection, [(told, [to])], datetime.now(UTC))
    found = select(notices.c.id).where(notices.c.key == told.key)
    return str(connection.execute(found).scalar_one())


def known_keys(connection: Connection, keys: Sequence[str]) -> set[str]:
    """Return those keys whose notices were written before."""
    found: set[str] = set()
    for start in range(0, len(keys), CHUNK):
        some = keys[start : start + CHUNK]
        found.update(connection.scalars(select(notices.c.key).where(notices.c.key.in_(some))))
    return found


def find_notice(connection: Connection, delivery_id: str) -> StoredNotice | None:
    """Find the notice of a delivery, or None if it was deleted."""
    row = connection.execute(
        select(notices)
        .join(notice_deliveries, notice_deliveries.c.notice_id == notices.c.id)
        .where(notice_deliveries.c.id == delivery_id)
    )
    found = row.mappings().first()
    return None if found is None else _notice(found)


def list_notices(
    connection: Connection,
    *,
    account_id: int | None,
    kind: str | None,
    limit: int,
    before: str | None,
) -> list[StoredNotice]:
    """List notices, newest first: of an account or the operator, or of all for None."""
    query = select(notices).order_by(notices.c.id.desc()).limit(limit)
    if account_id is not None:
        query = query.where(notices.c.account_id == account_id)
    if kind is not None:
        query = query.where(notices.c.kind == kind)
    if before is not None:
        query = query.where(notices.c.id < before)
    return [_notice(row) for row in connection.execute(query).mappings()]


def deliveries_of(
    connection: Connection, notice_ids: Collection[str]
) -> dict[str, list[NoticeDelivery]]:
    """Return the deliveries of some notices, with their attempts, by notice."""
    ids = list(notice_ids)
    table, of = notice_deliveries, notice_attempts
    attempts: dict[str, list[Attempt]] = {}
    tried = (
        select(of)
        .join(table, table.c.id == of.c.delivery_id)
        .where(table.c.notice_id.in_(ids))
        .order_by(of.c.delivery_id, of.c.number)
    )
    for row in connection.execute(tried) if ids else ():
        attempts.setdefault(row.delivery_id, []).append(read_attempt(row))
    found: dict[str, list[NoticeDelivery]] = {one: [] for one in ids}
    sent = select(table).where(table.c.notice_id.in_(ids)).order_by(table.c.id)
    for row in connection.execute(sent) if ids else ():
        found[row.notice_id].append(
            NoticeDelivery(
                row.id,
                row.notice_id,
                row.subscription_id,
                row.url,
                row.outcome or "pending",
                None if row.ended_at else row.due_at,
                row.ended_at,
                attempts.get(row.id, ()),
            )
        )
    return found


def delete_expired(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete some notices that were written before a moment, with their deliveries; return their
    number. Those are kept whose key is still needed."""
    ids = connection.scalars(
        select(notices.c.id)
        .where(notices.c.created_at < before, ENDING)
        .order_by(notices.c.created_at)
        .limit(limit)
    ).all()
    if ids:
        connection.execute(delete(notices).where(notices.c.id.in_(ids)))
    return len(ids)


def _wanted(
    connection: Connection, told: Sequence[Notice]
) -> list[tuple[Notice, list[Subscription]]]:
    """Return the notices that a subscription wants, with these subscriptions."""
    known = subscriptions_of(connection, {each.account_id for each in told})
    pairs = (
        (each, [one for one in known.get(each.account_id, ()) if one.wants(each.kind)])
        for each in told
    )
    return [(each, to) for each, to in pairs if to]


def _write(
    connection: Connection, told: Sequence[tuple[Notice, Sequence[Subscription]]], now: datetime
) -> int:
    # One row for each key, or the statement would meet its own row as a conflict.
    rows = {
        each.key: {
            "id": new_id(ID_PREFIX),
            "key": each.key,
            "account_id": each.account_id,
            "kind": each.kind,
            "subject": each.subject,
            "title": each.title[:TITLE_MAX],
            "text": each.text,
            "data": dict(each.data),
            "lasting": each.lasting,
            "created_at": now,
        }
        for each, _ in told
    }
    written = connection.execute(
        upsert(connection, notices)
        .values(list(rows.values()))
        .on_conflict_do_nothing(index_elements=[notices.c.key])
        .returning(notices.c.key, notices.c.id)
    )
    ids = {row.key: row.id for row in written}
    sent = [row for each, to in told if each.key in ids for row in _sent(each, ids[each.key], to)]
    if sent:
        for row in sent:
            row |= {"due_at": now, "queued_at": now}
        connection.execute(insert(notice_deliveries), sent)
    return len(ids)


def _sent(told: Notice, notice_id: str, to: Sequence[Subscription]) -> Iterator[dict[str, Any]]:
    for one in to:
        yield {
            "id": new_id("sent_"),
            "notice_id": notice_id,
            "subscription_id": one.id,
            "account_id": told.account_id,
            "kind": told.kind,
            "url": one.url,
        }


def _notice(row: RowMapping) -> StoredNotice:
    return StoredNotice(
        row["id"],
        row["account_id"],
        row["kind"],
        row["subject"],
        row["title"],
        row["text"],
        row["data"],
        row["created_at"],
    )
