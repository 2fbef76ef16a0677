"""Names, labels and people of an account: the rows to change, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    Column,
    Connection,
    Select,
    Table,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from gateway.tables.audit import audit_events
from gateway.tables.batches import batches, file_reservations
from gateway.tables.core import accounts, budgets, idempotency, keys
from gateway.tables.feedback import feedback
from gateway.tables.notices import notice_subscriptions, notices
from gateway.tables.retention import erasures
from gateway.tables.users import (
    content_asks,
    content_grants,
    login_links,
    members,
    sessions,
    users,
)

ERASED: Final = "erased"
ERASURE: Final = "erasure.run"
"""Act of an erasure, whose own event is not redacted."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of an account that are not erased yet, by their first column, and how they are."""

    kind: str
    rows: Callable[[int], Select[Any]]
    change: Callable[[Connection, int, list[Any]], object]

    def count(self, connection: Connection, account_id: int) -> int:
        rows = self.rows(account_id).subquery()
        return int(connection.execute(select(func.count()).select_from(rows)).scalar_one())

    def erase(self, connection: Connection, account_id: int, *, limit: int) -> int:
        """Erase some rows; return their number."""
        found = list(connection.execute(self.rows(account_id).limit(limit)).scalars())
        if found:
            self.change(connection, account_id, found)
        return len(found)


def _delete_keys(connection: Connection, account_id: int, names: list[str]) -> None:
    here = idempotency.c.account_id == account_id
    connection.execute(delete(idempotency).where(here, idempotency.c.key.in_(names)))


def _empty_batches(connection: Connection, account_id: int, ids: list[str]) -> None:
    here = batches.c.id.in_(ids)
    connection.execute(update(batches).where(here).values(metadata=None, errors=None))


def _revoke_keys(connection: Connection, account_id: int, ids: list[int]) -> None:
    revoked = func.coalesce(keys.c.revoked_at, literal(datetime.now(UTC), keys.c.revoked_at.type))
    change = update(keys).where(keys.c.id.in_(ids))
    connection.execute(change.values(name="", revoked_at=revoked))


def _erase_users(connection: Connection, account_id: int, ids: list[int]) -> None:
    now = datetime.now(UTC)
    connection.execute(
        insert(erasures),
        [{"subject": f"user {id}", "account_id": account_id, "at": now} for id in ids],
    )
    for table in (members, sessions, login_links):
        connection.execute(delete(table).where(table.c.user_id.in_(ids)))
    connection.execute(
        update(users)
        .where(users.c.id.in_(ids))
        .values(name=ERASED, email=None, issuer=None, subject=None, status="disabled")
    )


def _redact(connection: Connection, account_id: int, ids: list[str]) -> None:
    change = update(audit_events).where(audit_events.c.id.in_(ids))
    connection.execute(change.values(before=None, after=None, reason=""))


def _told(account_id: int) -> Select[Any]:
    """Select events about the account or its erased users that have details."""
    table = audit_events.c
    people = select(erasures.c.subject).where(erasures.c.account_id == account_id)
    return select(table.id).where(
        or_(table.account_id == account_id, table.subject.in_(people)),
        or_(table.before.is_not(None), table.after.is_not(None), table.reason != ""),
        table.act != ERASURE,
    )


def _only_members(account_id: int) -> Select[Any]:
    """Select the members of the account who have no role elsewhere."""
    other = members.alias()
    elsewhere = select(other.c.user_id).where(
        other.c.user_id == users.c.id, other.c.account_id != account_id
    )
    return (
        select(users.c.id)
        .join(members, members.c.user_id == users.c.id)
        .where(members.c.account_id == account_id, users.c.role.is_(None), ~elsewhere.exists())
    )


def _with_label(account_id: int) -> Select[Any]:
    return select(keys.c.id).where(
        keys.c.account_id == account_id, or_(keys.c.name != "", keys.c.revoked_at.is_(None))
    )


def _deleted(table: Table, id: Column[Any]) -> Part:
    """Return the rows of a table that belong to an account, which are deleted by their id."""
    return Part(
        table.name,
        lambda account_id: select(id).where(table.c.account_id == account_id),
        lambda connection, _, ids: connection.execute(delete(table).where(id.in_(ids))),
    )


PARTS: Final = (
    Part(
        "idempotency_keys",
        lambda id: select(idempotency.c.key).where(idempotency.c.account_id == id),
        _delete_keys,
    ),
    # Of archived requests; that of others is deleted with them.
    _deleted(feedback, feedback.c.request_id),
    _deleted(file_reservations, file_reservations.c.file_id),
    Part(
        "batches",
        lambda id: select(batches.c.id).where(
            batches.c.account_id == id,
            or_(batches.c["metadata"].is_not(None), batches.c.errors.is_not(None)),
        ),
        _empty_batches,
    ),
    Part(
        "sessions",
        lambda id: (
            select(sessions.c.id)
            .join(keys, keys.c.id == sessions.c.key_id)
            .where(keys.c.account_id == id)
        ),
        lambda connection, _, ids: connection.execute(
            delete(sessions).where(sessions.c.id.in_(ids))
        ),
    ),
    Part("keys", _with_label, _revoke_keys),
    Part(
        "budgets",
        lambda id: select(budgets.c.id).where(budgets.c.account_id == id, budgets.c.name != ""),
        lambda connection, _, ids: connection.execute(
            update(budgets).where(budgets.c.id.in_(ids)).values(name="")
        ),
    ),
    _deleted(content_grants, content_grants.c.id),
    _deleted(content_asks, content_asks.c.id),
    _deleted(notice_subscriptions, notice_subscriptions.c.id),
    # With their deliveries and attempts.
    _deleted(notices, notices.c.id),
    Part("users", _only_members, _erase_users),
    # Those who have a role elsewhere remain users.
    Part(
        "members",
        lambda id: select(members.c.user_id).where(members.c.account_id == id),
        lambda connection, id, ids: connection.execute(
            delete(members).where(members.c.account_id == id, members.c.user_id.in_(ids))
        ),
    ),
    Part("audit_events", _told, _redact),
    # Last, because it is how the account is found.
    Part(
        "account_name",
        lambda id: select(accounts.c.id).where(
            accounts.c.id == id, accounts.c.name != literal(f"{ERASED}-{id}")
        ),
        lambda connection, id, _: connection.execute(
            update(accounts).where(accounts.c.id == id).values(name=f"{ERASED}-{id}")
        ),
    ),
)
"""What SQL has of an account beside its requests, files and voices, in the order of erasing."""
