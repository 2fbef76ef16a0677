"""``tollgate usage``, ``export``, ``ledger`` and ``reconcile``: usage and ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from sqlalchemy import Connection

from gateway.accounts.accounts import account_names, find_account
from gateway.billing.entries import LedgerEntry, entries
from gateway.billing.exports.footer import Footer, Format, Profile, encode_footer
from gateway.billing.reconciliation import prove_here, run_reconciliation
from gateway.billing.usage.archived import add_archived
from gateway.billing.usage.margins import margin_views, ratings_of
from gateway.billing.usage.report import (
    Filters,
    Group,
    UsageSums,
    read_dimensions,
    read_span,
    stored_usage,
    total,
)
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    command_author,
    example,
    json_option,
    open_database,
    print_json,
    print_rows,
    read_settings,
    snapshot,
)
from gateway.operations import periods
from gateway.operations.organisations import account_ids
from gateway.pricing import format_usd
from workers.contract.blobs import Blobs

organisation_option = click.option("--organisation", help="Only accounts of this organisation.")


class Owners(NamedTuple):
    """Accounts of a report, or None for all, and the default time zone of its days."""

    account_ids: tuple[int, ...] | None
    zone: str


def find_owners(connection: Connection, account: str | None, organisation: str | None) -> Owners:
    """Find the accounts that a report is about."""
    if account is not None and organisation is not None:
        raise click.UsageError("name an account or an organisation, not both")
    if organisation is not None:
        return Owners(tuple(account_ids(connection, organisation)), "UTC")
    if account is not None:
        owner = find_account(connection, account)
        return Owners((owner.id,), owner.report_tz)
    return Owners(None, "UTC")


@click.command(
    "usage",
    epilog=example(
        "tollgate usage acme --from 2026-11-01 --to 2026-11-30 --group-by day,model",
        "tollgate usage --organisation acme-group --group-by account",
    ),
)
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@organisation_option
@click.option("--from", "first", help="First day, or a moment with its offset.")
@click.option("--to", "last", help="Last day (included), or a moment (excluded).")
@click.option(
    "--group-by", default="model", show_default=True, help="Dimensions, separated by commas."
)
@click.option("--tz", help="Time zone of the days.  [default: the account's]")
@click.option("--model", help="Only the usage of this model.")
@json_option
def usage_command(
    account_name: str | None,
    organisation: str | None,
    first: str | None,
    last: str | None,
    group_by: str,
    tz: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Sum usage and cost, of one account or organisation, or of all."""
    by = read_dimensions(group_by, accounts=account_name is None, margins=True)

    def read(connection: Connection) -> UsageSums:
        owner = find_owners(connection, account_name, organisation)
        span = read_span(first, last, tz or owner.zone, now=datetime.now(UTC))
        filters = Filters(account_ids=owner.account_ids, models=(model,) if model else None)
        return stored_usage(connection, span, by, filters)

    groups = _usage(read).groups
    whole = total(groups)
    whole.labels = {name: "total" if name == by[0] else "" for name in by}
    print_rows([*groups, whole], _usage_row, as_json)


@click.command("margin", epilog=example("tollgate margin --group-by model,device"))
@click.option("--from", "first", help="First day, or a moment with its offset.")
@click.option("--to", "last", help="Last day (included), or a moment (excluded).")
@click.option(
    "--group-by",
    default="model",
    show_default=True,
    help="Dimensions, separated by commas: model, served_by, endpoint, device, dtype, account, "
    "key, task, day, month.",
)
@click.option("--tz", default="UTC", show_default=True, help="Time zone of the days.")
@click.option("--model", help="Only this model.")
@json_option
def margin_command(
    first: str | None, last: str | None, group_by: str, tz: str, model: str | None, as_json: bool
) -> None:
    """Sum what requests earned and what they cost, by model, device, day or account."""
    by = read_dimensions(group_by, accounts=True, margins=True)

    def read(connection: Connection) -> UsageSums:
        span = read_span(first, last, tz, now=datetime.now(UTC))
        return stored_usage(connection, span, by, Filters(models=(model,) if model else None))

    report = _usage(read)
    with snapshot() as connection:
        groups, whole = margin_views(report, ratings_of(connection, report))
    labels = {name: "total" if name == by[0] else "" for name in by}
    print_rows([*groups, {**labels, **whole}], dict, as_json)


