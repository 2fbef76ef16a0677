"""``tollgate archive``: closed months out of the database into Parquet files, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import click

from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    columns,
    command_author,
    example,
    json_option,
    look_up,
    open_database,
    print_json,
    print_views,
    read_settings,
    refuse,
    snapshot,
)
from gateway.operations import periods
from gateway.sql.database import Database
from workers.contract.blobs import Blobs

T = TypeVar("T")

ARCHIVE: Final = columns("month state receipts charged bytes kept_receipts changed_at sha256")


class _Archive(click.Group):
    """Group in which a month that is not a command is archived."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0][:1].isdigit():
            args = ["month", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_Archive, epilog=example("tollgate archive 2026-03", "tollgate archive list"))
def archive() -> None:
    """Move closed months into Parquet files, and back. `tollgate archive YYYY-MM` archives one."""


@archive.command(
    "month", epilog=example("tollgate archive 2026-03", "tollgate archive month 2026-03 --dry-run")
)
@click.argument("month", metavar="YYYY-MM")
@click.option("--keep", is_flag=True, help="Write and verify the files; remove nothing.")
@click.option("--dry-run", is_flag=True, help="Print the rows and about how many bytes they take.")
@audit_reason_option
@actor_option
@json_option
def archive_month(month: str, keep: bool, dry_run: bool, as_json: bool) -> None:
    """Write a closed month to files, verify them, and remove it from the database.

    A command that was killed is completed by the next one. The name of the command can be left
    out.
    """
    if dry_run:
        _rehearse(month, as_json)
        return
    made = _run(lambda archiver: archiver.archive(month, keep=keep))
    view = periods.archive_view(made)
    print_views([view], ARCHIVE, as_json)
    if view["kept_receipts"] and not keep:
        click.echo(
            f"note: {view['kept_receipts']} receipts stay in the database, because a refund, an "
            "output, stored media or a webhook delivery refers to them",
            err=True,
        )


@archive.command("list", epilog=example("tollgate archive list"))
@json_option
def archive_list(as_json: bool) -> None:
    """List archived months."""
    print_views(look_up(periods.list_archived), ARCHIVE, as_json)


@archive.command("verify", epilog=example("tollgate archive verify 2026-03"))
@click.argument("month", metavar="YYYY-MM")
def archive_verify(month: str) -> None:
    """Read an archive and recompute its digests, sums and seal; exit with 1 if they differ."""
    from gateway.archive.lifecycle import Archiver
    from gateway.audit_log import Author

    settings = read_settings()
    with open_database(settings) as database:
        archiver = Archiver(database, Blobs(settings.blobs), Author("verify", "cli"))
        found = asyncio.run(archiver.verify(month))
    click.echo(
        f"{month}: {found.receipts} receipts and {found.transfer_count} transfers in "
        f"{len(found.files)} files have the seal {found.sha256}"
    )


@archive.command("restore", epilog=example("tollgate archive restore 2026-03"))
@click.argument("month", metavar="YYYY-MM")
@audit_reason_option
@actor_option
def archive_restore(month: str) -> None:
    """Verify an archive, put its month back into the database, and delete the archive."""
    restored = _run(lambda archiver: archiver.restore(month))
    click.echo(f"{month} is in the database again: {restored} receipts")


def _run(act: Callable[[Any], Awaitable[T]]) -> T:
    # Imported here because importing pyarrow takes long, and few commands need it.
    from gateway.archive.lifecycle import Archiver

    settings, author = read_settings(), command_author()

    async def run(database: Database) -> T:
        expires = settings.metadata_retention_days is not None
        blobs = Blobs(settings.blobs)
        return await act(Archiver(database, blobs, author, metadata_expires=expires))

    with open_database(settings) as database:
        return asyncio.run(run(database))


def _rehearse(month: str, as_json: bool) -> None:
    from gateway.archive.files import estimate
    from gateway.archive.obstacle import obstacle

    expires = read_settings().metadata_retention_days is not None
    with snapshot() as connection:
        reason = obstacle(connection, month, metadata_expires=expires)
        if reason is not None:
            refuse(reason)
        size = estimate(connection, month)
    found = {
        "object": "archive.rehearsal",
        "month": month,
        "receipts": size.receipts,
        "steps": size.steps,
        "transfers": size.transfers,
        "bytes": size.bytes,
    }
    if as_json:
        print_json(found)
        return
    click.echo(
        f"{month}: {size.receipts} receipts, {size.steps} steps and {size.transfers} transfers, "
        f"about {size.bytes} bytes; nothing was written"
    )
