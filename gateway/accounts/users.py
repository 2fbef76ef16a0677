"""People: their role in the installation, and the accounts that they are members of.

A person is found by number or email. Users are disabled, never deleted, so that the audit log can
name them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias, TypedDict, get_args

from sqlalchemy import Connection, RowMapping, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from gateway.accounts.keys import revoke_keys_of
from gateway.accounts.locks import lock_accounts
from gateway.accounts.login_links import void_links
from gateway.accounts.roles import MemberRole, Role
from gateway.accounts.sessions import end_sessions, of_user
from gateway.checks.decoding import ID_MAX, read_id
from gateway.checks.entered import NAME_MAX, check_text
from gateway.sql.database import upsert
from gateway.tables.core import accounts, keys
from gateway.tables.users import members, users

UserStatus: TypeAlias = Literal["active", "disabled"]
USER_STATUSES: Final[tuple[UserStatus, ...]] = get_args(UserStatus)
EMAIL_MAX: Final = 320


@dataclass(frozen=True, slots=True)
class User:
    """A person. ``role`` is None if there are only memberships."""

    id: int
    name: str
    email: str | None
    role: Role | None
    status: UserStatus
    created_at: datetime
    last_login_at: datetime | None


@dataclass(frozen=True, slots=True)
class Member:
    """A user's role in an account."""

    user: User
    account_id: int
    account: str
    role: MemberRole


class UserValues(TypedDict, total=False):
    """Attributes of a user that can be changed."""

    name: str
    email: str | None
    role: Role | None
    status: UserStatus


class UserExists(Exception):
    """The email is that of another user."""


def create_user(
    connection: Connection, name: str, *, email: str | None = None, role: Role | None = None
) -> User:
    """Create a user. Raise ``UserExists`` if the email is taken, ``ValueError`` if name or email
    is not valid."""
    values = UserValues(name=name, email=email, role=role)
    _check(connection, values, None)
    made = insert(users).values(**_stored(values), created_at=datetime.now(UTC)).returning(users)
    with _taken_meanwhile(connection, email):
        return _user(connection.execute(made).mappings().one())


def find_user(connection: Connection, email_or_id: str) -> User:
    """Find a user by email or number. Raise ``LookupError`` if there is none."""
    condition = users.c.email == email_or_id.casefold()
    number = read_id(email_or_id)
    if number is not None and 0 < number <= ID_MAX:
        condition = or_(condition, users.c.id == number)
    row = connection.execute(select(users).where(condition)).mappings().first()
    if row is None:
        raise LookupError(f"unknown user {email_or_id!r}")
    return _user(row)


def list_users(
    connection: Connection,
    *,
    role: Role | None = None,
    status: UserStatus | None = None,
    limit: int | None = None,
    after: int = 0,
) -> list[User]:
    """List users in order of their numbers, those greater than ``after``."""
    query = select(users).where(users.c.id > after)
    if role is not None:
        query = query.where(users.c.role == role)
    if status is not None:
        query = query.where(users.c.status == status)
    rows = connection.execute(query.order_by(users.c.id).limit(limit)).mappings()
    return [_user(row) for row in rows]


def change_user(connection: Connection, user_id: int, values: UserValues) -> User:
    """Change the attributes that are given. The keys of a user that is disabled are revoked. Raise
    as ``create_user``.

    Another role in the installation, as disabling, ends the user's sessions and links.
    """
    _check(connection, values, user_id)
    before = find_user(connection, str(user_id))
    if (values.get("role", before.role), values.get("status", "active")) != (before.role, "active"):
        now = datetime.now(UTC)
        end_sessions(connection, of_user(user_id), now)
        void_links(connection, user_id, now)
    if values.get("status") == "disabled":
        query = select(members.c.account_id).where(members.c.user_id == user_id)
        lock_accounts(connection, connection.scalars(query).all())
        revoke_keys_of(connection, user_id)
    if values:
        with _taken_meanwhile(connection, values.get("email")):
            connection.execute(update(users).where(users.c.id == user_id).values(**_stored(values)))
    return find_user(connection, str(user_id))


def set_member(connection: Connection, user_id: int, account_id: int, role: MemberRole) -> None:
    """Make a user a member of an account, or change the role, also that of the user's keys."""
    lock_accounts(connection, [account_id])
    made = upsert(connection, members).values(user_id=user_id, account_id=account_id, role=role)
    connection.execute(
        made.on_conflict_do_update(
            index_elements=[members.c.user_id, members.c.account_id], set_={"role": role}
        )
    )
    connection.execute(
        update(keys)
        .where(keys.c.user_id == user_id, keys.c.account_id == account_id)
        .values(member_role=role)
    )


def remove_member(connection: Connection, user_id: int, account_id: int) -> None:
    """End a membership, and revoke the user's keys of the account. Raise ``LookupError`` if there
    is none."""
    lock_accounts(connection, [account_id])
    gone = delete(members).where(members.c.user_id == user_id, members.c.account_id == account_id)
    if not connection.execute(gone).rowcount:
        raise LookupError(f"user {user_id} is not a member of account {account_id}")
    revoke_keys_of(connection, user_id, account_id)


def list_members(
    connection: Connection,
    *,
    account_id: int | None = None,
    user_ids: Collection[int] | None = None,
) -> list[Member]:
    """List memberships: of an account, or of some users; ordered by account and user."""
    query = (
        select(
            users,
            members.c.account_id,
            members.c.role.label("member_role"),
            accounts.c.name.label("account"),
        )
        .join(users, users.c.id == members.c.user_id)
        .join(accounts, accounts.c.id == members.c.account_id)
        .order_by(members.c.account_id, members.c.user_id)
    )
    if account_id is not None:
        query = query.where(members.c.account_id == account_id)
    if user_ids is not None:
        query = query.where(members.c.user_id.in_(sorted(user_ids)))
    return [
        Member(_user(row), row["account_id"], row["account"], row["member_role"])
        for row in connection.execute(query).mappings()
    ]


def _check(connection: Connection, values: UserValues, user_id: int | None) -> None:
    if "name" in values:
        check_text(values["name"], "the name of a user", longest=NAME_MAX, required=True)
    email = values.get("email")
    if email is not None:
        check_text(email, "the email", longest=EMAIL_MAX)
        local, _, host = email.partition("@")
        if not local or not host or "@" in host or " " in email:
            raise ValueError(f"{email!r} is not a valid email address")
        taken = select(users.c.id).where(users.c.email == email.casefold())
        other = connection.execute(taken).scalar()
        if other is not None and other != user_id:
            raise UserExists(f"the email {email!r} is that of user {other}")


@contextlib.contextmanager
def _taken_meanwhile(connection: Connection, email: str | None) -> Iterator[None]:
    """Raise ``UserExists`` if a concurrent transaction has taken the email."""
    try:
        with connection.begin_nested():
            yield
    except IntegrityError as error:
        raise UserExists(f"the email {email!r} is that of another user") from error


def _stored(values: UserValues) -> UserValues:
    email = values.get("email")
    return values if email is None else UserValues({**values, "email": email.casefold()})


def _user(row: RowMapping) -> User:
    return User(
        id=row["id"],
        name=row["name"],
        email=row["email"],
        role=row["role"],
        status=row["status"],
        created_at=row["created_at"],
        last_login_at=row["last_login_at"],
    )
