"""``tollgate aside``: stored rows that cannot be worked on."""

from __future__ import annotations

from typing import Any

import click

from gateway.aside import KINDS, Kind, Note, list_notes
from gateway.commands.terminal import example, json_option, print_rows, snapshot, transaction
from gateway.operations.set_aside import release, retry

LIMIT = 1000

kind_argument = click.argument("kind", type=click.Choice(KINDS))


@click.group()
def aside() -> None:
    """Stored rows that cannot be worked on: set aside, so that the others go on."""


@aside.command("list", epilog=example("tollgate aside list"))
@json_option
def aside_list(as_json: bool) -> None:
    """List what is set aside, with the reason; the newest first."""
    with snapshot() as connection:
        found = list_notes(connection, limit=LIMIT)
    print_rows(found, _row, as_json)


@aside.command("retry", epilog=example("tollgate aside retry batch batch_0199…"))
@kind_argument
@click.argument("name")
def aside_retry(kind: Kind, name: str) -> None:
    """Have it tried again soon, for example by a newer version."""
    with transaction() as connection:
        retry(connection, kind, name)
    click.echo(f"{kind} {name} is tried again")


@aside.command("release", epilog=example("tollgate aside release request req_0199…"))
@kind_argument
@click.argument("name")
def aside_release(kind: Kind, name: str) -> None:
    """Close it as failed: a request costs nothing and its hold is released."""
    with transaction() as connection:
        release(connection, kind, name)
    click.echo(f"{kind} {name} is released")


def _row(note: Note) -> dict[str, Any]:
    return {
        "kind": note.kind,
        "name": note.name,
        "times": note.times,
        "first": note.first_at.isoformat(timespec="seconds"),
        "last": note.last_at.isoformat(timespec="seconds"),
        "reason": note.reason,
    }
