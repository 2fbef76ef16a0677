"""``tollgate budget`` and ``tollgate limit``: spending, rates, concurrency, storage."""

from __future__ import annotations

from typing import Any, Final

import click

from gateway.accounts.budgets import WINDOWS
from gateway.accounts.keys import find_key
from gateway.accounts.limits import LIMIT_MAX
from gateway.commands.terminal import (
    Usd,
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
from gateway.operations import budgets, limits, storage
from gateway.operations.budgets import BudgetBody, BudgetChange
from gateway.operations.limits import RateLimitBody
from gateway.operations.storage import StorageLimitBody

BUDGET: Final = columns(
    "id account organisation key model name window tz hard limit spent held remaining ends_at"
)
LIMIT: Final = columns(
    "account key model requests_per_minute tokens_per_minute concurrent cancelled_seconds_per_hour"
)
STORAGE: Final = columns("account files bytes files_max bytes_max")

account_argument = click.argument("account", metavar="ACCOUNT")
any_account_argument = click.argument("account", metavar="[ACCOUNT]", required=False)
key_option = click.option("--key", metavar="PREFIX|ID", help="Only requests of this key.")
model_option = click.option("--model", help="Only requests for this model.")
window_option = click.option(
    "--window",
    type=click.Choice(WINDOWS),
    required=True,
    help="Interval after which spending is reset.",
)
soft_option = click.option("--soft", is_flag=True, help="Report overspending, but accept requests.")
purpose_option = click.option("--name", default="", help="Purpose of the budget.")
number = click.IntRange(1, LIMIT_MAX)


@click.group()
def budget() -> None:
    """Budgets: spending limits of accounts, keys and models."""


@budget.command(
    "create", epilog=example("tollgate budget create acme 25 --window day --tz Europe/Berlin")
)
@account_argument
@click.argument("limit", type=Usd(), metavar="USD")
@window_option
@key_option
@model_option
@soft_option
@click.option("--tz", metavar="ZONE", help="Time zone of its days.  [default: the account's]")
@purpose_option
@audit_reason_option
@actor_option
@json_option
def budget_create(key: str | None, soft: bool, as_json: bool, **entered: Any) -> None:
    """Create a budget. Earlier spending does not count against it."""
    entered |= {"key": _key_id(key), "hard": not soft}
    made = perform(budgets.create, read_body(BudgetBody, entered))
    print_views([made], BUDGET, as_json)


@budget.command("list", epilog=example("tollgate budget list acme"))
@any_account_argument
@click.option("--organisation", help="Only budgets of this organisation.")
@key_option
@model_option
@page_options
@json_option
def budget_list(key: str | None, as_json: bool, **entered: Any) -> None:
    """List the budgets in force and their use, in order of their numbers."""
    print_page(look_up(budgets.list_page, key=_key_id(key), **entered), BUDGET, as_json)


@budget.command("set", epilog=example("tollgate budget set 3 --limit 40"))
@click.argument("budget_id", type=int, metavar="ID")
@click.option("--limit", type=Usd(), help="New limit in USD.")
@click.option("--hard/--soft", default=None, help="Refuse requests, or only report overspending.")
@click.option(
    "--overallot/--no-overallot",
    default=None,
    help="Whether budgets of an organisation's accounts may sum to more.",
)
@audit_reason_option
@actor_option
@json_option
def budget_set(budget_id: int, as_json: bool, **entered: Any) -> None:
    """Change a budget, from the next request on."""
    if not any(value is not None for value in entered.values()):
        raise click.UsageError("nothing to change: name --limit, --hard, --soft or --overallot")
    changed = perform(budgets.change, budget_id, read_body(BudgetChange, entered))
    print_views([changed], BUDGET, as_json)


@budget.command("end", epilog=example("tollgate budget end 3"))
@click.argument("budget_id", type=int, metavar="ID")
@audit_reason_option
@actor_option
@json_option
def budget_end(budget_id: int, as_json: bool) -> None:
    """End a budget."""
    print_views([perform(budgets.end, budget_id)], BUDGET, as_json)


@click.group()
def limit() -> None:
    """Limits of rate, concurrency and storage."""


@limit.command(
    "set", epilog=example("tollgate limit set acme --model pocket-chat --requests-per-minute 600")
)
@account_argument
@key_option
@model_option
@click.option("--requests-per-minute", type=number, help="Maximum number of requests.")
@click.option("--tokens-per-minute", type=number, help="Maximum number of tokens.")
@click.option(
    "--concurrent",
    type=number,
    help="Maximum number of requests queued or running.  [default: the installation's]",
)
@click.option(
    "--cancelled-seconds-per-hour",
    type=number,
    help="Maximum device time of cancelled, uncharged work of the account, in seconds.",
)
@audit_reason_option
@actor_option
@json_option
def limit_set(key: str | None, as_json: bool, **entered: Any) -> None:
    """Create a limit, or replace that of the same account, key and model; in force within 10 s."""
    entered["key"] = _key_id(key)
    made = perform(limits.put, read_body(RateLimitBody, entered))
    print_views([made], LIMIT, as_json)


@limit.command("list", epilog=example("tollgate limit list acme"))
@any_account_argument
@page_options
@json_option
def limit_list(account: str | None, as_json: bool, **pages: Any) -> None:
    """List limits, of one account or of all, by account, key and model."""
    print_page(look_up(limits.list_page, account, **pages), LIMIT, as_json)


@limit.command("remove", epilog=example("tollgate limit remove acme --model pocket-chat"))
@account_argument
@key_option
@model_option
@audit_reason_option
@actor_option
@json_option
def limit_remove(account: str, key: str | None, model: str | None, as_json: bool) -> None:
    """Remove a limit."""
    removed = perform(limits.remove, account, key=_key_id(key), model=model)
    print_views([removed], LIMIT, as_json)


@limit.command(
    "storage", epilog=example("tollgate limit storage acme --files 50000 --bytes 107374182400")
)
@account_argument
@click.option("--files", type=click.IntRange(min=0), help="Maximum number of files.")
@click.option("--bytes", type=click.IntRange(min=0), help="Maximum size of all files, in bytes.")
@audit_reason_option
@actor_option
@json_option
def limit_storage(as_json: bool, **entered: Any) -> None:
    """Set the storage of an account; a limit that is omitted is the installation's."""
    body = read_body(StorageLimitBody, entered)
    print_views([perform(storage.put, body, read_settings())], STORAGE, as_json)


def _key_id(prefix_or_id: str | None) -> int | None:
    return None if prefix_or_id is None else look_up(find_key, prefix_or_id).id
