"""``tollgate console``: one-time links to the console."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.accounts.pepper import read_pepper
from gateway.accounts.roles import MEMBER_ROLES, ROLES
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    columns,
    example,
    json_option,
    perform,
    print_views,
    read_body,
    read_settings,
)
from gateway.operations.entrance.links import LINK_MINUTES, LINK_MINUTES_MAX, LinkBody, create_link

LINK: Final = columns("user_id name url code expires_at")


@click.group()
def console() -> None:
    """The console in a browser."""


@console.command(
    "link",
    epilog=example(
        "tollgate console link",
        "tollgate console link ann@example.com --minutes 60",
        "tollgate console link --account acme --role owner",
    ),
)
@click.argument("user", metavar="[EMAIL|ID]", required=False)
@click.option("--account", help="Account of a role in an account.")
@click.option(
    "--role",
    type=click.Choice([*ROLES, *MEMBER_ROLES]),
    help="Role of its holder, who is created if necessary.  [default: operator; with an account, "
    "owner]",
)
@click.option("--name", help="Name of the holder.  [default: the role]")
@click.option(
    "--minutes",
    type=click.IntRange(1, LINK_MINUTES_MAX),
    default=LINK_MINUTES,
    show_default=True,
    help="Validity.",
)
@audit_reason_option
@actor_option
@json_option
def link(as_json: bool, **entered: Any) -> None:
    """Create a one-time link by which a person enters the console.

    It is for a user, or for the holder of a role. The code can be typed at /console/enter instead.
    """
    settings = read_settings()
    body = read_body(LinkBody, entered)
    made = perform(create_link, body, pepper=read_pepper(settings))
    print_views([{**made, "url": settings.console_url + made["path"]}], LINK, as_json)
