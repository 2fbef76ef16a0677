"""``tollgate credit``: money that comes into accounts."""

from __future__ import annotations

import secrets

import click

from gateway.accounts.accounts import (
    find_account,
)
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    print_rows,
    transaction,
)
from gateway.ledger.transfers import CreditKind, add_credit
from gateway.pricing import format_usd


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
@click.option("--actor", default="operator", show_default=True, help="Who does it.")
@json_option
def credit_add(
    account_name: str,
    amount: int,
    reason: str,
    kind: CreditKind,
    reference: str | None,
    actor: str,
    as_json: bool,
) -> None:
    """Add credit to an account: paid (topup) or given (grant)."""
    with transaction() as connection:
        owner = find_account(connection, account_name)
        booked = add_credit(
            connection,
            owner.id,
            amount,
            kind=kind,
            key=f"{kind}:{reference or secrets.token_hex(12)}",
            actor=actor,
            reason=reason,
        )
    row = {
        "transfer": booked.id,
        "account": owner.name,
        "amount": format_usd(booked.amount_nanos),
        "balance": format_usd(booked.posted_after),
        "repeated": booked.repeated,
    }
    print_rows([row], dict, as_json)
