"""``tollgate webhook``: what became of webhook deliveries, and sending one again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

import click

from gateway.accounts.accounts import find_account
from gateway.commands.terminal import example, json_option, print_rows, refuse, transaction
from gateway.webhooks.deliveries import Delivery, Status, list_deliveries, send_again


@click.group()
def webhook() -> None:
    """Webhooks: what became of deliveries, and sending them again."""


@webhook.command("list", epilog=example("tollgate webhook list acme --status failed"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@click.option(
    "--status", type=click.Choice(get_args(Status)), help="Only deliveries in this state."
)
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Number of rows."
)
@click.option("--before", metavar="REQUEST", help="Only deliveries of older requests than this.")
@json_option
def webhook_list(
    account_name: str | None, status: Status | None, limit: int, before: str | None, as_json: bool
) -> None:
    """List deliveries, newest request first, of one account or of all."""
    with transaction() as connection:
        owner = find_account(connection, account_name).id if account_name else None
        found = list_deliveries(
            connection, account_id=owner, limit=limit, status=status, before=before
        )
    print_rows(found, _row, as_json)


@webhook.command("resend", epilog=example("tollgate webhook resend req_…"))
@click.argument("request_id", metavar="REQUEST")
@json_option
def webhook_resend(request_id: str, as_json: bool) -> None:
    """Start a new series of attempts, whatever became of the last one."""
    with transaction() as connection:
        found = send_again(connection, request_id, account_id=None, now=datetime.now(UTC))
    if found is None:
        refuse(f"{request_id} has no webhook delivery that is kept")
    print_rows([found], _row, as_json)


def _row(found: Delivery) -> dict[str, Any]:
    last = found.attempts[-1] if found.attempts else None
    return {
        "request": found.request_id,
        "account": found.account_id,
        "status": found.status,
        "attempts": len(found.attempts),
        "code": last.code if last else None,
        "error": last.error if last else None,
        "last_at": last.started_at.isoformat() if last else None,
        "next_at": found.due_at.isoformat() if found.due_at else None,
        "url": found.url,
    }
