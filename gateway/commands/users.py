"""``tollgate user`` and ``tollgate member``: people and their roles."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.accounts.roles import MEMBER_ROLES, ROLES
from gateway.accounts.users import USER_STATUSES
from gateway.commands.terminal import (
    OrNone,
    actor_option,
    audit_reason_option,
    columns,
    example,
    json_option,
    look_up,
    page_options,
    perform,
    print_page,
    print_views,
    read_body,
)
from gateway.operations import users
from gateway.operations.users import MemberBody, UserBody, UserChange

USER: Final = columns("id name email role status last_login_at")
MEMBER: Final = columns("account user_id name email status role")


@click.group()
def user() -> None:
    """People, with their roles in the installation."""


@user.command(
    "create", epilog=example("tollgate user create Ann --email ann@example.com --role finance")
)
@click.argument("name")
@click.option("--email", help="Address by which the user is found.")
@click.option("--role", type=click.Choice(ROLES), help="Role in the installation.  [default: none]")
@audit_reason_option
@actor_option
@json_option
def user_create(as_json: bool, **entered: Any) -> None:
    """Create a user."""
    print_views([perform(users.create, read_body(UserBody, entered))], USER, as_json)


@user.command("list", epilog=example("tollgate user list --role operator"))
@click.option("--role", type=click.Choice(ROLES), help="Only users with this role.")
@click.option("--status", type=click.Choice(USER_STATUSES), help="Only users in this state.")
@page_options
@json_option
def user_list(as_json: bool, **entered: Any) -> None:
    """List users, in order of their numbers."""
    print_page(look_up(users.list_page, **entered), USER, as_json)


@user.command("set", epilog=example("tollgate user set ann@example.com --status disabled"))
@click.argument("found", metavar="EMAIL|ID")
@click.option("--name", help="New name.")
@click.option("--email", type=OrNone(click.STRING), help="New address, or none.")
@click.option("--role", type=OrNone(click.Choice(ROLES)), help="New role, or none.")
@click.option("--status", type=click.Choice(USER_STATUSES))
@audit_reason_option
@actor_option
@json_option
def user_set(found: str, as_json: bool, **entered: Any) -> None:
    """Change a user. A user is disabled, never deleted."""
    print_views([perform(users.change, found, read_body(UserChange, entered))], USER, as_json)


@click.group()
def member() -> None:
    """Members of accounts, with their roles."""


@member.command("set", epilog=example("tollgate member set acme ann@example.com owner"))
@click.argument("account")
@click.argument("found", metavar="EMAIL|ID")
@click.argument("role", type=click.Choice(MEMBER_ROLES))
@audit_reason_option
@actor_option
@json_option
def member_set(account: str, found: str, as_json: bool, **entered: Any) -> None:
    """Make a user a member of an account, or change the role."""
    made = perform(users.put_member, account, found, read_body(MemberBody, entered))
    print_views([made], MEMBER, as_json)


@member.command("list", epilog=example("tollgate member list acme"))
@click.argument("account")
@json_option
def member_list(account: str, as_json: bool) -> None:
    """List the members of an account."""
    print_views(look_up(users.members_of, account), MEMBER, as_json)


@member.command("remove", epilog=example("tollgate member remove acme ann@example.com"))
@click.argument("account")
@click.argument("found", metavar="EMAIL|ID")
@audit_reason_option
@actor_option
@json_option
def member_remove(account: str, found: str, as_json: bool) -> None:
    """End a user's membership of an account."""
    print_views([perform(users.end_member, account, found)], MEMBER, as_json)
