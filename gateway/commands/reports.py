"""``tollgate usage``, ``export``, ``ledger`` and ``reconcile``: usage and ledger."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.accounts.accounts import find_account
from gateway.archive.marks import archived_months, refuse_archived
from gateway.billing.entries import LedgerEntry, entries
from gateway.billing.exports.footer import Footer, Format, Profile, encode_footer
from gateway.billing.reconciliation import check_books
from gateway.billing.usage.report import Filters, Group, read_dimensions, read_span, total, usage
from gateway.commands.terminal import (
    actor_option,
    audit_reason_option,
    example,
    json_option,
    perform,
    print_rows,
    snapshot,
)
from gateway.operations import periods
from gateway.pricing import format_usd


@click.command(
    "usage",
    epilog=example("tollgate usage acme --from 2026-11-01 --to 2026-11-30 --group-by day,model"),
)
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
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
    first: str | None,
    last: str | None,
    group_by: str,
    tz: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Sum usage and cost, of one account or of all."""
    by = read_dimensions(group_by, accounts=account_name is None)
    with snapshot() as connection:
        owner = find_account(connection, account_name) if account_name else None
        zone = tz or (owner.report_tz if owner else "UTC")
        span = read_span(first, last, zone, now=datetime.now(UTC))
        filters = Filters(
            account_ids=(owner.id,) if owner else None, models=(model,) if model else None
        )
        groups = usage(connection, span, by, filters)
    whole = total(groups)
    whole.labels = {name: "total" if name == by[0] else "" for name in by}
    print_rows([*groups, whole], _usage_row, as_json)


@click.command(
    "export",
    epilog=example("tollgate export acme --from 2026-11-01 --to 2026-11-30 -o november.csv"),
)
@click.argument("account_name", metavar="ACCOUNT")
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
def export_command(
    account_name: str,
    first: str | None,
    last: str | None,
    tz: str | None,
    format: Format,
    profile: Profile,
    output: Path,
) -> None:
    """Write every charge and refund of an account to a file, and its footer to another."""
    # Imported here because importing pyarrow takes long, and no other command needs it.
    from gateway.billing.exports.files import export
    from gateway.billing.exports.pages import connection_reader

    footer = Footer()
    with snapshot() as connection, open(output, "wb") as file:
        owner = find_account(connection, account_name)
        span = read_span(first, last, tz or owner.report_tz, now=datetime.now(UTC))
        refuse_archived(
            archived_months(connection, booked=(span.starts_at, span.ends_at)), "an export"
        )
        parts = export(
            connection_reader(connection),
            span,
            Filters((owner.id,)),
            format=format,
            profile=profile,
            footer=footer,
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
    "reconcile", epilog=example("tollgate reconcile --json", "tollgate reconcile --rebuild")
)
@click.option("--rebuild", "rebuild_sums", is_flag=True, help="Rebuild the hourly sums first.")
@audit_reason_option
@actor_option
@json_option
def reconcile_command(rebuild_sums: bool, as_json: bool) -> None:
    """Reconcile the ledger and report what differs; exit with 1 if anything does."""
    differing = []
    if rebuild_sums:
        differing = perform(periods.rebuild_rollups)
    with snapshot() as connection:
        findings = check_books(connection, now=datetime.now(UTC))
    if as_json:
        click.echo(msgspec.json.encode([asdict(finding) for finding in findings]).decode())
    else:
        if rebuild_sums and not differing:
            click.echo("the rebuilt hourly sums are identical")
        for old, new in differing:
            click.echo(f"hour {old.hour:%Y-%m-%dT%H:%MZ} was {old.sha256} and is {new.sha256}")
        for finding in findings:
            click.echo(str(finding))
        if not findings:
            click.echo("the ledger is consistent")
    if findings or differing:
        raise SystemExit(1)


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
