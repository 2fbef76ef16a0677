"""Sessions in the console: who has entered, until when, and what that person or key may do now.

A cookie's secret is stored as its keyed hash. Roles are read with each request, never stored, so
that a disabled user, a removed member and a revoked key have no session from that moment on. An
ended session stays a row until it would have expired, so that its stolen cookie is recognised.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)

from gateway.accounts.keys import KeyInfo, hash_secret, key_by_id, status_of
from gateway.accounts.roles import MEMBER_ROLES, MemberRole, Role
from gateway.sql.database import UtcDateTime
from gateway.tables.core import accounts, keys
from gateway.tables.users import members, sessions, users

Method: TypeAlias = Literal["link", "key", "oidc"]
Theme: TypeAlias = Literal["system", "light", "dark"]
THEMES: Final[tuple[Theme, ...]] = get_args(Theme)
SEEN: Final = timedelta(minutes=1)
"""Precision of ``seen_at``: it is not written more often."""
MEMBER_IDLE: Final = timedelta(hours=12)
MEMBER_LENGTH: Final = timedelta(days=14)
AGENT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Time without a request after which a session ends, and its maximum length: of visitors with a
    role in the installation. Members of accounts have ``MEMBER_IDLE`` and ``MEMBER_LENGTH``."""

    idle: timedelta
    length: timedelta

    def of(self, role: Role | None) -> tuple[timedelta, timedelta]:
        return (MEMBER_IDLE, MEMBER_LENGTH) if role is None else (self.idle, self.length)


@dataclass(frozen=True, slots=True)
class Membership:
    """A role in an account that is not suspended or closed."""

    account_id: int
    account: str
    zone: str
    role: MemberRole


@dataclass(frozen=True, slots=True)
class Identity:
    """A person or a key with the present roles; ``name`` is that of the user or the key.

    Without a role in the installation and without memberships, nobody may enter.
    """

    user_id: int | None
    key_id: int | None
    name: str
    actor: str
    """Name as the author of acts, without anything personal: ``user 12``, or the key's prefix."""
    role: Role | None
    memberships: Mapping[int, Membership]

    @property
    def subject(self) -> str:
        """Subject of events in the audit log, by which an erasure finds them."""
        return f"key {self.key_id}" if self.user_id is None else f"user {self.user_id}"

    @property
    def account_id(self) -> int | None:
        """The account whose owners read this visitor's acts: the only one, without a role."""
        only = len(self.memberships) == 1 and self.role is None
        return next(iter(self.memberships)) if only else None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a session is used."""

    network: str
    agent: str


@dataclass(frozen=True, slots=True)
class PendingForm:
    """A form that was sent, and waits until the visitor has proved again who it is."""

    path: str
    fields: Sequence[tuple[str, str]]


class Choices(TypedDict, total=False):
    """What a visitor looks at, and how; None: all accounts, the account's own zone."""

    account_id: int | None
    zone: str | None
    theme: Theme


@dataclass(frozen=True, slots=True)
class Session:
    """An open session. ``account_id`` is the chosen account, if the visitor may still see it."""

    id: int
    identity: Identity
    method: Method
    csrf: bytes
    created_at: datetime
    seen_at: datetime
    proved_at: datetime
    ends_at: datetime
    lasting: bool
    origin: Origin
    account_id: int | None
    account: str | None
    zone: str
    theme: Theme
    hidden: Mapping[str, Sequence[str]]
    """Columns that lists leave out, by list; a list that is not in it leaves out its usual ones."""
    pending: PendingForm | None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session in a list; ``name`` is that of the user, or the key's prefix."""

    id: int
    user_id: int | None
    key_id: int | None
    name: str
    method: Method
    created_at: datetime
    seen_at: datetime
    ends_at: datetime
    network: str
    agent: str


class SessionRevoked(Exception):
    """A cookie of a revoked session was used."""

    def __init__(self, session_id: int, identity: Identity) -> None:
        super().__init__(session_id)
        self.session_id = session_id
        self.identity = identity


class NoRole(Exception):
    """A user or key without any right in the console."""


# Read for every page, and so built once.
_SESSION: Final = select(sessions).where(sessions.c.token_hash == bindparam("token_hash"))
_USER: Final = select(users).where(users.c.id == bindparam("user"))
_MEMBERSHIPS: Final = (
    select(members.c.account_id, members.c.role, accounts.c.name, accounts.c.report_tz)
    .join(accounts, accounts.c.id == members.c.account_id)
    .where(members.c.user_id == bindparam("user"), accounts.c.status == "active")
    .order_by(accounts.c.name)
)


def user_identity(connection: Connection, user_id: int) -> Identity:
    """Return a user with the present roles. Raise ``NoRole`` if it is disabled or has none."""
    user = connection.execute(_USER, {"user": user_id}).mappings().one()
    memberships = {
        row.account_id: Membership(row.account_id, row.name, row.report_tz, row.role)
        for row in connection.execute(_MEMBERSHIPS, {"user": user_id})
    }
    if user["status"] != "active" or not (user["role"] or memberships):
        raise NoRole(f"user {user_id}")
    name = user["name"]
    return Identity(user_id, None, name, f"user {user_id}", user["role"], memberships)


