"""``tollgate erase``: erase what is personal of an account, a request or a tag."""

from __future__ import annotations

import asyncio
from collections import Counter

import click

from gateway.audit_log import Author
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    command_author,
    example,
    json_option,
    open_database,
    print_json,
    print_rows,
    read_body,
    read_settings,
)
from gateway.operations.retention import ErasureBody, erase
from gateway.retention.erasure import Eraser
from gateway.settings import Settings
from gateway.sql.database import Database
from workers.contract.blobs import Blobs
from workers.contract.redis import connect
from workers.contract.streams import EventLog


@click.command(
    "erase",
    epilog=example(
        "tollgate erase --account acme --dry-run",
        "tollgate erase --tag customer=ann --account acme",
    ),
)
@click.option("--account", help="The account, by name or number; or the one whose tag it is.")
@click.option("--request", "request_id", metavar="ID", help="One request.")
@click.option("--tag", metavar="KEY=VALUE", help="All requests with this metadata.")
@click.option("--dry-run", is_flag=True, help="Count what would be erased.")
@json_option
@audit_reason_option
@actor_option
def erase_command(
    account: str | None, request_id: str | None, tag: str | None, dry_run: bool, as_json: bool
) -> None:
    """Erase what is personal; amounts, receipts and invoices stay. Repeat it if it is interrupted.

    An account must be closed first, and nothing that is erased may still be running.
    """
    body = read_body(
        ErasureBody,
        {"account": account, "request": request_id, "tag": tag, "dry_run": dry_run or None},
    )
    settings = read_settings()
    author = command_author()
    with open_database(settings) as database:
        erased = asyncio.run(_erase(settings, database, author, body))
    if as_json:
        print_json(erased)
    else:
        print_rows(sorted(erased.items()), lambda each: {"kind": each[0], "rows": each[1]}, False)
        verb = "would be erased" if dry_run else "erased"
        click.echo(f"{sum(erased.values())} {verb}")


async def _erase(
    settings: Settings, database: Database, author: Author, body: ErasureBody
) -> Counter[str]:
    # Without a queue server, event logs end by themselves, some minutes after their last event.
    redis = connect(settings.queue_url) if settings.redis_url else None
    try:
        events = EventLog(redis, namespace=settings.namespace) if redis else None
        eraser = Eraser(database, Blobs(settings.blobs), events)
        erased: Counter[str] = Counter()
        while True:
            step = await erase(database, eraser, author, body)
            erased.update(step["erased"])
            if step["cursor"] is None:
                return erased
            body = body.model_copy(update={"cursor": step["cursor"]})
    finally:
        if redis is not None:
            await redis.aclose()
