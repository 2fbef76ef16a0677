"""``tollgate account`` and ``tollgate key``."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.accounts.accounts import STATUSES
from gateway.accounts.keys import KEY_STATUSES, SCOPES
from gateway.accounts.limits import LIMIT_MAX
from gateway.accounts.pepper import read_pepper
from gateway.accounts.roles import ROLES
from gateway.commands.terminal import (
    CLEAR,
    OrNone,
    Usd,
    UtcTime,
    actor_option,
    audit_reason_option,
    columns,
    example,
    json_option,
    look_up,
    page_options,
    perform,
    print_json,
    print_page,
    print_views,
    read_body,
    read_settings,
)
from gateway.operations import accounts, keys
from gateway.operations.accounts import AccountBody, AccountChange
from gateway.operations.keys import OVERLAP_S, KeyBody, KeyChange, NewKeyView, RotationBody

ACCOUNT: Final = columns("id name status posted held available credit_limit allowance report_tz")
KEY: Final = columns(
    "id prefix account name status scopes role models expires_at last_used_at spent limits.spend"
)

credit_limit_option = click.option(
    "--credit-limit", type=Usd(), help="USD that the balance may fall below zero."
)
per_minute = click.IntRange(1, LIMIT_MAX)
model_option = click.option(
    "--model",
    "models",
    multiple=True,
    help="Model that the key may use; may be repeated.  [default: all]",
)


@click.group()
def account() -> None:
    """Accounts: the parties that pay."""


@account.command("create", epilog=example("tollgate account create acme --credit-limit 10"))
@click.argument("name")
@credit_limit_option
@audit_reason_option
@actor_option
@json_option
def account_create(as_json: bool, **entered: Any) -> None:
    """Open an account."""
    made = perform(accounts.create, read_body(AccountBody, entered))
    print_views([made], ACCOUNT, as_json)


@account.command("list", epilog=example("tollgate account list --status suspended --json"))
@click.option("--status", type=click.Choice(STATUSES), help="Only accounts in this state.")
@click.option("--name", help="Only accounts whose name starts with this.")
@page_options
@json_option
def account_list(as_json: bool, **entered: Any) -> None:
    """List accounts with their balances, in order of their numbers."""
    print_page(look_up(accounts.list_page, **entered), ACCOUNT, as_json)


@account.command("show", epilog=example("tollgate account show acme"))
@click.argument("name")
@json_option
def account_show(name: str, as_json: bool) -> None:
    """Show one account, by name or number."""
    print_views([look_up(accounts.show, name)], ACCOUNT, as_json)


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
@click.option(
    "--keep-inputs/--no-keep-inputs",
    default=None,
    help="Whether what is sent with its requests is kept as long as their outputs.",
)
@click.option("--name", help="New name.")
@audit_reason_option
@actor_option
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
@click.option(
    "--role",
    type=click.Choice(ROLES),
    help="What an administrator's key may do.  [default: operator]",
)
@click.option("--user", metavar="EMAIL|ID", help="Member whose key it is, with the member's role.")
@click.option("--expires", "expires_at", type=UtcTime(), help="When the key expires, in UTC.")
@model_option
@click.option("--requests-per-minute", type=per_minute, help="Maximum number of requests.")
@click.option("--tokens-per-minute", type=per_minute, help="Maximum number of tokens.")
@click.option(
    "--concurrent",
    type=per_minute,
    help="Maximum number of requests queued or running.  [default: the installation's]",
)
@click.option("--spend-limit", type=Usd(), help="USD that the key may spend in total.")
@audit_reason_option
@actor_option
@json_option
def key_create(account_name: str, as_json: bool, **entered: Any) -> None:
    """Create a key and print its secret, which is not shown again."""
    body, pepper = read_body(KeyBody, entered), read_pepper(read_settings())
    _print_secret(perform(keys.create, account_name, body, pepper=pepper), as_json)


@key.command("list", epilog=example("tollgate key list acme --status active"))
@click.argument("account", metavar="[ACCOUNT]", required=False)
@click.option("--status", type=click.Choice(KEY_STATUSES), help="Only keys in this state.")
@click.option("--name", help="Only keys whose name starts with this.")
@page_options
@json_option
def key_list(as_json: bool, **entered: Any) -> None:
    """List keys, of one account or of all, in order of their numbers."""
    print_page(look_up(keys.list_page, **entered), KEY, as_json)


@key.command(
    "set",
    epilog=example(
        "tollgate key set tg_x4Lq81z --spend-limit 10 --expires none",
        "tollgate key set tg_x4Lq81z --model pocket-chat --model pocket-embed",
    ),
)
@click.argument("prefix", metavar="PREFIX|ID")
@click.option("--name", help="Purpose of the key.")
@model_option
@click.option("--all-models", is_flag=True, help="Let the key use all models.")
@click.option(
    "--expires", "expires_at", type=OrNone(UtcTime()), help="When the key expires, in UTC, or none."
)
@click.option(
    "--requests-per-minute", type=OrNone(per_minute), help="Maximum number of requests, or none."
)
@click.option(
    "--tokens-per-minute", type=OrNone(per_minute), help="Maximum number of tokens, or none."
)
@click.option(
    "--concurrent",
    type=OrNone(per_minute),
    help="Maximum number of requests queued or running, or none: the default.",
)
@click.option(
    "--spend-limit", type=OrNone(Usd()), help="USD that the key may spend in total, or none."
)
@audit_reason_option
@actor_option
@json_option
def key_set(prefix: str, all_models: bool, as_json: bool, **entered: Any) -> None:
    """Change a key; in force within 10 s. What is omitted stays as it is."""
    if all_models:
        if entered["models"]:
            raise click.UsageError("give either --model or --all-models")
        entered["models"] = CLEAR
    if all(value in (None, ()) for value in entered.values()):
        raise click.UsageError("nothing to change; see --help")
    changed = perform(keys.change, prefix, read_body(KeyChange, entered))
    print_views([changed], KEY, as_json)


@key.command("rotate", epilog=example("tollgate key rotate tg_x4Lq81z --overlap-hours 24"))
@click.argument("prefix", metavar="PREFIX|ID")
@click.option(
    "--overlap-hours",
    type=click.FloatRange(min=0),
    default=OVERLAP_S / 3600,
    show_default=True,
    help="Time for which the old key stays valid.",
)
@audit_reason_option
@actor_option
@json_option
def key_rotate(prefix: str, overlap_hours: float, as_json: bool) -> None:
    """Replace a key by a new one, and print its secret, which is not shown again."""
    body = read_body(RotationBody, {"overlap_s": round(overlap_hours * 3600)})
    made = perform(keys.rotate, prefix, body, pepper=read_pepper(read_settings()))
    _print_secret(made, as_json)


@key.command("revoke", epilog=example("tollgate key revoke tg_x4Lq81z"))
@click.argument("prefix", metavar="PREFIX|ID")
@audit_reason_option
@actor_option
@json_option
def key_revoke(prefix: str, as_json: bool) -> None:
    """Revoke a key, immediately and in every gateway."""
    print_views([perform(keys.revoke, prefix)], KEY, as_json)


def _print_secret(made: NewKeyView, as_json: bool) -> None:
    if as_json:
        print_json(made)
    else:
        click.echo(made["secret"])
        click.echo("The secret is shown once and not stored.", err=True)
