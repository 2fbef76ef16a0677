"""``tollgate catalog price`` and ``catalog whatif``: prices set, listed, and tried on the past."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from sqlalchemy import Connection

from gateway.accounts.accounts import find_account
from gateway.billing.usage.report import read_span
from gateway.billing.usage.whatif import RepricedUsage, whatif
from gateway.catalog.document import Document, Unreadable
from gateway.catalog.loader import load_catalog
from gateway.catalog.price_overrides import (
    read_price_override,
    read_prices,
    read_scheduled,
    read_start,
)
from gateway.catalog.schema import CatalogEntry
from gateway.commands.terminal import (
    example,
    json_option,
    print_rows,
    read_settings,
    refuse,
    snapshot,
    transaction,
)
from gateway.ledger.prices import (
    LIST,
    PriceCache,
    PricePeriod,
    cancel_price,
    price_periods_of,
    read_price,
    set_price,
)
from gateway.pricing import Price, format_usd

account_option = click.option("--account", "account_name", help="Of this account's own.")
reason_option = click.option("--reason", required=True, help="Why; it is kept with the price.")
actor_option = click.option("--actor", default="operator", show_default=True, help="Who does it.")
from_option = click.option("--from", "starts", help="When it begins, with offset. [in 10 s]")


@click.group()
def price() -> None:
    """Prices: of the list, and of accounts' own."""


@price.command(
    "set",
    epilog=example(
        'tollgate catalog price set pocket-chat --component "input_token 0.01 1000000" \\',
        '  --component "output_token 0.05 1000000" --account acme --reason "contract 17"',
        "tollgate catalog price set Veo3 --file price.yaml --from 2026-12-01T00:00Z --reason x",
    ),
)
@click.argument("model")
@click.option(
    "--component", "components", multiple=True, help='"UNIT AMOUNT [PER]", once for each unit.'
)
@click.option("--minimum", help="USD that a charged request costs at least.")
@click.option(
    "--file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="YAML with `price` and `minimum` as in the catalog; has conditions (`when`) too.",
)
@account_option
@from_option
@reason_option
@actor_option
@json_option
def price_set(
    model: str,
    components: tuple[str, ...],
    minimum: str | None,
    file: Path | None,
    account_name: str | None,
    starts: str | None,
    reason: str,
    actor: str,
    as_json: bool,
) -> None:
    """Put a price in force, for everybody or for one account."""
    if (file is None) == (not components):
        raise click.UsageError("give either --component or --file")
    told: dict[str, Any] = {"price": [_component(text) for text in components]}
    if file is not None:
        value = _read_file(file)
        told = value if isinstance(value, dict) else {"price": value}
    if minimum is not None:
        told["minimum"] = minimum
    made = read_price_override(_entry(model), told)
    _set(model, made, account_name, starts, actor=actor, reason=reason, as_json=as_json)


@price.command(
    "end", epilog=example("tollgate catalog price end pocket-chat --account acme --reason expired")
)
@click.argument("model")
@click.option("--account", "account_name", required=True, help="Whose own price ends.")
@from_option
@reason_option
@actor_option
@json_option
def price_end(
    model: str, account_name: str, starts: str | None, reason: str, actor: str, as_json: bool
) -> None:
    """End a price of an account's own: it pays the list price again."""
    _set(model, None, account_name, starts, actor=actor, reason=reason, as_json=as_json)


@price.command(
    "cancel",
    epilog=example(
        "tollgate catalog price cancel Veo3 --from 2026-12-01T00:00Z --reason 'wrong amount'",
        "tollgate catalog price cancel pocket-chat --account acme --from 2026-12-01T00:00Z "
        "--reason x",
    ),
)
@click.argument("model")
@account_option
@click.option("--from", "starts", required=True, help="Start of the price, with offset.")
@reason_option
@actor_option
@json_option
def price_cancel(
    model: str, account_name: str | None, starts: str, reason: str, actor: str, as_json: bool
) -> None:
    """Take back a price, or an end, that begins more than 10 s from now."""
    with transaction() as connection:
        period = cancel_price(
            connection,
            model,
            account_id=find_account(connection, account_name).id if account_name else LIST,
            starts_at=read_scheduled(starts),
            now=datetime.now(UTC),
            actor=actor,
            reason=reason,
        )
        made = _read(connection, period, {})
    print_rows([_row(period, made)], dict, as_json)


@price.command("list", epilog=example("tollgate catalog price list pocket-chat --account acme"))
@click.argument("model", required=False)
@account_option
@json_option
def price_list(model: str | None, account_name: str | None, as_json: bool) -> None:
    """List every price that was, is or will be in force, and those that were cancelled."""
    cache: PriceCache = {}
    with snapshot() as connection:
        account_id = find_account(connection, account_name).id if account_name else None
        rows = [
            _row(period, _read(connection, period, cache))
            for period in price_periods_of(connection, model=model, account_id=account_id)
        ]
    print_rows(rows, dict, as_json)


