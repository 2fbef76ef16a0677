"""Entering and leaving the console: one-time links, sessions, and what the audit log has of them.

A refusal is returned, not raised, because its event and the count of wrong codes must be committed.
Acts of a user are recorded as those of ``user 12``, so that the log's actors are not personal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Self

from sqlalchemy import ColumnElement, Connection, select, true

from gateway.accounts.keys import KeyInfo, find_secret, key_by_id
from gateway.accounts.login_links import LinkUsed, use_code, use_link
from gateway.accounts.sessions import (
    AGENT_MAX,
    Identity,
    Method,
    NoRole,
    OpenSession,
    Origin,
    Session,
    SessionLimits,
    SessionRevoked,
    end_sessions,
    find_session,
    key_identity,
    list_sessions,
    note_refused,
    of_user,
    of_visitor,
    open_session,
    prove_again,
    user_identity,
)
from gateway.audit_log import Act, Author, record
from gateway.errors import NotFound
from gateway.operations.pages import cut_page, read_cursor
from gateway.settings import Settings
from gateway.tables.users import sessions

OWN_SESSIONS_MAX: Final = 100
SECRET_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Entered:
    """A session with the secret of its cookie."""

    token: str
    session: Session


@dataclass(frozen=True, slots=True)
class Credential:
    """What a visitor sends to prove who it is: the secret of a link, its code, or a key."""

    kind: Literal["link", "code", "key"]
    secret: str

    @classmethod
    def entered(cls, kind: Literal["link", "code", "key"], text: str) -> Self:
        """Return the proof that a person entered in a form."""
        return cls(kind, text.strip()[:SECRET_MAX])

    @property
    def method(self) -> Method:
        return "key" if self.kind == "key" else "link"


@dataclass(frozen=True, slots=True)
class Known:
    """A user or key that is known by its number only."""

    subject: str
    account_id: int | None = None


@dataclass(frozen=True, slots=True)
class Entrance:
    """How sessions are opened in this installation, and from where a visitor comes."""

    origin: Origin
    lasting: bool
    limits: SessionLimits
    pepper: bytes


def session_limits(settings: Settings) -> SessionLimits:
    return SessionLimits(
        idle=timedelta(minutes=settings.console_idle_minutes),
        length=timedelta(hours=settings.console_session_hours),
    )


def enter(connection: Connection, proof: Credential, *, entrance: Entrance) -> Entered | None:
    """Open a session for the user or key of a proof; None if it is refused."""
    now = datetime.now(UTC)
    identity = _identify(connection, proof, entrance, now)
    return None if identity is None else begin(connection, identity, proof.method, entrance, now)


def begin(
    connection: Connection, identity: Identity, method: Method, entrance: Entrance, now: datetime
) -> Entered:
    """Open a session for a user or key that is known."""
    token, session = open_session(
        connection,
        identity,
        method,
        origin=entrance.origin,
        lasting=entrance.lasting,
        limits=entrance.limits,
        pepper=entrance.pepper,
        now=now,
    )
    _record(connection, "session.begin", session, entrance.origin)
    return Entered(token, session)


def prove(
    connection: Connection, session: Session, proof: Credential, *, entrance: Entrance
) -> str | None:
    """Accept a proof that the visitor is still the one who entered; return the secret of the new
    cookie, or None if it is refused."""
    now = datetime.now(UTC)
    identity = _identify(connection, proof, entrance, now)
    if identity is None:
        return None
    if identity.subject != session.identity.subject:
        refuse(connection, session, f"{identity.subject} is another one", origin=entrance.origin)
        return None
    token = prove_again(connection, session.id, pepper=entrance.pepper, now=now)
    record_proof(connection, session, entrance.origin)
    return token


def resume(
    connection: Connection, token: str, *, limits: SessionLimits, pepper: bytes
) -> Session | None:
    """Return the session of a cookie; None if there is none. Raise ``SessionRevoked``."""
    now = datetime.now(UTC)
    return find_session(connection, token, limits=limits, pepper=pepper, now=now)


def refuse_revoked(connection: Connection, error: SessionRevoked, *, origin: Origin) -> None:
    """Record the first use of a session that was ended."""
    if note_refused(connection, error.session_id, datetime.now(UTC)):
        record_refusal(connection, error.identity, "the session was ended", origin)


def refuse(
    connection: Connection,
    session: Session,
    why: str,
    *,
    origin: Origin,
    call_id: str | None = None,
) -> None:
    """Record that a call within a session was refused, because it was forged or not allowed."""
    record_refusal(connection, session.identity, why, origin, call_id=call_id)


def leave(connection: Connection, session: Session) -> None:
    """End the own session."""
    end_sessions(connection, sessions.c.id == session.id, datetime.now(UTC))
    identity = session.identity
    _record_end(connection, author_of(identity), identity, {"session": session.id})


def own_sessions(
    connection: Connection, session: Session, *, limits: SessionLimits
) -> list[OpenSession]:
    """List the open sessions of a visitor, newest first."""
    return list_of(connection, of_visitor(session.identity), limits=limits)


def list_of(
    connection: Connection, whose: ColumnElement[bool], *, limits: SessionLimits
) -> list[OpenSession]:
    """List the open sessions of one visitor, newest first."""
    now = datetime.now(UTC)
    return list_sessions(connection, whose, limits=limits, now=now, limit=OWN_SESSIONS_MAX)


def all_sessions(
    connection: Connection, *, limits: SessionLimits, limit: int, cursor: str | None
) -> tuple[list[OpenSession], str | None]:
    """List the open sessions of everybody, newest first, and return the cursor of the next page."""
    before = None if cursor is None else read_cursor(cursor, "a session")
    found = list_sessions(
        connection,
        true(),
        limits=limits,
        now=datetime.now(UTC),
        limit=limit + 1,
        before=before,
    )
    page, more = cut_page(found, limit)
    return list(page), more


def end_own(connection: Connection, session: Session, session_id: int) -> None:
    """End one of the own sessions. Raise ``NotFound``."""
    whose = of_visitor(session.identity) & (sessions.c.id == session_id)
    if not end_sessions(connection, whose, datetime.now(UTC)):
        raise NotFound("not_found", f"There is no open session {session_id} of yours.")
    author = author_of(session.identity)
    _record_end(connection, author, session.identity, {"session": session_id})


def end_others(connection: Connection, session: Session) -> int:
    """End all own sessions but this one; return their number."""
    whose = of_visitor(session.identity) & (sessions.c.id != session.id)
    count = end_sessions(connection, whose, datetime.now(UTC))
    if count:
        author = author_of(session.identity)
        _record_end(connection, author, session.identity, {"sessions": count})
    return count


def end_any(connection: Connection, author: Author, session_id: int) -> None:
    """End anybody's session. Raise ``NotFound``."""
    row = connection.execute(select(sessions).where(sessions.c.id == session_id)).first()
    ended = end_sessions(connection, sessions.c.id == session_id, datetime.now(UTC))
    if row is None or not ended:
        raise NotFound("not_found", f"There is no open session {session_id}.")
    account_id = None if row.key_id is None else key_by_id(connection, row.key_id).account_id
    subject = f"user {row.user_id}" if row.key_id is None else f"key {row.key_id}"
    whose = Known(subject, account_id)
    _record_end(connection, author, whose, {"session": session_id})