def key_identity(connection: Connection, key: KeyInfo, now: datetime) -> Identity:
    """Return a key with the present roles. Raise ``NoRole`` if it is not active, its account is
    suspended or closed, or it cannot read."""
    account = connection.execute(select(accounts).where(accounts.c.id == key.account_id)).one()
    role, member_role = key_roles(key)
    if status_of(key, now) != "active" or account.status != "active" or not (role or member_role):
        raise NoRole(f"key {key.id}")
    memberships = {}
    if member_role is not None:
        memberships[account.id] = Membership(
            account.id, account.name, account.report_tz, member_role
        )
    name = key.name or f"{key.prefix}…"
    return Identity(None, key.id, name, key.prefix, role, memberships)


def key_roles(key: KeyInfo) -> tuple[Role | None, MemberRole | None]:
    """Return the roles with which a key enters: never more than it may do over HTTP, and never
    that of an owner."""
    role = (key.role or "operator") if "admin" in key.scopes else None
    if "read" not in key.scopes:
        return role, None
    by_scopes: MemberRole = "member" if "inference" in key.scopes else "viewer"
    return role, max(by_scopes, key.member_role or by_scopes, key=MEMBER_ROLES.index)


def open_session(
    connection: Connection,
    identity: Identity,
    method: Method,
    *,
    origin: Origin,
    lasting: bool,
    limits: SessionLimits,
    pepper: bytes,
    now: datetime,
) -> tuple[str, Session]:
    """Open a session; return the cookie's secret, which is not stored, and the session."""
    token = secrets.token_urlsafe(32)
    values: dict[str, Any] = {
        "token_hash": hash_secret(token, pepper),
        "user_id": identity.user_id,
        "key_id": identity.key_id,
        "method": method,
        "csrf": secrets.token_bytes(32),
        "created_at": now,
        "seen_at": now,
        "proved_at": now,
        "ends_at": now + limits.of(identity.role)[1],
        "lasting": lasting,
        "network": origin.network,
        "agent": origin.agent[:AGENT_MAX],
        **_choices(connection, identity),
    }
    made = connection.execute(insert(sessions).values(**values).returning(sessions))
    if identity.user_id is not None:
        user = update(users).where(users.c.id == identity.user_id)
        connection.execute(user.values(last_login_at=now))
    return token, _session(connection, made.mappings().one(), identity)


def find_session(
    connection: Connection, token: str, *, limits: SessionLimits, pepper: bytes, now: datetime
) -> Session | None:
    """Return the session of a cookie; None if it is unknown or has expired, or its visitor has no
    role left. Raise ``SessionRevoked``."""
    own = {"token_hash": hash_secret(token, pepper)}
    row = connection.execute(_SESSION, own).mappings().first()
    if row is None or row["ends_at"] <= now:
        return None
    try:
        identity = _identity(connection, row, now)
    except NoRole:
        return None
    if row["revoked_at"] is not None:
        raise SessionRevoked(row["id"], identity)
    if row["seen_at"] + limits.of(identity.role)[0] <= now:
        return None
    return _session(connection, row, identity)


