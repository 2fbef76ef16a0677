"""``tollgate organisation``: accounts grouped under a parent, with their budgets and statements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from gateway.commands.limits import (
    account_argument,
    model_option,
    purpose_option,
    soft_option,
    window_option,
)
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
    print_json,
    print_page,
    print_views,
    read_body,
    read_settings,
    refuse,
)
from gateway.operations import budgets, organisations
from gateway.operations.budgets import OrganisationBudgetBody
from gateway.operations.organisations import (
    FORMATS,
    OrganisationBody,
    encode_statement,
    organisation_statement_view,
)

ORGANISATION: Final = columns("id name created_at")
BUDGET: Final = columns(
    "id organisation model name window tz hard limit spent held remaining allotted unallotted"
)
STATEMENT: Final = columns("account draft opening_balance closing_balance sum total")

organisation_argument = click.argument("found", metavar="ORGANISATION")


@click.group()
def organisation() -> None:
    """Organisations: accounts grouped under a parent, with budgets and statements of all."""


@organisation.command("create", epilog=example("tollgate organisation create acme-group"))
@click.argument("name")
@audit_reason_option
@actor_option
@json_option
def organisation_create(as_json: bool, **entered: Any) -> None:
    """Create an organisation without accounts."""
    made = perform(organisations.create, read_body(OrganisationBody, entered))
    print_views([made], ORGANISATION, as_json)


@organisation.command("list", epilog=example("tollgate organisation list"))
@page_options
@json_option
def organisation_list(as_json: bool, **entered: Any) -> None:
    """List organisations, in order of their numbers."""
    print_page(look_up(organisations.list_page, **entered), ORGANISATION, as_json)


@organisation.command("show", epilog=example("tollgate organisation show acme-group"))
@organisation_argument
@json_option
def organisation_show(found: str, as_json: bool) -> None:
    """Print an organisation with its accounts, their balances, and its budgets."""
    print_views([look_up(organisations.show, found)], _shown, as_json)


@organisation.command(
    "set", epilog=example("tollgate organisation set acme-group --name acme-holding")
)
@organisation_argument
@click.option("--name", required=True, help="New name.")
@audit_reason_option
@actor_option
@json_option
def organisation_set(found: str, as_json: bool, **entered: Any) -> None:
    """Rename an organisation."""
    changed = perform(organisations.rename, found, read_body(OrganisationBody, entered))
    print_views([changed], ORGANISATION, as_json)


@organisation.command("add", epilog=example("tollgate organisation add acme-group acme"))
@organisation_argument
@account_argument
@audit_reason_option
@actor_option
@json_option
def organisation_add(found: str, account: str, as_json: bool) -> None:
    """Add an account. Its requests count in the organisation's budgets from now on."""
    print_views([perform(organisations.add, found, account)], _shown, as_json)


@organisation.command("remove", epilog=example("tollgate organisation remove acme-group acme"))
@organisation_argument
@account_argument
@audit_reason_option
@actor_option
@json_option
def organisation_remove(found: str, account: str, as_json: bool) -> None:
    """Remove an account. Its running requests count until they end."""
    print_views([perform(organisations.remove, found, account)], _shown, as_json)


@organisation.command(
    "budget", epilog=example("tollgate organisation budget acme-group 500 --window month")
)
@organisation_argument
@click.argument("limit", type=Usd(), metavar="USD")
@window_option
@model_option
@soft_option
@click.option(
    "--overallot", is_flag=True, help="Let the budgets of its accounts sum to more than this one."
)
@click.option("--tz", metavar="ZONE", help="Time zone of its days.  [default: UTC]")
@purpose_option
@audit_reason_option
@actor_option
@json_option
def organisation_budget(found: str, soft: bool, as_json: bool, **entered: Any) -> None:
    """Create a budget of all accounts together. `tollgate budget` changes and ends it."""
    body = read_body(OrganisationBudgetBody, entered | {"hard": not soft})
    made = perform(budgets.create_for_organisation, found, body)
    print_views([made], BUDGET, as_json)


@organisation.command(
    "statement",
    epilog=example(
        "tollgate organisation statement acme-group 2026-11",
        "tollgate organisation statement acme-group 2026-11 -o november.pdf",
    ),
)
@organisation_argument
@click.argument("month", metavar="YYYY-MM")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, .csv, .html or .pdf.",
)
@json_option
def organisation_statement(found: str, month: str, output: Path | None, as_json: bool) -> None:
    """Print or write the statements of a month of all accounts."""
    made = look_up(organisations.statement_of, found, month)
    if output is None:
        view = organisation_statement_view(made)
        if as_json:
            print_json(view)
            return
        whole = {**view, "account": "total"}
        print_views([*view["accounts"], whole], STATEMENT, as_json)
        return
    for format in FORMATS:
        if output.suffix == f".{format}":
            output.write_bytes(encode_statement(made, read_settings(), format))
            return
    refuse(f"{output} must end in .csv, .html or .pdf", status=2)


def _shown(view: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": view["id"],
        "name": view["name"],
        "accounts": [each["name"] for each in view["accounts"]],
        "posted": view["posted"],
        "held": view["held"],
        "available": view["available"],
        "budgets": [
            f"{each['id']}: {each['spent']} of {each['limit']} per {each['window']}, "
            f"{each['unallotted']} unallotted"
            for each in view["budgets"]
        ],
    }
