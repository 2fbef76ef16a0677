"""People who log in at a provider of OpenID Connect: their user, and roles by their groups.

Roles are set at each login. A role in the installation is the provider's if any group stands for
one, and so are memberships of the accounts that groups name; others are left as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from sqlalchemy import Connection, select, update

from gateway.accounts.roles import MEMBER_ROLES, ROLES, MemberRole, Role
from gateway.accounts.sessions import (
    NoRole,
    Session,
    end_sessions,
    prove_again,
    user_identity,
)
from gateway.accounts.users import EMAIL_MAX, find_user, list_members
from gateway.audit_log import Author, record
from gateway.checks.entered import NAME_MAX
from gateway.errors import NotFound
from gateway.operations import users
from gateway.operations.accounts import find_owner
from gateway.operations.entrance.sessions import (
    Entered,
    Entrance,
    Known,
    begin,
    record_proof,
    record_refusal,
    refuse,
)
from gateway.operations.users import MemberBody, UserBody, UserChange
from gateway.settings import Settings
from gateway.tables.users import sessions
from gateway.tables.users import users as users_table

log = logging.getLogger(__name__)

AUTHOR: Final = "provider"
SUBJECT_MAX: Final = 255
FRESH_S: Final = 600
"""Maximum age of a login at the provider that proves again who a visitor is."""


@dataclass(frozen=True, slots=True)
class Person:
    """What a provider states about a person. ``email`` is None unless it is verified."""

    issuer: str
    subject: str
    name: str
    email: str | None
    groups: frozenset[str]
    sid: str | None
    authenticated_at: int | None
    """Unix time at which the person last typed a password or the like, if the provider says so."""

    @classmethod
    def of(cls, claims: Mapping[str, Any], issuer: str, settings: Settings) -> Self:
        sent = claims.get(settings.oidc_groups)
        groups = sent if isinstance(sent, list) else [sent]
        email = claims.get("email") if claims.get("email_verified") is True else None
        subject, sid, moment = str(claims["sub"]), claims.get("sid"), claims.get("auth_time")
        name = claims.get("name") or claims.get("preferred_username") or subject
        return cls(
            issuer=issuer,
            subject=subject,
            name="".join(each for each in str(name) if each.isprintable())[:NAME_MAX] or "unnamed",
            email=email if isinstance(email, str) and len(email) <= EMAIL_MAX else None,
            groups=frozenset(each for each in groups if isinstance(each, str)),
            sid=sid if isinstance(sid, str) and len(sid) <= SUBJECT_MAX else None,
            authenticated_at=moment if isinstance(moment, int) else None,
        )


@dataclass(frozen=True, slots=True)
class Granted:
    """The roles of groups: the highest in the installation, and in each account."""

    role: Role | None
    members: Mapping[str, MemberRole]


def granted(groups: Collection[str], role_map: Mapping[str, str]) -> Granted:
    """Return the roles of a person in groups; pure. Values are checked by the settings."""
    wanted = [role for group, role in role_map.items() if group in groups]
    own: dict[str, MemberRole] = {}
    for each in wanted:
        account, role = _member(each)
        if account is not None:
            best = min(role, own.get(account, role), key=MEMBER_ROLES.index)
            own[account] = best
    return Granted(next((role for role in ROLES if role in wanted), None), own)


def enter_by_provider(
    connection: Connection, person: Person, role_map: Mapping[str, str], *, entrance: Entrance
) -> Entered | None:
    """Open a session for a person who has logged in at the provider; None if no group may enter."""
    now = datetime.now(UTC)
    user_id, roles = _find(connection, person), granted(person.groups, role_map)
    if user_id is None and roles.role is None and not roles.members:
        return None
    author = Author(AUTHOR, "system")
    if user_id is None:
        user_id = _create(connection, author, person)
    disabled = find_user(connection, str(user_id)).status != "active"
    if not disabled:
        _apply(connection, author, user_id, roles, role_map)
    try:
        identity = user_identity(connection, user_id)
    except NoRole:
        why = "the user is disabled" if disabled else "the user is in no group that may enter"
        record_refusal(connection, Known(f"user {user_id}"), why, entrance.origin)
        return None
    found = begin(connection, identity, "oidc", entrance, now)
    session = sessions.c.id == found.session.id
    connection.execute(update(sessions).where(session).values(provider_sid=person.sid))
    return found


def prove_by_provider(
    connection: Connection, session: Session, person: Person, *, entrance: Entrance
) -> str | None:
    """Accept a new login of the visitor as a proof; return the secret of the new cookie."""
    user_id = _find(connection, person)
    if user_id is None or user_id != session.identity.user_id:
        refuse(connection, session, "another person logged in", origin=entrance.origin)
        return None
    now = datetime.now(UTC)
    if person.authenticated_at is not None and now.timestamp() - person.authenticated_at > FRESH_S:
        why = "the provider did not ask the person again"
        refuse(connection, session, why, origin=entrance.origin)
        return None
    token = prove_again(connection, session.id, pepper=entrance.pepper, now=now)
    record_proof(connection, session, entrance.origin)
    return token


def end_by_provider(
    connection: Connection, issuer: str, subject: str | None, sid: str | None
) -> int:
    """End the sessions of a person, or the one of a login; return their number."""
    people = select(users_table.c.id).where(users_table.c.issuer == issuer)
    if subject is not None:
        people = people.where(users_table.c.subject == subject)
    whose = sessions.c.user_id.in_(people) & (sessions.c.method == "oidc")
    if sid is not None:
        whose &= sessions.c.provider_sid == sid
    elif subject is None:
        return 0
    now = datetime.now(UTC)
    query = select(sessions.c.id, sessions.c.user_id).where(
        whose, sessions.c.revoked_at.is_(None), sessions.c.ends_at > now
    )
    opened = connection.execute(query).all()
    for row in opened:
        author, after = Author(AUTHOR, "system"), {"session": row.id}
        record(connection, author, "session.end", f"user {row.user_id}", after=after)
    return end_sessions(connection, whose, now)


def _find(connection: Connection, person: Person) -> int | None:
    """Return the user of a person. One with the same verified address who never logged in at a
    provider is that person."""
    own = users_table.c.issuer == person.issuer, users_table.c.subject == person.subject
    user_id = connection.execute(select(users_table.c.id).where(*own)).scalar()
    if user_id is None and person.email is not None:
        same = users_table.c.email == person.email.casefold(), users_table.c.issuer.is_(None)
        user_id = connection.execute(select(users_table.c.id).where(*same)).scalar()
        if user_id is not None:
            _identify(connection, int(user_id), person)
    return None if user_id is None else int(user_id)


def _create(connection: Connection, author: Author, person: Person) -> int:
    taken = select(users_table.c.id).where(users_table.c.email == (person.email or "").casefold())
    email = None if connection.execute(taken).first() else person.email
    body = UserBody.model_validate({"name": person.name, "email": email})
    user_id = users.create(connection, author, body)["id"]
    _identify(connection, user_id, person)
    return user_id


def _identify(connection: Connection, user_id: int, person: Person) -> None:
    own = update(users_table).where(users_table.c.id == user_id)
    connection.execute(own.values(issuer=person.issuer, subject=person.subject))


def _apply(
    connection: Connection,
    author: Author,
    user_id: int,
    roles: Granted,
    role_map: Mapping[str, str],
) -> None:
    """Give a user the roles of its groups, and take those that no group gives any more."""
    user = str(user_id)
    governed = any(role in ROLES for role in role_map.values())
    if governed and find_user(connection, user).role != roles.role:
        change = UserChange.model_validate({"role": roles.role})
        users.change(connection, author, user, change)
    held = {each.account: each.role for each in list_members(connection, user_ids=[user_id])}
    for account in {account for role in role_map.values() if (account := _member(role)[0])}:
        try:
            name, wanted = find_owner(connection, account).name, roles.members.get(account)
        except NotFound:
            log.warning("TOLLGATE_OIDC_ROLES names the unknown account %s", account)
            continue
        if wanted is None and name in held:
            users.end_member(connection, author, name, user)
        elif wanted is not None and held.get(name) != wanted:
            body = MemberBody.model_validate({"role": wanted})
            users.put_member(connection, author, name, user, body)


def _member(role: str) -> tuple[str | None, MemberRole]:
    """Return account and role of ``account:acme:member``; None for a role in the installation."""
    kind, _, rest = role.partition(":")
    account, _, name = rest.rpartition(":")
    found: MemberRole = next((each for each in MEMBER_ROLES if each == name), "viewer")
    return (account if kind == "account" else None), found
