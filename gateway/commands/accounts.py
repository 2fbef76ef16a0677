"""``tollgate account`` and ``tollgate key``."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.accounts.keys import SCOPES
from gateway.accounts.limits import LIMIT_MAX
from gateway.accounts.pepper import read_pepper
from gateway.commands.terminal import (
    Usd,
    UtcTime,
    columns,
    example,
    json_option,
    perform,
    print_json,
    print_views,
    read_body,
    read_settings,
)
from gateway.operations import accounts, keys
from gateway.operations.accounts import AccountBody, AccountChange
from gateway.operations.keys import KeyBody

ACCOUNT: Final = columns("id name status posted held available credit_limit allowance report_tz")
KEY: Final = columns("id prefix account name scopes expires_at revoked_at spent limits.spend")

credit_limit_option = click.option(
    "--credit-limit", type=Usd(), help="USD that the balance may fall below zero."
)
per_minute = click.IntRange(1, LIMIT_MAX)


@click.group()
def account() -> None:
    """Accounts: the parties that pay."""


@account.command("create", epilog=example("tollgate account create acme --credit-limit 10"))
@click.argument("name")
@credit_limit_option
@json_option
def account_create(as_json: bool, **entered: Any) -> None:
    """Open an account."""
    made = perform(accounts.create, read_body(AccountBody, entered))
    print_views([made], ACCOUNT, as_json)


@account.command("list", epilog=example("tollgate account list --json"))
@json_option
def account_list(as_json: bool) -> None:
    """List accounts with their balances."""
    print_views(perform(accounts.list_all), ACCOUNT, as_json)


@account.command("show", epilog=example("tollgate account show acme"))
@click.argument("name")
@json_option
def account_show(name: str, as_json: bool) -> None:
    """Show one account, by name or number."""
    print_views([perform(accounts.show, name)], ACCOUNT, as_json)


@account.command(
    "set", epilog=example("tollgate account set acme --allowance 5 --tz Europe/Berlin")
)
@click.argument("account_name", metavar="NAME")
@credit_limit_option
@click.option(
    "--allowance",
    type=Usd(),
    help="Monthly credit in USD; what is unspent expires at the end of the month.",
)
@click.option("--status", type=click.Choice(["active", "suspended", "closed"]))
@click.option("--tz", "report_tz", help="Time zone of its budgets and reports.")
@click.option("--name", help="New name.")
@json_option
def account_set(account_name: str, as_json: bool, **entered: Any) -> None:
    """Change an account."""
    changed = perform(accounts.change, account_name, read_body(AccountChange, entered))
    print_views([changed], ACCOUNT, as_json)


@click.group()
def key() -> None:
    """API keys: the credentials of accounts."""


@key.command(
    "create",
    epilog=example("tollgate key create acme --name ci --spend-limit 2.50 --scope inference"),
)
@click.argument("account_name", metavar="ACCOUNT")
@click.option("--name", default="", help="Purpose of the key.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    help="Permitted calls; may be repeated.  [default: inference and read]",
)
@click.option("--expires", "expires_at", type=UtcTime(), help="When the key expires, in UTC.")
@click.option("--requests-per-minute", type=per_minute, help="Maximum number of requests.")
@click.option("--tokens-per-minute", type=per_minute, help="Maximum number of tokens.")
@click.option("--spend-limit", type=Usd(), help="USD that the key may spend in total.")
@json_option
def key_create(account_name: str, as_json: bool, **entered: Any) -> None:
    """Create a key and print its secret, which is not shown again."""
    body, pepper = read_body(KeyBody, entered), read_pepper(read_settings())
    made = perform(keys.create, account_name, body, pepper=pepper)
    if as_json:
        print_json(made)
    else:
        click.echo(made["secret"])
        click.echo("The secret is shown once and not stored.", err=True)


@key.command("list", epilog=example("tollgate key list acme"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@json_option
def key_list(account_name: str | None, as_json: bool) -> None:
    """List keys, of one account or of all."""
    print_views(perform(keys.list_all, account_name), KEY, as_json)


@key.command("revoke", epilog=example("tollgate key revoke tg_x4Lq81z"))
@click.argument("prefix", metavar="PREFIX|ID")
@json_option
def key_revoke(prefix: str, as_json: bool) -> None:
    """Revoke a key, immediately and in every gateway."""
    print_views([perform(keys.revoke, prefix)], KEY, as_json)
