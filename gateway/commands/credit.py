"""``tollgate credit``: credit, refunds, chargebacks, corrections."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from gateway.billing.usage.report import read_span
from gateway.catalog.price_overrides import read_prices
from gateway.commands.terminal import (
    Usd,
    UtcTime,
    actor_option,
    columns,
    example,
    json_option,
    open_database,
    perform,
    print_json,
    print_rows,
    print_views,
    read_body,
    read_settings,
    refuse,
)
from gateway.operations import credit as operations
from gateway.operations.credit import ChargebackBody, CreditBody, RefundBody
from workers.contract.blobs import Blobs

TRANSFER: Final = columns("id amount balance_after repeated")
CORRECTION: Final = columns("request_id account_id paid due back")

reason_option = click.option("--reason", required=True, help="Reason, recorded in the ledger.")


@click.group()
def credit() -> None:
    """Credit of accounts."""


@credit.command(
    "add", epilog=example('tollgate credit add acme 25 --reason "invoice 17" --reference inv-17')
)
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("amount", type=Usd(), metavar="USD")
@reason_option
@click.option("--kind", type=click.Choice(["topup", "grant"]), default="topup", show_default=True)
@click.option(
    "--reference",
    default=operations.new_reference,
    help="Payer's reference; repeating it does not book the credit again.",
)
@click.option(
    "--priority",
    type=click.IntRange(0, 1000),
    help="Order in which credits are spent, lowest first.",
)
@click.option(
    "--expires", "expires_at", type=UtcTime(), help="When unspent credit expires, in UTC."
)
@actor_option
@json_option
def credit_add(account_name: str, as_json: bool, **entered: Any) -> None:
    """Add credit to an account: paid (topup) or given (grant)."""
    body = read_body(CreditBody, entered)
    made = perform(operations.add, account_name, body)
    print_views([made], TRANSFER, as_json)


@credit.command(
    "refund", epilog=example('tollgate credit refund req_… --amount 0.02 --reason "late answer"')
)
@click.argument("request_id", metavar="REQUEST")
@click.option("--amount", type=Usd(), help="USD.  [default: the rest of the charge]")
@click.option("--reference", help="Repeating it does not book the refund again.")
@reason_option
@actor_option
@json_option
def credit_refund(request_id: str, as_json: bool, **entered: Any) -> None:
    """Refund a request's charge, in full or in part."""
    body = read_body(RefundBody, entered)
    settings = read_settings()
    with open_database(settings) as database:
        archived = asyncio.run(
            operations.archived_charge(database, Blobs(settings.blobs), request_id)
        )
    made = perform(operations.refund, request_id, body, archived)
    print_views([made], TRANSFER, as_json)


@credit.command(
    "chargeback",
    epilog=example("tollgate credit chargeback acme 25 --reference ch_17 --reason stolen"),
)
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("amount", type=Usd(), metavar="USD")
@click.option(
    "--reference",
    required=True,
    help="Bank's reference; repeating it does not book the chargeback again.",
)
@reason_option
@actor_option
@json_option
def credit_chargeback(account_name: str, as_json: bool, **entered: Any) -> None:
    """Reverse a payment. What is already spent becomes a debt and suspends the account."""
    body = read_body(ChargebackBody, entered)
    made = perform(operations.charge_back, account_name, body)
    print_views([made], TRANSFER, as_json)


@credit.command(
    "correct",
    epilog=example(
        "tollgate credit correct pocket-chat --from 2026-11-01 --to 2026-11-03 \\",
        '  --prices right.yaml --reference nov-3 --reason "wrong price of output" --post',
    ),
)
@click.argument("model")
@click.option("--from", "first", required=True, help="First day, or a moment with its offset.")
@click.option("--to", "last", required=True, help="Last day (included), or a moment (excluded).")
@click.option(
    "--prices",
    "file",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Correct prices: a catalog file, or YAML with `prices: {model: {price: […]}}`.",
)
@click.option("--account", help="Only the requests of this account.")
@click.option(
    "--reference",
    required=True,
    help="Name of the correction; repeating it does not book the correction again.",
)
@click.option("--post", is_flag=True, help="Book the correction. Without it: dry run.")
@reason_option
@actor_option
@json_option
def credit_correct(
    model: str, first: str, last: str, file: Path, post: bool, as_json: bool, **entered: Any
) -> None:
    """Refund what a wrong price took from requests accepted in a span."""
    prices = read_prices(file)
    if model not in prices:
        refuse(f"{file} has no price of {model!r}")
    span = read_span(first, last, "UTC", now=datetime.now(UTC))
    settings = read_settings()
    with open_database(settings) as database:
        archived = asyncio.run(
            operations.archived_corrections(
                database,
                Blobs(settings.blobs),
                model,
                prices[model],
                starts_at=span.starts_at,
                ends_at=span.ends_at,
                account=entered["account"],
                dry_run=not post,
            )
        )
    made = perform(
        operations.correct,
        model,
        prices[model],
        starts_at=span.starts_at,
        ends_at=span.ends_at,
        dry_run=not post,
        archived=archived,
        **entered,
    )
    if as_json:
        print_json(made)
        return
    print_rows(made["data"], CORRECTION, False)
    done = f"booked ${made['booked']}" if post else "nothing booked; add --post to book it"
    click.echo(f"{made['requests']} requests, ${made['total']} to refund; {done}")
