"""One-time links to the console: for a user, or for the holder of a role, who is created.

The first operator of an installation enters by one as well.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, Self, TypedDict

from pydantic import ConfigDict, Field, model_validator
from sqlalchemy import Connection, select

from gateway.accounts.login_links import make_link
from gateway.accounts.roles import MEMBER_ROLES, ROLES, MemberRole, Role
from gateway.accounts.users import find_user
from gateway.audit_log import Author, record
from gateway.checks.moments import timestamp
from gateway.operations import users
from gateway.operations.accounts import find_owner
from gateway.operations.bodies import Body, Id, Label, Name
from gateway.operations.refusals import refusals
from gateway.operations.users import MemberBody, UserBody
from gateway.tables.users import members, sessions
from gateway.tables.users import users as users_table

LINK_MINUTES: Final = 10
LINK_MINUTES_MAX: Final = 7 * 24 * 60


class LinkBody(Body):
    """A one-time link to the console: for a user, or for the holder of a role, who is created.

    Without an account, the role is one in the installation.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [{"account": "acme"}]})

    user: Name | Id | None = None
    """Email or number."""
    account: Name | None = None
    role: Role | MemberRole | None = None
    """Default: operator; of an account, owner."""
    name: Label = ""
    """Name of a user that is created; default: the role."""
    minutes: Annotated[int, Field(ge=1, le=LINK_MINUTES_MAX)] = LINK_MINUTES

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.user is not None and (self.account or self.role or self.name):
            raise ValueError("a user has roles and a name already; leave them out")
        fitting = MEMBER_ROLES if self.account else ROLES
        if self.role is not None and self.role not in fitting:
            raise ValueError(f"the role can be {', '.join(fitting)}")
        return self


class LoginLinkView(TypedDict):
    """A link, with its secrets, which are returned only once. The path is to be appended to the
    address of the gateway."""

    object: Literal["login_link"]
    user_id: int
    name: str
    path: str
    code: str
    expires_at: str


@refusals()
def create_link(
    connection: Connection, author: Author, body: LinkBody, *, pepper: bytes
) -> LoginLinkView:
    """Create a one-time link, and its user if necessary."""
    if body.user is not None:
        user_id = find_user(connection, str(body.user)).id
    else:
        user_id = _holder(connection, author, body)
    user = find_user(connection, str(user_id))
    if user.status != "active":
        raise ValueError(f"user {user_id} is disabled")
    valid = timedelta(minutes=body.minutes)
    made = make_link(connection, user_id, valid=valid, pepper=pepper, now=datetime.now(UTC))
    expires_at = timestamp(made.ends_at)
    record(connection, author, "link.create", f"user {user_id}", after={"expires_at": expires_at})
    return {
        "object": "login_link",
        "user_id": user_id,
        "name": user.name,
        "path": f"/console/enter#{made.token}",
        "code": made.code,
        "expires_at": expires_at,
    }


def operator_has_session(connection: Connection, now: datetime) -> bool:
    """Whether a user with the role operator has an open session."""
    found = (
        select(sessions.c.id)
        .join(users_table, users_table.c.id == sessions.c.user_id)
        .where(
            users_table.c.role == "operator",
            sessions.c.ends_at > now,
            sessions.c.revoked_at.is_(None),
        )
    )
    return connection.execute(found.limit(1)).first() is not None


def _holder(connection: Connection, author: Author, body: LinkBody) -> int:
    """Return the user without an address who has a role and its name; create it if necessary."""
    if body.account is None:
        role = body.role or "operator"
        name = body.name or role
        found = select(users_table.c.id).where(users_table.c.role == role)
    else:
        account = find_owner(connection, body.account)
        role = body.role or "owner"
        name = body.name or role
        found = (
            select(users_table.c.id)
            .join(members, members.c.user_id == users_table.c.id)
            .where(members.c.account_id == account.id, members.c.role == role)
        )
    found = found.where(
        users_table.c.name == name,
        users_table.c.email.is_(None),
        users_table.c.issuer.is_(None),
        users_table.c.status == "active",
    )
    user_id = connection.execute(found.order_by(users_table.c.id).limit(1)).scalar()
    if user_id is not None:
        return int(user_id)
    wanted = {"name": name} if body.account is not None else {"name": name, "role": role}
    made = users.create(connection, author, UserBody.model_validate(wanted))["id"]
    if body.account is not None:
        member = MemberBody.model_validate({"role": role})
        users.put_member(connection, author, body.account, str(made), member)
    return made