@click.command(
    "export",
    epilog=example("tollgate export acme --from 2026-11-01 --to 2026-11-30 -o november.csv"),
)
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@organisation_option
@click.option("--from", "first", help="First day, or a moment with its offset.")
@click.option("--to", "last", help="Last day (included), or a moment (excluded).")
@click.option("--tz", help="Time zone of days and local times.  [default: the account's]")
@click.option("--format", type=click.Choice(["csv", "parquet"]), default="csv", show_default=True)
@click.option(
    "--profile", type=click.Choice(["native", "focus"]), default="native", show_default=True
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.",
)
@click.option(
    "--margins", is_flag=True, help="Add what each request cost the operator, and its margin."
)
def export_command(
    account_name: str | None,
    organisation: str | None,
    first: str | None,
    last: str | None,
    tz: str | None,
    format: Format,
    profile: Profile,
    output: Path,
    margins: bool,
) -> None:
    """Write every charge and refund of an account or organisation to a file, and its footer to
    another."""
    if account_name is None and organisation is None:
        raise click.UsageError("name an account or an organisation")
    # Imported here because importing pyarrow takes long, and no other command needs it.
    from gateway.billing.exports.files import export
    from gateway.billing.exports.pages import connection_reader

    footer = Footer()
    with snapshot() as connection, open(output, "wb") as file:
        owner = find_owners(connection, account_name, organisation)
        span = read_span(first, last, tz or owner.zone, now=datetime.now(UTC))
        parts = export(
            connection_reader(connection),
            span,
            Filters(owner.account_ids),
            format=format,
            profile=profile,
            footer=footer,
            margins=margins,
            blobs=Blobs(read_settings().blobs),
        )
        for part in parts:
            file.write(part)
    beside = output.with_name(f"{output.name}.footer.json")
    beside.write_bytes(encode_footer(footer))
    click.echo(f"{output}: {footer.rows} rows, ${format_usd(footer.amount_nanos)}; see {beside}")


@click.command("ledger", epilog=example("tollgate ledger acme --limit 50"))
@click.argument("account_name", metavar="ACCOUNT")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of rows."
)
@click.option("--kind", help="Only movements of this kind, such as topup.")
@json_option
def ledger_command(account_name: str, limit: int, kind: str | None, as_json: bool) -> None:
    """List the movements of an account's balance, newest first."""
    with snapshot() as connection:
        owner = find_account(connection, account_name)
        found = entries(connection, owner.id, limit=limit, kind=kind)
    print_rows(found, _entry_row, as_json)


@click.command(
    "reconcile", epilog=example("tollgate reconcile --all --json", "tollgate reconcile --rebuild")
)
@click.option("--all", "whole", is_flag=True, help="Read everything, also months that are proven.")
@click.option(
    "--rebuild", "rebuild_sums", is_flag=True, help="Rebuild the sums of hours and days first."
)
@audit_reason_option
@actor_option
@json_option
def reconcile_command(whole: bool, rebuild_sums: bool, as_json: bool) -> None:
    """Reconcile the ledger and report what differs; exit with 1 if anything does.

    Reads the open month, compares the seals of the closed ones, and reads the rows of one of them
    in turn.
    """
    differing = []
    with open_database(read_settings()) as database:
        if rebuild_sums:
            differing = periods.rebuild_rollups(database, command_author())
        run = run_reconciliation(database, author=command_author(), whole=whole, prove=prove_here)
        findings = asyncio.run(run).findings
    if as_json:
        click.echo(msgspec.json.encode([asdict(finding) for finding in findings]).decode())
    else:
        if rebuild_sums and not differing:
            click.echo("the rebuilt sums of hours and days are identical")
        for each in differing:
            click.echo(f"{each.name} was {each.old_sha256} and is {each.new_sha256}")
        for finding in findings:
            click.echo(str(finding))
        if not findings:
            click.echo("the ledger is consistent")
    if findings or differing:
        raise SystemExit(1)


