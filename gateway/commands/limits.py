"""``tollgate budget`` and ``tollgate limit``: how much may be spent, and how fast asked for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
from sqlalchemy import Connection

from gateway.accounts.accounts import find_account, list_accounts
from gateway.accounts.budgets import (
    WINDOWS,
    Budget,
    Window,
    budget_states,
    change_budget,
    create_budget,
    end_budget,
    list_budgets,
)
from gateway.accounts.keys import find_key
from gateway.accounts.limits import LIMIT_MAX, Limit, list_limits, remove_limit, set_limit
from gateway.commands.terminal import Usd, example, json_option, print_rows, transaction
from gateway.files.room import measure, set_limits
from gateway.ledger.prices import check_sold
from gateway.pricing import format_usd

key_option = click.option("--key", metavar="PREFIX|ID", help="Of this key alone.")
model_option = click.option("--model", help="For this model alone.")
number = click.IntRange(1, LIMIT_MAX)


@click.group()
def budget() -> None:
    """Budgets: how much an account, key or model may cost."""


@budget.command(
    "create", epilog=example("tollgate budget create acme 25 --window day --tz Europe/Berlin")
)
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("limit", type=Usd(), metavar="USD")
@click.option("--window", type=click.Choice(WINDOWS), required=True, help="When it starts anew.")
@key_option
@model_option
@click.option("--soft", is_flag=True, help="Count and tell, but refuse nothing.")
@click.option("--tz", metavar="ZONE", help="Where its days begin.  [the account's own zone]")
@click.option("--name", default="", help="What it is for.")
@json_option
def budget_create(
    account_name: str,
    limit: int,
    window: Window,
    key: str | None,
    model: str | None,
    soft: bool,
    tz: str | None,
    name: str,
    as_json: bool,
) -> None:
    """Set a budget; what was spent before does not count against it."""
    with transaction() as connection:
        _check_model(connection, model)
        made = create_budget(
            connection,
            find_account(connection, account_name).id,
            limit,
            window=window,
            hard=not soft,
            key_id=_key_id(connection, key),
            model=model,
            name=name,
            tz=tz,
        )
        rows = _budget_rows(connection, [made])
    print_rows(rows, dict, as_json)


@budget.command("list", epilog=example("tollgate budget list acme"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@json_option
def budget_list(account_name: str | None, as_json: bool) -> None:
    """List budgets in force and how far they are used, of one account or of all."""
    with transaction() as connection:
        owner = find_account(connection, account_name).id if account_name else None
        rows = _budget_rows(connection, list_budgets(connection, owner))
    print_rows(rows, dict, as_json)


@budget.command("set", epilog=example("tollgate budget set 3 --limit 40"))
@click.argument("budget_id", type=int, metavar="ID")
@click.option("--limit", type=Usd(), help="USD, from now on.")
@click.option("--hard/--soft", default=None, help="Whether it refuses.")
@json_option
def budget_set(budget_id: int, limit: int | None, hard: bool | None, as_json: bool) -> None:
    """Change a budget, from the next request on."""
    if limit is None and hard is None:
        raise click.UsageError("nothing to change: name --limit, --hard or --soft")
    with transaction() as connection:
        changed = change_budget(connection, budget_id, limit_nanos=limit, hard=hard)
        rows = _budget_rows(connection, [changed])
    print_rows(rows, dict, as_json)


@budget.command("end", epilog=example("tollgate budget end 3"))
@click.argument("budget_id", type=int, metavar="ID")
@json_option
def budget_end(budget_id: int, as_json: bool) -> None:
    """Take a budget out of force."""
    with transaction() as connection:
        rows = _budget_rows(connection, [end_budget(connection, budget_id)])
    print_rows(rows, dict, as_json)


@click.group()
def limit() -> None:
    """Limits of requests and tokens per minute, and of requests at once."""


@limit.command(
    "set", epilog=example("tollgate limit set acme --model pocket-chat --requests-per-minute 600")
)
@click.argument("account_name", metavar="ACCOUNT")
@key_option
@model_option
@click.option("--requests-per-minute", type=number)
@click.option("--tokens-per-minute", type=number)
@click.option(
    "--concurrent",
    type=number,
    help="Requests that are queued or run at once; replaces the default of the account or key.",
)
@click.option(
    "--cancelled-seconds-per-hour",
    type=number,
    help="Device time of cancelled work that was not charged, of a whole account.",
)
@json_option
def limit_set(
    account_name: str,
    key: str | None,
    model: str | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrent: int | None,
    cancelled_seconds_per_hour: int | None,
    as_json: bool,
) -> None:
    """Put a limit in the place of what this account, key and model had; in force within 10 s."""
    with transaction() as connection:
        _check_model(connection, model)
        made = set_limit(
            connection,
            Limit(
                find_account(connection, account_name).id,
                _key_id(connection, key),
                model,
                requests_per_minute,
                tokens_per_minute,
                concurrent,
                cancelled_seconds_per_hour,
            ),
        )
        rows = _limit_rows(connection, [made])
    print_rows(rows, dict, as_json)


@limit.command("list", epilog=example("tollgate limit list acme"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@json_option
def limit_list(account_name: str | None, as_json: bool) -> None:
    """List limits, of one account or of all."""
    with transaction() as connection:
        owner = find_account(connection, account_name).id if account_name else None
        rows = _limit_rows(connection, list_limits(connection, owner))
    print_rows(rows, dict, as_json)


@limit.command("remove", epilog=example("tollgate limit remove acme --model pocket-chat"))
@click.argument("account_name", metavar="ACCOUNT")
@key_option
@model_option
@json_option
def limit_remove(account_name: str, key: str | None, model: str | None, as_json: bool) -> None:
    """Take a limit away."""
    with transaction() as connection:
        owner = find_account(connection, account_name)
        removed = remove_limit(connection, owner.id, key_id=_key_id(connection, key), model=model)
        rows = _limit_rows(connection, [removed])
    print_rows(rows, dict, as_json)


@limit.command(
    "storage", epilog=example("tollgate limit storage acme --files 50000 --bytes 107374182400")
)
@click.argument("account_name", metavar="ACCOUNT")
@click.option("--files", type=click.IntRange(min=0), help="Number of files.")
@click.option("--bytes", "size", type=click.IntRange(min=0), help="Bytes of all files together.")
@json_option
def limit_storage(account_name: str, files: int | None, size: int | None, as_json: bool) -> None:
    """Set how many files and bytes an account may keep; what is left out is the installation's."""
    with transaction() as connection:
        owner = find_account(connection, account_name)
        set_limits(connection, owner.id, files_max=files, bytes_max=size)
        stored = measure(connection, owner.id)
    row = {
        "account": owner.name,
        "files": stored.files,
        "bytes": stored.bytes,
        "files_max": files,
        "bytes_max": size,
    }
    print_rows([row], dict, as_json)


