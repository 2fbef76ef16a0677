"""``tollgate aside``: stored rows that cannot be processed."""

from __future__ import annotations

from typing import Final

import click
import msgspec

from gateway.aside import KINDS, Kind
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    columns,
    example,
    json_option,
    look_up,
    perform,
    print_views,
)
from gateway.operations.set_aside import list_all, release, retry, show

LIST_MAX: Final = 1000
ROW: Final = columns("kind name times first_at last_at reason")

kind_argument = click.argument("kind", type=click.Choice(KINDS))


@click.group()
def aside() -> None:
    """Stored rows that cannot be processed, set aside so that the others continue."""


@aside.command("list", epilog=example("tollgate aside list"))
@json_option
def aside_list(as_json: bool) -> None:
    """List the rows that are set aside, with the reason, newest first."""
    print_views(look_up(list_all, limit=LIST_MAX), ROW, as_json)


@aside.command("show", epilog=example("tollgate aside show result req_0199…"))
@kind_argument
@click.argument("name")
def aside_show(kind: Kind, name: str) -> None:
    """Show a row as JSON; a result with what the upstream returned."""
    click.echo(msgspec.json.format(msgspec.json.encode(look_up(show, kind, name))).decode())


@aside.command("retry", epilog=example("tollgate aside retry batch batch_0199…"))
@kind_argument
@click.argument("name")
@audit_reason_option
@actor_option
def aside_retry(kind: Kind, name: str) -> None:
    """Retry a row soon, for example after an upgrade."""
    perform(retry, kind, name)
    click.echo(f"{kind} {name} will be retried")


@aside.command("release", epilog=example("tollgate aside release request req_0199…"))
@kind_argument
@click.argument("name")
@audit_reason_option
@actor_option
def aside_release(kind: Kind, name: str) -> None:
    """Close a row as failed. A request is not charged, and its hold is released."""
    perform(release, kind, name)
    click.echo(f"{kind} {name} was released")
