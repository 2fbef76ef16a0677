"""``tollgate catalog price`` and ``catalog whatif``: set and list prices, try them on the past."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from gateway.billing.usage.report import read_span
from gateway.catalog.document import Document, Unreadable
from gateway.catalog.loader import load_catalog
from gateway.catalog.price_overrides import read_prices
from gateway.catalog.schema import CatalogEntry
from gateway.commands.terminal import (
    actor_option,
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
    refuse,
    snapshot,
)
from gateway.operations import prices
from gateway.operations.prices import PriceBody, PriceCancelBody, PriceView
from workers.contract.blobs import Blobs

REPRICED = columns("model requests charged would_be difference not_priced not_priced_charged")
account_option = click.option(
    "--account", help="Account with its own price.  [default: list price]"
)
reason_option = click.option("--reason", required=True, help="Reason, recorded with the price.")
from_option = click.option(
    "--from", help="Start of the price, with offset.  [default: in 10 seconds]"
)


@click.group()
def price() -> None:
    """Prices: of the list, and of single accounts."""


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
    "--component",
    "components",
    multiple=True,
    help='"UNIT AMOUNT [PER]": price of one unit in USD; once for each unit.',
)
@click.option("--minimum", help="Minimum charge of a request, in USD.")
@click.option(
    "--file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="YAML with `price` and `minimum` as in the catalog; can have conditions (`when`).",
)
@account_option
@from_option
@reason_option
@actor_option
@json_option
def price_set(
    components: tuple[str, ...], file: Path | None, as_json: bool, **entered: Any
) -> None:
    """Put a price in force, for all accounts or for one."""
    if (file is None) == (not components):
        raise click.UsageError("give either --component or --file")
    offer = (
        {"price": [read_component(text) for text in components]} if file is None else _offer(file)
    )
    body = read_body(
        PriceBody,
        {**entered, "minimum": entered["minimum"] or offer.get("minimum"), "price": offer["price"]},
    )
    made = prices.read(_entry(body.model), body.price, body.minimum)
    print_views([perform(prices.put, body, made)], _row, as_json)


@price.command(
    "end", epilog=example("tollgate catalog price end pocket-chat --account acme --reason expired")
)
@click.argument("model")
@click.option("--account", required=True, help="Account whose own price ends.")
@from_option
@reason_option
@actor_option
@json_option
def price_end(as_json: bool, **entered: Any) -> None:
    """End an account's own price; the list price applies again."""
    body = read_body(PriceBody, entered)
    print_views([perform(prices.put, body, None)], _row, as_json)


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
@click.option("--from", required=True, help="Start of the price, with offset.")
@reason_option
@actor_option
@json_option
def price_cancel(as_json: bool, **entered: Any) -> None:
    """Cancel a price, or the end of one, that begins more than 10 seconds from now."""
    body = read_body(PriceCancelBody, entered)
    print_views([perform(prices.cancel, body, cache={})], _row, as_json)


@price.command("list", epilog=example("tollgate catalog price list pocket-chat --account acme"))
@click.argument("model", required=False)
@account_option
@page_options
@json_option
def price_list(as_json: bool, **entered: Any) -> None:
    """List prices that were, are or will be in force, or were cancelled."""
    print_page(look_up(prices.list_page, **entered, cache={}), _row, as_json)


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
    help="Other prices: a catalog file, or YAML with `prices: {model: {price: […]}}`.",
)
@click.option("--account", help="Only the usage of this account.")
@click.option("--tz", default="UTC", show_default=True, help="Time zone of the days.")
@json_option
def whatif_command(
    first: str, last: str, file: Path, account: str | None, tz: str, as_json: bool
) -> None:
    """Compute what past usage would have cost at other prices; nothing is changed."""
    offered = read_prices(file)
    span = read_span(first, last, tz, now=datetime.now(UTC))
    with snapshot() as connection:
        found = prices.what_if(
            connection, offered, span, account=account, blobs=Blobs(read_settings().blobs)
        )
    print_views([*found["data"], found["total"]], REPRICED, as_json)


def _offer(file: Path) -> dict[str, Any]:
    try:
        value = Document(file.read_text()).value
    except (Unreadable, UnicodeDecodeError) as error:
        refuse(f"{file} is not valid YAML: {error}")
    offer = value if isinstance(value, dict) else {"price": value}
    if offer.get("price") is None or (set(offer) - {"price", "minimum"}):
        refuse(f"{file} must have `price`, and can have `minimum`, and nothing else")
    return offer


def read_component(text: str) -> dict[str, Any]:
    unit, amount, *per = text.split() if len(text.split()) > 1 else ("", "", "x")
    if len(per) > 1 or not all(re.fullmatch("[1-9][0-9]{0,9}", part) for part in per):
        refuse(f'{text!r} is not a valid component; write "UNIT AMOUNT [PER]"', status=2)
    return {"unit": unit, "amount": amount} | ({"per": int(per[0])} if per else {})


def _entry(model: str) -> CatalogEntry:
    entries = {entry.name: entry for entry in load_catalog(read_settings().catalog).models}
    if model not in entries:
        refuse(f"the catalog has no model {model!r}")
    return entries[model]


def price_line(unit: str, amount: str, per: int, when: Mapping[str, str] | None = None) -> str:
    number = f" {per}" if per > 1 else ""
    conditions = "".join(f" {name}={value}" for name, value in (when or {}).items())
    return f"${amount} per{number} {unit}{conditions}"


def _row(view: PriceView) -> dict[str, Any]:
    parts, cancelled = view["price"], view["cancelled"]
    return {
        "model": view["model"],
        "account": view["account_id"] or "all",
        "from": view["from"],
        "price": [price_line(**part) for part in parts] if parts else "the list price",
        "minimum": view["minimum"],
        "source": view["source"],
        "actor": view["actor"],
        "reason": view["reason"],
        "cancelled": cancelled and "{at} by {actor}: {reason}".format(**cancelled),
    }