def list_sessions(
    connection: Connection,
    whose: ColumnElement[bool],
    *,
    limits: SessionLimits,
    now: datetime,
    limit: int,
    before: int | None = None,
) -> list[OpenSession]:
    """List open sessions that a condition on the table names, newest first.

    ``before`` is the number of the last one on the page before.
    """
    role = func.coalesce(users.c.role, keys.c.role)
    patience = case(
        (role.is_(None), literal(now - MEMBER_IDLE, UtcDateTime)),
        else_=literal(now - limits.idle, UtcDateTime),
    )
    query = (
        select(
            *(sessions.c[name] for name in OpenSession.__dataclass_fields__ if name != "name"),
            func.coalesce(users.c.name, keys.c.prefix).label("name"),
        )
        .outerjoin(users, users.c.id == sessions.c.user_id)
        .outerjoin(keys, keys.c.id == sessions.c.key_id)
        .where(whose, sessions.c.ends_at > now, sessions.c.revoked_at.is_(None))
        .where(sessions.c.seen_at > patience)
        .order_by(sessions.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(sessions.c.id < before)
    return [OpenSession(**row) for row in connection.execute(query).mappings()]


def of_user(user_id: int) -> ColumnElement[bool]:
    return sessions.c.user_id == user_id


def of_visitor(identity: Identity) -> ColumnElement[bool]:
    """Return the condition of all sessions of a user or key."""
    if identity.user_id is not None:
        return of_user(identity.user_id)
    return sessions.c.key_id == identity.key_id


def prove_again(connection: Connection, session_id: int, *, pepper: bytes, now: datetime) -> str:
    """Note that a visitor has proved again who it is; return the secret of the new cookie."""
    token = secrets.token_urlsafe(32)
    connection.execute(
        update(sessions)
        .where(sessions.c.id == session_id)
        .values(
            token_hash=hash_secret(token, pepper),
            csrf=secrets.token_bytes(32),
            proved_at=now,
            seen_at=now,
        )
    )
    return token


def note_seen(connection: Connection, session_id: int, now: datetime) -> None:
    here = sessions.c.id == session_id, sessions.c.seen_at < now
    connection.execute(update(sessions).where(*here).values(seen_at=now))


def note_refused(connection: Connection, session_id: int, now: datetime) -> bool:
    """Note that the cookie of a revoked session was used. False if that is known already."""
    here = sessions.c.id == session_id, sessions.c.refused_at.is_(None)
    return bool(connection.execute(update(sessions).where(*here).values(refused_at=now)).rowcount)


def end_sessions(connection: Connection, whose: ColumnElement[bool], now: datetime) -> int:
    """Revoke open sessions; return their number."""
    opened = whose, sessions.c.revoked_at.is_(None), sessions.c.ends_at > now
    revoked = update(sessions).where(*opened).values(revoked_at=now, pending=None)
    return connection.execute(revoked).rowcount


def delete_ended_sessions(connection: Connection, before: datetime, *, limit: int) -> int:
    """Delete sessions that ended before a moment, the oldest first. Return their number."""
    oldest = select(sessions.c.id).where(sessions.c.ends_at < before).order_by(sessions.c.ends_at)
    gone = delete(sessions).where(sessions.c.id.in_(oldest.limit(limit)))
    return connection.execute(gone).rowcount


def choose(connection: Connection, session_id: int, choices: Choices) -> None:
    if choices:
        connection.execute(update(sessions).where(sessions.c.id == session_id).values(**choices))


def hide_columns(
    connection: Connection, session_id: int, of_list: str, names: Sequence[str]
) -> None:
    """Choose the columns that one list leaves out; those of other lists stay as they are."""
    own = sessions.c.id == session_id
    kept = connection.scalars(select(sessions.c.columns).where(own).with_for_update()).one()
    chosen = {**(kept or {}), of_list: list(names)}
    connection.execute(update(sessions).where(own).values({"columns": chosen}))


def keep_form(connection: Connection, session_id: int, form: PendingForm | None) -> None:
    """Keep a form until the visitor has proved again who it is; None forgets it."""
    kept = None if form is None else {"path": form.path, "fields": [list(f) for f in form.fields]}
    connection.execute(update(sessions).where(sessions.c.id == session_id).values(pending=kept))


def _pending(kept: Mapping[str, Any] | None) -> PendingForm | None:
    if kept is None:
        return None
    return PendingForm(kept["path"], [(name, value) for name, value in kept["fields"]])


def _identity(connection: Connection, row: RowMapping, now: datetime) -> Identity:
    if row["user_id"] is not None:
        return user_identity(connection, row["user_id"])
    return key_identity(connection, key_by_id(connection, row["key_id"]), now)


def _choices(connection: Connection, identity: Identity) -> Mapping[str, Any]:
    """Return what the visitor has chosen in the newest session before.

    A person's first session begins with the account that it is a member of, if the installation
    has no other.
    """
    choices = select(sessions.c.account_id, sessions.c.zone, sessions.c.theme, sessions.c.columns)
    query = choices.where(of_visitor(identity))
    found = connection.execute(query.order_by(sessions.c.id.desc()).limit(1)).mappings().first()
    if found is not None:
        return dict(found)
    own = list(identity.memberships) if identity.user_id is not None else []
    customers = select(accounts.c.id).where(accounts.c.kind == "customer").limit(2)
    return {"account_id": own[0]} if own and connection.scalars(customers).all() == own else {}


def _session(connection: Connection, row: RowMapping, identity: Identity) -> Session:
    account_id, account, zone = _chosen(connection, row["account_id"], identity)
    return Session(
        id=row["id"],
        identity=identity,
        method=row["method"],
        csrf=row["csrf"],
        created_at=row["created_at"],
        seen_at=row["seen_at"],
        proved_at=row["proved_at"],
        ends_at=row["ends_at"],
        lasting=row["lasting"],
        origin=Origin(row["network"], row["agent"]),
        account_id=account_id,
        account=account,
        zone=row["zone"] or zone,
        theme=row["theme"],
        hidden=row["columns"] or {},
        pending=_pending(row["pending"]),
    )


def _chosen(
    connection: Connection, account_id: int | None, identity: Identity
) -> tuple[int | None, str | None, str]:
    """Return number, name and time zone of the account that a visitor looks at: the chosen one or,
    without a role in the installation, the first; None if it is all of them."""
    memberships = identity.memberships
    if account_id not in memberships and identity.role is None:
        account_id = next(iter(memberships))
    if account_id is None:
        return None, None, "UTC"
    if account_id in memberships:
        own = memberships[account_id]
        return account_id, own.account, own.zone
    row = connection.execute(select(accounts).where(accounts.c.id == account_id)).one()
    return account_id, row.name, row.report_tz
