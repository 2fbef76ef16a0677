"""``tollgate aside``: stored rows that cannot be processed."""

from __future__ import annotations

from typing import Final

import click

from gateway.aside import KINDS, Kind
from gateway.commands.terminal import columns, example, json_option, perform, print_views, snapshot
from gateway.operations.set_aside import list_all, release, retry

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
    with snapshot() as connection:
        found = list_all(connection, limit=LIST_MAX)
    print_views(found, ROW, as_json)


@aside.command("retry", epilog=example("tollgate aside retry batch batch_0199…"))
@kind_argument
@click.argument("name")
def aside_retry(kind: Kind, name: str) -> None:
    """Retry a row soon, for example after an upgrade."""
    perform(retry, kind, name)
    click.echo(f"{kind} {name} will be retried")


@aside.command("release", epilog=example("tollgate aside release request req_0199…"))
@kind_argument
@click.argument("name")
def aside_release(kind: Kind, name: str) -> None:
    """Close a row as failed. A request is not charged, and its hold is released."""
    perform(release, kind, name)
    click.echo(f"{kind} {name} was released")