@click.command(
    "whatif",
    epilog=example("tollgate catalog whatif --from 2026-10-01 --to 2026-10-31 --prices other.yaml"),
)
@click.option("--from", "first", required=True, help="First day, or a moment with its offset.")
@click.option("--to", "last", required=True, help="Last day (included), or a moment (excluded).")
@click.option(
    "--prices",
    "file",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A catalog file, or YAML with `prices: {model: {price: […]}}`.",
)
@click.option("--account", "account_name", help="Only the usage of this account.")
@click.option("--tz", default="UTC", show_default=True, help="Zone in which days are cut.")
@json_option
def whatif_command(
    first: str, last: str, file: Path, account_name: str | None, tz: str, as_json: bool
) -> None:
    """Say what past usage would have cost under another price list; nothing is changed."""
    prices = read_prices(file)
    span = read_span(first, last, tz, now=datetime.now(UTC))
    with snapshot() as connection:
        account_id = find_account(connection, account_name).id if account_name else None
        found = whatif(
            connection,
            prices,
            starts_at=span.starts_at,
            ends_at=span.ends_at,
            account_id=account_id,
        )
    whole = RepricedUsage("total")
    for each in found:
        whole.requests += each.requests
        whole.charged_nanos += each.charged_nanos
        whole.repriced_nanos += each.repriced_nanos
        whole.unpriced_requests += each.unpriced_requests
        whole.unpriced_nanos += each.unpriced_nanos
    print_rows([*found, whole], _repriced_row, as_json)


def _set(
    model: str,
    made: Price | None,
    account_name: str | None,
    starts: str | None,
    *,
    actor: str,
    reason: str,
    as_json: bool,
) -> None:
    starts_at = read_start(starts, datetime.now(UTC))
    with transaction() as connection:
        period = set_price(
            connection,
            model,
            made,
            account_id=find_account(connection, account_name).id if account_name else LIST,
            starts_at=starts_at,
            actor=actor,
            reason=reason,
        )
    print_rows([_row(period, made)], dict, as_json)


def _read_file(file: Path) -> Any:
    try:
        return Document(file.read_text()).value
    except (Unreadable, UnicodeDecodeError) as error:
        refuse(f"{file} is not valid YAML: {error}")


def _component(text: str) -> dict[str, Any]:
    unit, amount, *per = text.split() if len(text.split()) > 1 else ("", "", "x")
    if len(per) > 1 or not all(re.fullmatch("[1-9][0-9]{0,9}", part) for part in per):
        refuse(f'{text!r} is no component; write "UNIT AMOUNT [PER]"', status=2)
    return {"unit": unit, "amount": amount} | ({"per": int(per[0])} if per else {})


def _entry(model: str) -> CatalogEntry:
    entries = {entry.name: entry for entry in load_catalog(read_settings().catalog).models}
    if model not in entries:
        refuse(f"the catalog has no model {model!r}")
    return entries[model]


def _read(connection: Connection, period: PricePeriod, cache: PriceCache) -> Price | None:
    return None if period.price_id is None else read_price(connection, period.price_id, cache)


def _row(period: PricePeriod, price: Price | None) -> dict[str, Any]:
    parts = price.components if price else ()
    return {
        "model": period.model,
        "account": period.account_id or "everybody",
        "from": period.effective_from.isoformat(timespec="seconds"),
        "price": [
            f"${format_usd(part.amount_nanos)} per {part.per if part.per > 1 else ''} {part.unit}"
            f"{''.join(f' {name}={value}' for name, value in part.when.items())}".replace("  ", " ")
            for part in parts
        ]
        or ["the list price"],
        "minimum": format_usd(price.minimum_nanos) if price else None,
        "source": period.source,
        "actor": period.actor,
        "reason": period.reason,
        "cancelled": None
        if (cancelled := period.cancelled) is None
        else f"{cancelled.cancelled_at.isoformat(timespec='seconds')} by {cancelled.actor}: "
        f"{cancelled.reason}",
    }


def _repriced_row(each: RepricedUsage) -> dict[str, Any]:
    return {
        "model": each.model,
        "requests": each.requests,
        "charged": format_usd(each.charged_nanos),
        "would_be": format_usd(each.repriced_nanos),
        "difference": format_usd(each.difference_nanos),
        "not_priced": each.unpriced_requests,
        "not_priced_charged": format_usd(each.unpriced_nanos),
    }
