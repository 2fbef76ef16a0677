"""``tollgate notices``: where notices go, and what was sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from gateway.accounts.pepper import read_pepper
from gateway.commands.terminal import (
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
    read_settings,
)
from gateway.notices.kinds import CONFIRMATION, KINDS, TEST
from gateway.operations import notices as operations
from gateway.operations.notices import SubscriptionBody

SUBSCRIPTION: Final = columns("id account_id url email kinds created_at confirmed")


@click.group()
def notices() -> None:
    """What accounts and the operator are told, by webhook and by mail."""


@notices.command(
    "add",
    epilog=example(
        "tollgate notices add acme --email ops@example.com --kind budget.passed",
        "tollgate notices add --url https://ops.example.com/tollgate",
    ),
)
@click.argument("account", metavar="[ACCOUNT]", required=False)
@click.option("--url", help="URL that is called, signed as other webhooks are.")
@click.option("--email", help="Address to which mail is sent.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    help="Only this kind; can be repeated.  [default: all]",
)
@audit_reason_option
@actor_option
@json_option
def notices_add(as_json: bool, **entered: Any) -> None:
    """Send notices of an account, or those for the operator, to a URL or an address."""
    settings = read_settings()
    body = read_body(SubscriptionBody, entered)
    made = perform(operations.add, body, settings=settings, pepper=read_pepper(settings))
    print_views([made], SUBSCRIPTION, as_json)
    if made["secret"] is not None and not as_json:
        click.echo(f"signing secret: {made['secret']}")


@notices.command("list", epilog=example("tollgate notices list acme"))
@click.argument("account", metavar="[ACCOUNT]", required=False)
@page_options
@json_option
def notices_list(as_json: bool, **entered: Any) -> None:
    """List subscriptions, of one account, or of all and the operator."""
    print_page(look_up(operations.list_page, **entered), SUBSCRIPTION, as_json)


@notices.command("remove", epilog=example("tollgate notices remove 3"))
@click.argument("subscription_id", metavar="ID", type=click.IntRange(min=1))
@audit_reason_option
@actor_option
@json_option
def notices_remove(subscription_id: int, as_json: bool) -> None:
    """Stop sending notices to a subscription."""
    print_views([perform(operations.remove, subscription_id)], SUBSCRIPTION, as_json)


@notices.command("test", epilog=example("tollgate notices test 3"))
@click.argument("subscription_id", metavar="ID", type=click.IntRange(min=1))
@audit_reason_option
@actor_option
@json_option
def notices_test(subscription_id: int, as_json: bool) -> None:
    """Send a test notice. A running gateway sends it; `tollgate notices sent` shows the result."""
    print_views([perform(operations.send_test, subscription_id)], _sent, as_json)


@notices.command("sent", epilog=example("tollgate notices sent acme --kind budget.passed"))
@click.argument("account", metavar="[ACCOUNT]", required=False)
@click.option(
    "--kind", type=click.Choice((*KINDS, TEST, CONFIRMATION)), help="Only notices of this kind."
)
@page_options
@json_option
def notices_sent(as_json: bool, **entered: Any) -> None:
    """List notices, newest first, with the state of their deliveries."""
    print_page(look_up(operations.sent_of, **entered), _sent, as_json)


def _sent(view: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": view["id"],
        "created_at": view["created_at"],
        "account": view["account_id"],
        "kind": view["kind"],
        "title": view["title"],
        "sent_to": [
            f"{each['email'] or each['url']}: {each['status']}" for each in view["deliveries"]
        ],
    }
