"""``tollgate webhook``: list deliveries, send one again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import click

from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    example,
    json_option,
    perform,
    print_views,
    snapshot,
)
from gateway.operations import webhooks
from gateway.operations.accounts import owner_id
from gateway.webhooks.deliveries import Status


@click.group()
def webhook() -> None:
    """Webhook deliveries."""


@webhook.command("list", epilog=example("tollgate webhook list acme --status failed"))
@click.argument("account", metavar="[ACCOUNT]", required=False)
@click.option(
    "--status", type=click.Choice(get_args(Status)), help="Only deliveries in this state."
)
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Number of rows."
)
@click.option("--before", metavar="REQUEST", help="Only deliveries of older requests than this.")
@json_option
def webhook_list(account: str | None, as_json: bool, **choice: Any) -> None:
    """List deliveries, newest request first, of one account or of all."""
    with snapshot() as connection:
        found = webhooks.deliveries(connection, owner_id(connection, account), **choice)
    print_views(found, _row, as_json)


@webhook.command("resend", epilog=example("tollgate webhook resend req_…"))
@click.argument("request_id", metavar="REQUEST")
@audit_reason_option
@actor_option
@json_option
def webhook_resend(request_id: str, as_json: bool) -> None:
    """Start a new series of attempts, whatever the result of the last one."""
    found = perform(webhooks.resend, request_id, account_id=None)
    print_views([found], _row, as_json)


def _row(view: Mapping[str, Any]) -> dict[str, Any]:
    last = view["attempts"][-1] if view["attempts"] else {}
    return {
        "request": view["request_id"],
        "account": view.get("account_id"),
        "status": view["status"],
        "attempts": len(view["attempts"]),
        "code": last.get("code"),
        "error": last.get("error"),
        "answer": last.get("answer"),
        "last_at": last.get("started_at"),
        "next_at": view["next_attempt_at"],
        "url": view["url"],
    }