def _usage(read: Callable[[Connection], UsageSums]) -> UsageSums:
    """Return a report, archived months included."""
    settings = read_settings()
    with open_database(settings) as database:
        with database.snapshot() as connection:
            report = read(connection)
        asyncio.run(add_archived(report, database, Blobs(settings.blobs)))
    return report


@click.group()
def request() -> None:
    """Requests of any account."""


@request.command("show", epilog=example("tollgate request show req_0199… --json"))
@click.argument("request_id", metavar="REQUEST")
@json_option
def request_show(request_id: str, as_json: bool) -> None:
    """Show the receipt of a request, with its account and the operator's cost."""
    # No other report needs the catalog and the views of the API.
    from gateway.api.native.views import margin_view, receipt_view
    from gateway.catalog.loader import load_catalog
    from gateway.requests.lookup import receipt_of

    settings = read_settings()
    catalog = load_catalog(settings.catalog)
    with open_database(settings) as database:
        found = asyncio.run(receipt_of(database, Blobs(settings.blobs), None, request_id, {}))
        with database.snapshot() as connection:
            names = account_names(connection, [found.closed.account_id])
    closed = found.closed
    slo = next((entry.slo for entry in catalog.models if entry.name == closed.model), None)
    returned = sum(refund.amount_nanos for refund in found.refunds)
    view = receipt_view(found, slo)
    view["operator"] = margin_view(closed, returned, catalog.expense_rates(settings.gpu_hour_nanos))
    shown = {"account": names[closed.account_id], **view}
    if as_json:
        print_json(shown)
    else:
        print_rows(list(_receipt_lines(shown)), dict, False)


def _receipt_lines(view: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a receipt: what was done, its price, its time, and what it earned."""
    rows = [(name, view[name]) for name in ("request_id", "account", "model", "task")]
    rows.append(("ordered_as", view.get("ordered_as")))
    rows += [(name, view[name]) for name in ("status", "outcome", "reason", "accepted_at")]
    for line in view["lines"]:
        per = f" per {line['per']}" if line["per"] > 1 else ""
        each = f"{line['quantity']} at ${line['price']}{per} = ${line['amount']}"
        rows.append((line["unit"], each))
    rows += [(name, f"${view[name]}") for name in ("cost", "net_cost", "hold")]
    rows += [(name, f"{value / 1000:.1f} ms") for name, value in _phases(view["timings"])]
    operator = view["operator"]
    rows += [(name, operator[name]) for name in ("worker", "device", "dtype")]
    if "margin" in operator:
        rows.append(("margin", f"${operator['margin']}"))
    for name, value in rows:
        if value not in (None, ""):
            yield {"receipt": name, "value": value}


def _phases(timings: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for name, value in timings.items():
        if name.endswith("_us") and value:
            yield name.removesuffix("_us"), value


def _usage_row(group: Group) -> dict[str, Any]:
    return {
        **group.labels,
        "requests": group.requests,
        "cost": format_usd(group.cost_nanos),
        "refunded": format_usd(group.refund_nanos),
        "net": format_usd(group.cost_nanos - group.refund_nanos),
    }


def _entry_row(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "booked_at": entry.booked_at.isoformat(timespec="seconds"),
        "kind": entry.kind,
        "amount": format_usd(entry.amount_nanos),
        "balance": format_usd(entry.balance_nanos),
        "requests": entry.requests,
        "actor": entry.actor,
        "reason": entry.reason,
    }
