"""``tollgate credit``: money that comes into accounts."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click

from gateway.accounts.accounts import (
    find_account,
)
from gateway.billing.corrections import Correction, plan
from gateway.billing.corrections import post as post_corrections
from gateway.billing.credits import enter_chargeback, enter_credit
from gateway.billing.usage.report import read_span
from gateway.catalog.price_overrides import read_prices
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    print_rows,
    refuse,
    transaction,
)
from gateway.ledger.refunds import refund
from gateway.ledger.transfers import Transfer
from gateway.pricing import format_usd

reason_option = click.option("--reason", required=True, help="Why; it stands in the ledger.")
actor_option = click.option("--actor", default="operator", show_default=True, help="Who does it.")


@click.group()
def credit() -> None:
    """Money that comes into accounts."""


@credit.command(
    "add", epilog=example('tollgate credit add acme 25 --reason "invoice 17" --reference inv-17')
)
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("amount", type=Usd(), metavar="USD")
@click.option("--reason", required=True, help="Why; it stands in the ledger for ever.")
@click.option("--kind", type=click.Choice(["topup", "grant"]), default="topup", show_default=True)
@click.option("--reference", help="The payer's reference; the same one is booked once.")
@click.option("--priority", type=click.IntRange(0, 1000), help="The lower, the sooner it is used.")
@click.option("--expires", type=click.DateTime(), help="When what is left of it ends, in UTC.")
@click.option("--actor", default="operator", show_default=True, help="Who does it.")
@json_option
def credit_add(
    account_name: str,
    amount: int,
    reason: str,
    kind: Literal["topup", "grant"],
    reference: str | None,
    priority: int | None,
    expires: datetime | None,
    actor: str,
    as_json: bool,
) -> None:
    """Add credit to an account: paid (topup) or given (grant)."""
    with transaction() as connection:
        owner = find_account(connection, account_name)
        booked = enter_credit(
            connection,
            owner.id,
            amount,
            kind=kind,
            reference=reference,
            actor=actor,
            reason=reason,
            priority=priority,
            expires_at=expires.replace(tzinfo=UTC) if expires else None,
        )
    print_rows([_transfer_row(booked, owner.name)], dict, as_json)


@credit.command(
    "refund", epilog=example('tollgate credit refund req_… --amount 0.02 --reason "late answer"')
)
@click.argument("request_id", metavar="REQUEST")
@click.option("--amount", type=Usd(), help="USD; all that is left of the charge if left out.")
@click.option("--reference", help="The same one is booked once.")
@reason_option
@actor_option
@json_option
def credit_refund(
    request_id: str,
    amount: int | None,
    reference: str | None,
    reason: str,
    actor: str,
    as_json: bool,
) -> None:
    """Give a request's charge back, in whole or in part."""
    with transaction() as connection:
        booked = refund(
            connection,
            request_id,
            amount,
            key=f"refund:{request_id}:{reference or secrets.token_hex(12)}",
            actor=actor,
            reason=reason,
        )
    print_rows([_transfer_row(booked, request_id)], dict, as_json)


@credit.command(
    "chargeback",
    epilog=example("tollgate credit chargeback acme 25 --reference ch_17 --reason stolen"),
)
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("amount", type=Usd(), metavar="USD")
@click.option("--reference", required=True, help="The bank's; the same one is booked once.")
@reason_option
@actor_option
@json_option
def credit_chargeback(
    account_name: str, amount: int, reference: str, reason: str, actor: str, as_json: bool
) -> None:
    """Take a payment back; what is spent already is owed, and suspends the account."""
    with transaction() as connection:
        owner = find_account(connection, account_name)
        booked = enter_chargeback(
            connection,
            owner.id,
            amount,
            reference=reference,
            actor=actor,
            reason=reason,
        )
    print_rows([_transfer_row(booked, owner.name)], dict, as_json)


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
    help="A catalog file, or YAML with `prices: {model: {price: […]}}`: what should have been.",
)
@click.option("--account", "account_name", help="Only the requests of this account.")
@click.option("--reference", required=True, help="Names this correction; it is booked once.")
@click.option("--post", is_flag=True, help="Book it; without this, only what would be booked.")
@reason_option
@actor_option
@json_option
def credit_correct(
    model: str,
    first: str,
    last: str,
    file: Path,
    account_name: str | None,
    reference: str,
    post: bool,
    reason: str,
    actor: str,
    as_json: bool,
) -> None:
    """Give back what a wrong price took from requests accepted in a span."""
    prices = read_prices(file)
    if model not in prices:
        refuse(f"{file} has no price of {model!r}")
    span = read_span(first, last, "UTC", now=datetime.now(UTC))
    with transaction() as connection:
        owner = find_account(connection, account_name) if account_name else None
        found = plan(
            connection,
            model,
            prices[model],
            starts_at=span.starts_at,
            ends_at=span.ends_at,
            account_id=owner.id if owner else None,
        )
        booked = 0
        if post:
            booked = post_corrections(
                connection, found, reference=reference, actor=actor, reason=reason
            )
    print_rows(found, correction_row, as_json)
    if not as_json:
        due = format_usd(sum(each.back_nanos for each in found))
        done = f"booked ${format_usd(booked)}" if post else "nothing booked; add --post to book it"
        click.echo(f"{len(found)} requests, ${due} to give back; {done}")


def correction_row(each: Correction) -> dict[str, Any]:
    return {
        "request": each.request_id,
        "account": each.account_id,
        "paid": format_usd(each.paid_nanos),
        "due": format_usd(each.due_nanos),
        "back": format_usd(each.back_nanos),
    }


def _transfer_row(booked: Transfer, account: str) -> dict[str, Any]:
    return {
        "transfer": booked.id,
        "account": account,
        "amount": format_usd(booked.amount_nanos),
        "balance": format_usd(booked.posted_after),
        "repeated": booked.repeated,
    }
