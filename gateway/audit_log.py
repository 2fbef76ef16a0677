"""The audit log: administrative acts with their authors, in SQL.

Each act is recorded in the transaction that does it, so that neither exists without the other. The
log is append-only; ``delete_expired`` is the only way to delete events, and is itself recorded.
Secrets never get into it: ``before`` and ``after`` are built from the views that operators see.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, get_args

from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, select, union_all

from gateway.checks.entered import NAME_MAX, REASON_MAX, check_text
from gateway.ids import new_id
from gateway.sql.database import upsert
from gateway.tables.audit import audit_events, audit_horizon

Origin: TypeAlias = Literal["http", "cli", "system"]
Act: TypeAlias = Literal[
    "account.create",
    "account.change",
    "key.create",
    "key.change",
    "key.rotate",
    "key.revoke",
    "credit.add",
    "credit.charge_back",
    "credit.refund",
    "credit.correct",
    "budget.create",
    "budget.change",
    "budget.end",
    "limit.set",
    "limit.remove",
    "storage.set",
    "price.set",
    "price.end",
    "price.cancel",
    "catalog.load",
    "catalog.save",
    "catalog.refuse",
    "ledger.reconcile",
    "ledger.rebuild",
    "period.close",
    "period.archive",
    "period.restore",
    "invoice.credit",
    "payment.create",
    "rebate.set",
    "user.create",
    "user.change",
    "member.set",
    "member.remove",
    "link.create",
    "session.begin",
    "session.prove",
    "session.end",
    "session.refuse",
    "organisation.create",
    "organisation.change",
    "organisation.add",
    "organisation.remove",
    "webhook.resend",
    "webhook.reveal",
    "notice.subscribe",
    "notice.confirm",
    "notice.unsubscribe",
    "notice.test",
    "access.refuse",
    "access.grant",
    "access.end",
    "access.ask",
    "access.decline",
    "set_aside.retry",
    "set_aside.release",
    "worker.drain",
    "worker.resume",
    "worker.load",
    "worker.unload",
    "queue.cancel",
    "queue.requeue",
    "audit.expire",
    "retention.run",
    "erasure.run",
    "database.migrate",
]
ACTS: Final[tuple[Act, ...]] = get_args(Act)

ID_PREFIX: Final = "audit_"
CALL_PREFIX: Final = "call_"


@dataclass(frozen=True, slots=True)
class Author:
    """The author of administrative acts, in one call or one command.

    Raise ``ValueError`` if a text is too long or not printable.
    """

    name: str
    """Prefix of a key, name of an operator, or part of the gateway."""
    origin: Origin
    call_id: str = field(default_factory=lambda: new_id(CALL_PREFIX))
    key_id: int | None = None
    """The key that authenticated the call."""
    reason: str = ""
    """Reason of acts that have none of their own."""

    def __post_init__(self) -> None:
        check_text(self.name, "the actor", longest=NAME_MAX)
        check_text(self.reason, "the reason", longest=REASON_MAX)


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """A recorded act. ``before`` and ``after`` have the fields that it changed."""

    id: str
    at: datetime
    origin: Origin
    actor: str
    key_id: int | None
    act: str
    account_id: int | None
    subject: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    reason: str
    call_id: str


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Events to list; None is not filtered."""

    account_id: int | None = None
    actor: str | None = None
    act: str | None = None
    subject: str | None = None
    origin: Origin | None = None
    call_id: str | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    acts: Collection[Act] | None = None

    def conditions(self, moment: ColumnElement[datetime]) -> list[ColumnElement[bool]]:
        """Return the conditions; ``moment`` is the time of an event."""
        named = {
            "account_id": self.account_id,
            "actor": self.actor,
            "act": self.act,
            "subject": self.subject,
            "origin": self.origin,
            "call_id": self.call_id,
        }
        found = [
            audit_events.c[name] == value for name, value in named.items() if value is not None
        ]
        if self.starts_at is not None:
            found.append(moment >= self.starts_at)
        if self.ends_at is not None:
            found.append(moment < self.ends_at)
        if self.acts is not None:
            found.append(audit_events.c.act.in_(self.acts))
        return found


def record(
    connection: Connection,
    author: Author,
    act: Act,
    subject: str,
    *,
    account_id: int | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    reason: str | None = None,
    now: datetime | None = None,
) -> None:
    """Record an act, in the transaction that does it.

    If there is a state before and after, only the fields that differ are stored.
    """
    if before is not None and after is not None:
        before, after = _differences(before, after)
    connection.execute(
        insert(audit_events).values(
            id=new_id(ID_PREFIX),
            at=now or datetime.now(UTC),
            origin=author.origin,
            actor=author.name,
            key_id=author.key_id,
            act=act,
            account_id=account_id,
            subject=subject,
            before=before,
            after=after,
            reason=author.reason if reason is None else reason,
            call_id=author.call_id,
        )
    )


def list_events(
    connection: Connection,
    wanted: AuditFilter,
    *,
    limit: int,
    cursor: str | None = None,
    oldest_first: bool = False,
) -> list[AuditEvent]:
    """List events, newest first unless ``oldest_first``; ``cursor`` is the id of the last one."""
    # After the first page, rows are read by id from the cursor on. SQLite would find those of the
    # whole span by their time again, and sort them for each page.
    moment: ColumnElement[datetime] = audit_events.c.at
    if cursor is not None and connection.dialect.name == "sqlite":
        moment = func.coalesce(moment, moment)
    query = select(audit_events).where(*wanted.conditions(moment)).limit(limit)
    if cursor is not None:
        beyond = audit_events.c.id > cursor if oldest_first else audit_events.c.id < cursor
        query = query.where(beyond)
    order = audit_events.c.id.asc() if oldest_first else audit_events.c.id.desc()
    return [AuditEvent(**row) for row in connection.execute(query.order_by(order)).mappings()]


def newest_event(connection: Connection, acts: Collection[Act]) -> AuditEvent | None:
    """Return the newest event of some acts, by one look at the index for each."""
    row = connection.execute(_newest_of(tuple(acts))).mappings().one_or_none()
    return None if row is None else AuditEvent(**row)


@functools.cache
def _newest_of(acts: Sequence[Act]) -> Select[Any]:
    ids = audit_events.c.id
    newest = union_all(
        *(select(func.max(ids).label("id")).where(audit_events.c.act == act) for act in acts)
    ).subquery()
    return select(audit_events).where(ids == select(func.max(newest.c.id)).scalar_subquery())


def delete_expired(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete events of a moment before ``before``, the oldest first. Return their number."""
    expired = select(audit_events.c.id).where(audit_events.c.at < before)
    if connection.execute(expired.order_by(audit_events.c.at).limit(1)).first() is None:
        return 0
    horizon = connection.execute(select(audit_horizon.c.deleted_before)).scalar()
    if horizon is None or horizon < before:
        moved = upsert(connection, audit_horizon).values(id=1, deleted_before=before)
        connection.execute(
            moved.on_conflict_do_update(
                index_elements=[audit_horizon.c.id], set_={"deleted_before": before}
            )
        )
        record(
            connection,
            Author("retention", "system"),
            "audit.expire",
            "audit log",
            before=None if horizon is None else {"deleted_before": horizon.isoformat()},
            after={"deleted_before": before.isoformat()},
        )
    oldest = expired.order_by(audit_events.c.at).limit(limit)
    return connection.execute(delete(audit_events).where(audit_events.c.id.in_(oldest))).rowcount


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return (
        {name: before[name] for name in names if name in before},
        {name: after[name] for name in names if name in after},
    )