def end_all_of(connection: Connection, author: Author, user_id: int) -> int:
    """End all sessions of a user; return their number."""
    count = end_sessions(connection, of_user(user_id), datetime.now(UTC))
    if count:
        _record_end(connection, author, Known(f"user {user_id}"), {"sessions": count})
    return count


def author_of(identity: Identity, reason: str = "") -> Author:
    """Return a visitor as the author of acts."""
    return Author(identity.actor, "http", key_id=identity.key_id, reason=reason)


def record_proof(connection: Connection, session: Session, origin: Origin) -> None:
    _record(connection, "session.prove", session, origin)


def _identify(
    connection: Connection, proof: Credential, entrance: Entrance, now: datetime
) -> Identity | None:
    """Return the user or key of a proof; None if it is not valid, which is recorded."""
    pepper = entrance.pepper
    if proof.kind == "key":
        key = find_secret(connection, proof.secret, pepper)
        return None if key is None else _of_key(connection, key, entrance.origin, now)
    try:
        use = use_code if proof.kind == "code" else use_link
        user_id = use(connection, proof.secret, pepper=pepper, now=now)
    except LinkUsed as error:
        why = f"the link was {error.why}"
        record_refusal(connection, Known(f"user {error.user_id}"), why, entrance.origin)
        return None
    if user_id is None:
        return None
    try:
        return user_identity(connection, user_id)
    except NoRole as error:
        why = "the user is disabled or has no role"
        record_refusal(connection, Known(str(error)), why, entrance.origin)
        return None


def _of_key(connection: Connection, key: KeyInfo, origin: Origin, now: datetime) -> Identity | None:
    try:
        return key_identity(connection, key, now)
    except NoRole as error:
        why = "the key or its account is not active, or the key cannot read"
        record_refusal(connection, Known(str(error), key.account_id), why, origin)
        return None


def _record(connection: Connection, act: Act, session: Session, origin: Origin) -> None:
    record(
        connection,
        author_of(session.identity),
        act,
        session.identity.subject,
        account_id=session.identity.account_id,
        after={"session": session.id, "method": session.method, **_from(origin)},
    )


def _record_end(
    connection: Connection,
    author: Author,
    whose: Identity | Known,
    after: Mapping[str, Any],
) -> None:
    record(
        connection,
        author,
        "session.end",
        whose.subject,
        account_id=whose.account_id,
        after=after,
    )


def record_refusal(
    connection: Connection,
    identity: Identity | Known,
    why: str,
    origin: Origin,
    *,
    call_id: str | None = None,
) -> None:
    author = author_of(identity) if isinstance(identity, Identity) else Author("console", "http")
    record(
        connection,
        author if call_id is None else replace(author, call_id=call_id),
        "session.refuse",
        identity.subject,
        account_id=identity.account_id,
        after=_from(origin),
        reason=why,
    )


def _from(origin: Origin) -> Mapping[str, Any]:
    return {"network": origin.network, "agent": origin.agent[:AGENT_MAX]}
