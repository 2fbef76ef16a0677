"""``tollgate retention``: what is kept for how long, and clearing it now."""

from __future__ import annotations

import asyncio
from typing import Final

import click

from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    columns,
    command_author,
    example,
    json_option,
    open_database,
    print_views,
    read_settings,
    refuse,
)
from gateway.operations.retention import list_states, record_run
from gateway.retention.clearing import Retention
from gateway.retention.kinds import all_kinds
from workers.contract.blobs import Blobs

ROW: Final = columns("kind setting due_at lag_s due cleared cleared_at")


@click.group()
def retention() -> None:
    """What is kept for how long. Gateways clear what is due every minute."""


@retention.command("show", epilog=example("tollgate retention show"))
@json_option
def retention_show(as_json: bool) -> None:
    """List the kinds: setting, since or from when the oldest row is due, how many rows are due (at
    most 10,000 are counted), and how many were cleared so far."""
    settings = read_settings()
    with open_database(settings) as database:
        kinds = all_kinds(settings, database, Blobs(settings.blobs))
        with database.snapshot() as connection:
            views = list_states(connection, Retention(database, kinds))
    print_views(views, ROW, as_json)


@retention.command("run", epilog=example("tollgate retention run"))
@audit_reason_option
@actor_option
def retention_run() -> None:
    """Clear everything that is due now, unless another process is clearing."""
    settings = read_settings()
    with open_database(settings) as database:
        kinds = all_kinds(settings, database, Blobs(settings.blobs))
        cleared = asyncio.run(Retention(database, kinds).clear_due())
        if cleared is None:
            refuse("another process is clearing; see: tollgate retention show")
        with database.transaction() as connection:
            record_run(connection, command_author(), cleared)
    click.echo(", ".join(f"{rows} {kind}" for kind, rows in cleared.items()) or "nothing is due")
