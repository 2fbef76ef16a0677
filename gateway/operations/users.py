"""Users and members of accounts: create, list, change, remove."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.roles import MemberRole, Role
from gateway.accounts.users import (
    EMAIL_MAX,
    Member,
    User,
    UserStatus,
    UserValues,
    change_user,
    create_user,
    find_user,
    list_members,
    list_users,
    remove_member,
    set_member,
)
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.operations.accounts import find_owner
from gateway.operations.bodies import Body, Name
from gateway.operations.pages import cut_page, read_cursor
from gateway.operations.refusals import refusals

Email = Annotated[str, Field(min_length=3, max_length=EMAIL_MAX)]


class UserBody(Body):
    """A user to be created. Without a role, there are only memberships."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "Ann", "email": "ann@example.com", "role": "finance"}]
        }
    )

    name: Name
    email: Email | None = None
    role: Role | None = None


class UserChange(Body):
    """Change of a user; omitted fields keep their value, and null removes email or role."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "auditor"}]})

    name: Name = ""
    email: Email | None = None
    role: Role | None = None
    status: UserStatus = "active"

    def values(self) -> UserValues:
        """Return the attributes that were sent."""
        values = UserValues()
        for name in ("name", "email", "role", "status"):
            if name in self.model_fields_set:
                values[name] = getattr(self, name)
        return values


class MemberBody(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"role": "member"}]})

    role: MemberRole


class MembershipView(TypedDict):
    account_id: int
    account: str
    role: MemberRole


class UserView(TypedDict):
    """A person. ``role`` is null if there are only memberships."""

    object: Literal["user"]
    id: int
    name: str
    email: str | None
    role: Role | None
    status: UserStatus
    created_at: str
    last_login_at: str | None
    memberships: list[MembershipView]


class MemberView(TypedDict):
    """A user's role in an account."""

    object: Literal["member"]
    user_id: int
    name: str
    email: str | None
    status: UserStatus
    account_id: int
    account: str
    role: MemberRole


@refusals()
def create(connection: Connection, author: Author, body: UserBody) -> UserView:
    made = create_user(connection, body.name, email=body.email, role=body.role)
    (view,) = views(connection, [made])
    record(connection, author, "user.create", _subject(made), after=view)
    return view


def list_page(
    connection: Connection,
    *,
    role: Role | None,
    status: UserStatus | None,
    limit: int,
    cursor: str | None,
) -> tuple[list[UserView], str | None]:
    """List users in order of their numbers, and return the cursor of the next page."""
    after = read_cursor(cursor, "a user")
    found = list_users(connection, role=role, status=status, limit=limit + 1, after=after)
    page, more = cut_page(found, limit)
    return views(connection, page), more


@refusals()
def change(connection: Connection, author: Author, user: str, body: UserChange) -> UserView:
    found = find_user(connection, user)
    (before,) = views(connection, [found])
    changed = change_user(connection, found.id, body.values())
    (view,) = views(connection, [changed])
    record(connection, author, "user.change", _subject(found), before=before, after=view)
    return view


@refusals()
def members_of(connection: Connection, account: str) -> list[MemberView]:
    owner = find_owner(connection, account)
    return [_member_view(each) for each in list_members(connection, account_id=owner.id)]


@refusals()
def put_member(
    connection: Connection, author: Author, account: str, user: str, body: MemberBody
) -> MemberView:
    """Make a user a member of an account, or change the role."""
    owner, found = find_owner(connection, account), find_user(connection, user)
    before = _membership(connection, found, owner.id)
    set_member(connection, found.id, owner.id, body.role)
    (made,) = list_members(connection, account_id=owner.id, user_ids=[found.id])
    view = _member_view(made)
    record(
        connection,
        author,
        "member.set",
        _subject(found),
        account_id=owner.id,
        before=before,
        after=view,
    )
    return view


@refusals()
def end_member(connection: Connection, author: Author, account: str, user: str) -> MemberView:
    owner, found = find_owner(connection, account), find_user(connection, user)
    view = _membership(connection, found, owner.id)
    remove_member(connection, found.id, owner.id)
    assert view is not None
    record(connection, author, "member.remove", _subject(found), account_id=owner.id, before=view)
    return view


def _membership(connection: Connection, user: User, account_id: int) -> MemberView | None:
    found = list_members(connection, account_id=account_id, user_ids=[user.id])
    return _member_view(found[0]) if found else None


def _subject(user: User) -> str:
    return f"user {user.id}"


def views(connection: Connection, found: Sequence[User]) -> list[UserView]:
    """Return users with their memberships."""
    ids = [user.id for user in found]
    own: dict[int, list[MembershipView]] = {id: [] for id in ids}
    for member in list_members(connection, user_ids=ids):
        own[member.user.id].append(
            {"account_id": member.account_id, "account": member.account, "role": member.role}
        )
    return [
        {
            "object": "user",
            "id": user.id,
            "name": user.name,
            "email": user.email,
            "role": user.role,
            "status": user.status,
            "created_at": timestamp(user.created_at),
            "last_login_at": timestamp(user.last_login_at) if user.last_login_at else None,
            "memberships": own[user.id],
        }
        for user in found
    ]


def _member_view(member: Member) -> MemberView:
    return {
        "object": "member",
        "user_id": member.user.id,
        "name": member.user.name,
        "email": member.user.email,
        "status": member.user.status,
        "account_id": member.account_id,
        "account": member.account,
        "role": member.role,
    }
