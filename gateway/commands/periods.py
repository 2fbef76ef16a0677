"""``tollgate period``, ``invoice`` and ``rebate``: accounting months, invoices, discounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from gateway.accounts.accounts import find_account
from gateway.billing.statements.statement import statement
from gateway.commands.terminal import (
    Usd,
    actor_option,
    audit_reason_option,
    columns,
    command_author,
    example,
    json_option,
    look_up,
    open_database,
    page_options,
    perform,
    print_json,
    print_page,
    print_rows,
    print_views,
    read_body,
    read_settings,
    refuse,
    snapshot,
)
from gateway.operations import invoices, periods
from gateway.operations.invoices import PAGE_FORMATS, CreditNoteBody
from gateway.operations.periods import RebatesView
from gateway.pricing import parse_usd

PERIOD: Final = columns("month state receipts charged transfers sha256")
EXPECTED: Final = columns("account total rebate")
INVOICE: Final = columns("number object month total corrects issued_at reason")


@click.group()
def period() -> None:
    """Accounting months."""


@period.command("list", epilog=example("tollgate period list"))
@json_option
def period_list(as_json: bool) -> None:
    """List months, with the digests of those that are closed."""
    print_views(look_up(periods.list_all), PERIOD, as_json)


@period.command(
    "close",
    epilog=example("tollgate period close 2026-11", "tollgate period close 2026-11 --dry-run"),
)
@click.argument("month", metavar="YYYY-MM")
@click.option("--dry-run", is_flag=True, help="Print its invoices and rebates; write nothing.")
@actor_option
@json_option
def period_close(month: str, dry_run: bool, as_json: bool) -> None:
    """Close a month that has ended: seal it, give rebates, write invoices."""
    if dry_run:
        _rehearse(month, as_json)
        return
    author = command_author()
    with open_database(read_settings()) as database:
        closed = periods.close(database, author, month)
    print_views([closed], PERIOD, as_json)


@period.command("verify", epilog=example("tollgate period verify 2026-11"))
@click.argument("month", metavar="YYYY-MM")
def period_verify(month: str) -> None:
    """Check a closed month against its digest; exit with 1 if it has changed."""
    verified = look_up(periods.verify, month)
    if verified["changed"]:
        refuse(f"{month} has changed since it was closed")
    click.echo(f"{month} has not changed since it was closed")


@click.group()
def invoice() -> None:
    """Invoices and credit notes."""


@invoice.command("list", epilog=example("tollgate invoice list acme"))
@click.argument("account", metavar="[ACCOUNT]", required=False)
@page_options
@json_option
def invoice_list(account: str | None, as_json: bool, **pages: Any) -> None:
    """List invoices and credit notes, of one account or of all, in order of issue."""
    print_page(look_up(invoices.list_page, account, **pages), INVOICE, as_json)


@invoice.command(
    "credit", epilog=example('tollgate invoice credit 2026-000017 2.50 --reason "double order"')
)
@click.argument("number")
@click.argument("amount", type=Usd(), metavar="USD")
@click.option("--reason", required=True, help="Reason, printed on the credit note.")
@actor_option
@json_option
def invoice_credit(number: str, as_json: bool, **entered: Any) -> None:
    """Give back part of an invoice by a credit note."""
    body = read_body(CreditNoteBody, entered)
    made = perform(invoices.credit, number, body)
    print_views([made], INVOICE, as_json)


@invoice.command("print", epilog=example("tollgate invoice print acme 2026-11 -o november.pdf"))
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("month", metavar="YYYY-MM")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, .pdf or .html.",
)
def invoice_print(account_name: str, month: str, output: Path) -> None:
    """Write an account's statement of a month to a file, .pdf or .html."""
    with snapshot() as connection:
        made = statement(connection, find_account(connection, account_name).id, month)
    for format in PAGE_FORMATS:
        if output.suffix == f".{format}":
            output.write_bytes(invoices.page(made, read_settings(), format))
            return
    refuse(f"{output} must end in .pdf or .html", status=2)


@click.group()
def rebate() -> None:
    """Volume discounts, credited when a month is closed."""


@rebate.command("list", epilog=example("tollgate rebate list"))
@json_option
def rebate_list(as_json: bool) -> None:
    """List the tiers of all accounts, and of those with their own."""
    print_views(look_up(periods.list_rebates), _rebates_row, as_json)


@rebate.command(
    "set", epilog=example("tollgate rebate set acme 1000=5 10000=7.5", "tollgate rebate set all")
)
@click.argument("account_name", metavar="ACCOUNT|all")
@click.argument("tiers", nargs=-1, metavar="[USD=PERCENT]...")
@audit_reason_option
@actor_option
def rebate_set(account_name: str, tiers: tuple[str, ...]) -> None:
    """Replace the tiers: the percentage credited of a month's spending beyond an amount."""
    read = dict(_tier(text) for text in tiers)
    if len(read) < len(tiers):
        raise ValueError("two tiers start at the same amount")
    perform(periods.set_tiers, None if account_name == "all" else account_name, read)
    click.echo(f"{len(read)} tiers")


def _tier(text: str) -> tuple[int, int]:
    start, _, percent = text.partition("=")
    try:
        from_nanos, points = parse_usd(start), parse_usd(percent) * 100
    except ValueError:
        points = -1
    if points < 0 or points % 10**9:
        raise ValueError(
            f"{text!r} is not a valid tier; write USD=PERCENT, such as 1000=7.5, "
            "with at most two decimals of a percent"
        )
    return from_nanos, points // 10**9


def _rebates_row(view: RebatesView) -> dict[str, Any]:
    tiers = [f"{tier['percent']} % from ${tier['from']}" for tier in view["tiers"]]
    return {"account": view["account"] or view["account_id"] or "all", "tiers": tiers}


def _rehearse(month: str, as_json: bool) -> None:
    made = look_up(periods.rehearse, month)
    if as_json:
        print_json(made)
        return
    print_rows(made["invoices"], EXPECTED, False)
    click.echo(
        f"{month}: {made['receipts']} receipts, ${made['charged']} charged, "
        f"{len(made['invoices'])} invoices; nothing was written"
    )
    if made["obstacle"] is not None:
        click.echo(f"note: {made['obstacle']}", err=True)