def _key_id(connection: Connection, prefix_or_id: str | None) -> int | None:
    return None if prefix_or_id is None else find_key(connection, prefix_or_id).id


def _check_model(connection: Connection, model: str | None) -> None:
    """Refuse a name that no model has or had: it would bound nothing, silently."""
    if model is not None:
        check_sold(connection, model)


def _budget_rows(connection: Connection, found: Sequence[Budget]) -> list[dict[str, Any]]:
    names = _names(connection)
    return [
        {
            "id": state.budget.id,
            "account": names[state.budget.account_id],
            "key": state.budget.key_id,
            "model": state.budget.model,
            "name": state.budget.name,
            "window": state.budget.window,
            "tz": state.budget.tz,
            "kind": "hard" if state.budget.hard else "soft",
            "limit": format_usd(state.budget.limit_nanos),
            "spent": format_usd(state.spent_nanos),
            "held": format_usd(state.held_nanos),
            "remaining": format_usd(state.remaining_nanos),
            "ends_at": state.ends_at.isoformat() if state.ends_at else None,
        }
        for state in budget_states(connection, found, datetime.now(UTC))
    ]


def _limit_rows(connection: Connection, found: Sequence[Limit]) -> list[dict[str, Any]]:
    names = _names(connection)
    return [
        {
            "account": names[limit.account_id],
            "key": limit.key_id,
            "model": limit.model,
            "requests_per_minute": limit.requests_per_minute,
            "tokens_per_minute": limit.tokens_per_minute,
            "concurrent": limit.concurrent_max,
            "cancelled_seconds_per_hour": limit.cancelled_seconds_per_hour,
        }
        for limit in found
    ]


def _names(connection: Connection) -> dict[int, str]:
    return {account.id: account.name for account in list_accounts(connection)}
