"""``tollgate account`` and ``tollgate key``: who pays, and who calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from gateway.accounts.accounts import (
    Account,
    Status,
    change_account,
    create_account,
    find_account,
    list_accounts,
)
from gateway.accounts.keys import SCOPES, KeyInfo, create_key, list_keys, revoke_key
from gateway.accounts.limits import LIMIT_MAX
from gateway.accounts.pepper import read_pepper
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    print_rows,
    read_settings,
    transaction,
)
from gateway.pricing import format_usd


@click.group()
def account() -> None:
    """Accounts: who pays."""


@account.command("create", epilog=example("tollgate account create acme --credit-limit 10"))
@click.argument("name")
@click.option("--credit-limit", type=Usd(), default=0, help="USD the balance may fall below zero.")
@json_option
def account_create(name: str, credit_limit: int, as_json: bool) -> None:
    """Open an account."""
    with transaction() as connection:
        made = create_account(connection, name, credit_limit_nanos=credit_limit)
    print_rows([made], _account_row, as_json)


@account.command("list", epilog=example("tollgate account list --json"))
@json_option
def account_list(as_json: bool) -> None:
    """List accounts with their balances."""
    with transaction() as connection:
        found = list_accounts(connection)
    print_rows(found, _account_row, as_json)


@account.command("show", epilog=example("tollgate account show acme"))
@click.argument("name")
@json_option
def account_show(name: str, as_json: bool) -> None:
    """Show one account, by name or number."""
    with transaction() as connection:
        found = find_account(connection, name)
    print_rows([found], _account_row, as_json)


@account.command(
    "set", epilog=example("tollgate account set acme --allowance 5 --tz Europe/Berlin")
)
@click.argument("name")
@click.option("--credit-limit", type=Usd(), help="USD the balance may fall below zero.")
@click.option("--allowance", type=Usd(), help="USD given anew every month, until its end.")
@click.option("--status", type=click.Choice(["active", "suspended", "closed"]))
@click.option("--tz", help="Time zone of its budgets and reports.")
@click.option("--name", "new_name", help="Its name from now on.")
@json_option
def account_set(
    name: str,
    credit_limit: int | None,
    allowance: int | None,
    status: Status | None,
    tz: str | None,
    new_name: str | None,
    as_json: bool,
) -> None:
    """Change an account."""
    with transaction() as connection:
        changed = change_account(
            connection,
            find_account(connection, name).id,
            credit_limit_nanos=credit_limit,
            allowance_nanos=allowance,
            status=status,
            report_tz=tz,
            name=new_name,
        )
    print_rows([changed], _account_row, as_json)


@click.group()
def key() -> None:
    """API keys: who calls."""


@key.command(
    "create",
    epilog=example("tollgate key create acme --name ci --spend-limit 2.50 --scope inference"),
)
@click.argument("account_name", metavar="ACCOUNT")
@click.option("--name", default="", help="What it is for.")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(SCOPES), help="[inference and read]"
)
@click.option("--expires", type=click.DateTime(), help="When it ends, in UTC.")
@click.option("--requests-per-minute", type=click.IntRange(1, LIMIT_MAX))
@click.option("--tokens-per-minute", type=click.IntRange(1, LIMIT_MAX))
@click.option("--spend-limit", type=Usd(), help="USD that it may spend in all.")
@json_option
def key_create(
    account_name: str,
    name: str,
    scopes: Sequence[str],
    expires: datetime | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    spend_limit: int | None,
    as_json: bool,
) -> None:
    """Make a key and show its secret, this once."""
    pepper = read_pepper(read_settings())
    with transaction() as connection:
        owner = find_account(connection, account_name)
        secret, made = create_key(
            connection,
            owner.id,
            pepper=pepper,
            name=name,
            scopes=scopes or ("inference", "read"),
            expires_at=expires.replace(tzinfo=UTC) if expires else None,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            spend_limit_nanos=spend_limit,
        )
    if as_json:
        click.echo(msgspec.json.encode({**_key_row(made), "secret": secret}).decode())
    else:
        click.echo(secret)
        click.echo("This is shown once and stored nowhere.", err=True)


@key.command("list", epilog=example("tollgate key list acme"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@json_option
def key_list(account_name: str | None, as_json: bool) -> None:
    """List keys, of one account or of all."""
    with transaction() as connection:
        owner = find_account(connection, account_name).id if account_name else None
        found = list_keys(connection, owner)
    print_rows(found, _key_row, as_json)


@key.command("revoke", epilog=example("tollgate key revoke tg_x4Lq81z"))
@click.argument("prefix", metavar="PREFIX|ID")
@json_option
def key_revoke(prefix: str, as_json: bool) -> None:
    """Revoke a key, at once and in every gateway."""
    with transaction() as connection:
        found = revoke_key(connection, prefix)
    print_rows([found], _key_row, as_json)


def _account_row(found: Account) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "status": found.status,
        "posted": format_usd(found.posted_nanos),
        "held": format_usd(found.held_nanos),
        "available": format_usd(found.available_nanos),
        "credit_limit": format_usd(found.credit_limit_nanos),
        "allowance": format_usd(found.allowance_nanos),
        "tz": found.report_tz,
    }


def _key_row(found: KeyInfo) -> dict[str, Any]:
    limit = found.spend_limit_nanos
    return {
        "id": found.id,
        "prefix": found.prefix,
        "account": found.account,
        "name": found.name,
        "scopes": sorted(found.scopes),
        "status": "revoked" if found.revoked_at else "active",
        "expires_at": found.expires_at.isoformat() if found.expires_at else None,
        "spent": format_usd(found.spent_nanos),
        "spend_limit": format_usd(limit) if limit is not None else None,
    }
