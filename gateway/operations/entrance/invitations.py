"""Members whom the owner of an account, or an operator, invites by a one-time link.

A link opens the console as its user. So only a person who is new, or has never entered and belongs
to no other account, gets one this way: others enter as before.
"""

from __future__ import annotations

from typing import Final

from pydantic import ConfigDict
from sqlalchemy import Connection

from gateway.accounts.locks import lock_accounts
from gateway.accounts.roles import MemberRole
from gateway.accounts.users import Member, find_user, list_members
from gateway.audit_log import Author
from gateway.errors import Conflict, NotFound
from gateway.operations import users
from gateway.operations.bodies import Body, Name
from gateway.operations.entrance.links import LinkBody, LoginLinkView, create_link
from gateway.operations.refusals import refusals
from gateway.operations.users import Email, MemberBody, MemberView, UserBody

INVITATION_MINUTES: Final = 3 * 24 * 60


class InvitationBody(Body):
    """A person to be a member of an account."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "Ann", "email": "ann@example.com", "role": "member"}]
        }
    )

    name: Name
    email: Email | None = None
    role: MemberRole = "member"


@refusals()
def invite(
    connection: Connection, author: Author, account_id: int, body: InvitationBody, *, pepper: bytes
) -> tuple[MemberView, LoginLinkView | None]:
    """Make a person a member; return the membership and, if the person is new, a link.

    Raise ``Conflict`` if the person is a member already.
    """
    user_id = _known(connection, body.email)
    if user_id is not None and list_members(connection, account_id=account_id, user_ids=[user_id]):
        raise Conflict("already_member", f"{body.email} is a member already.", param="email")
    is_new = user_id is None
    if user_id is None:
        new = UserBody(name=body.name, email=body.email)
        user_id = users.create(connection, author, new)["id"]
    role = MemberBody(role=body.role)
    made = users.put_member(connection, author, f"id:{account_id}", str(user_id), role)
    link = _link(connection, author, user_id, pepper) if is_new else None
    return made, link


@refusals()
def invite_again(
    connection: Connection, author: Author, account_id: int, user_id: int, *, pepper: bytes
) -> LoginLinkView:
    """Return another link for a member who has never entered. Raise ``NotFound``, ``Conflict``."""
    member = member_of(connection, account_id, user_id)
    if not is_new(connection, member):
        raise Conflict("already_member", f"{member.user.name} has entered already.", param="user")
    return _link(connection, author, user_id, pepper)


@refusals()
def change_role(
    connection: Connection,
    author: Author,
    account_id: int,
    user_id: int,
    body: MemberBody,
    *,
    keep_owner: bool,
) -> MemberView:
    """Change a member's role. With ``keep_owner``, the last owner stays one. Raise ``Conflict``."""
    member = member_of(connection, account_id, user_id)
    if keep_owner and body.role != "owner":
        _check_other_owner(connection, member)
    return users.put_member(connection, author, f"id:{account_id}", str(user_id), body)


@refusals()
def remove(
    connection: Connection, author: Author, account_id: int, user_id: int, *, keep_owner: bool
) -> MemberView:
    """End a membership. With ``keep_owner``, the last owner cannot go. Raise ``Conflict``."""
    member = member_of(connection, account_id, user_id)
    if keep_owner:
        _check_other_owner(connection, member)
    return users.end_member(connection, author, f"id:{account_id}", str(user_id))


def member_of(connection: Connection, account_id: int, user_id: int) -> Member:
    """Return a member of an account. Raise ``NotFound``."""
    found = list_members(connection, account_id=account_id, user_ids=[user_id])
    if not found:
        raise NotFound("not_found", f"This account has no member {user_id}.")
    return found[0]


def is_new(connection: Connection, member: Member) -> bool:
    """Whether a member has never entered, has no role elsewhere and came by an invitation."""
    user = member.user
    everywhere = list_members(connection, user_ids=[user.id])
    never = user.last_login_at is None and user.status == "active"
    return never and user.role is None and len(everywhere) == 1


def _check_other_owner(connection: Connection, member: Member) -> None:
    # Under the account's lock, so that two owners cannot go at the same moment.
    lock_accounts(connection, [member.account_id])
    others = [
        each
        for each in list_members(connection, account_id=member.account_id)
        if each.role == "owner" and each.user.id != member.user.id and each.user.status == "active"
    ]
    if member.role == "owner" and not others:
        raise Conflict(
            "last_owner",
            f"{member.user.name} is the last owner of this account; make another member owner "
            "first.",
            param="role",
        )


def _known(connection: Connection, email: str | None) -> int | None:
    if email is None:
        return None
    try:
        return find_user(connection, email).id
    except LookupError:
        return None


def _link(connection: Connection, author: Author, user_id: int, pepper: bytes) -> LoginLinkView:
    body = LinkBody(user=user_id, minutes=INVITATION_MINUTES)
    return create_link(connection, author, body, pepper=pepper)
