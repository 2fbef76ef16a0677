"""``tollgate period``, ``invoice`` and ``rebate``: months, their invoices, and discounts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from gateway.accounts.accounts import find_account
from gateway.billing.statements.close import (
    ALL_ACCOUNTS,
    BillingPeriod,
    ExpectedInvoice,
    changed_since_close,
    close_month,
    credit_note,
    list_periods,
    rehearse_close,
    set_rebates,
)
from gateway.billing.statements.statement import Invoice, invoices_of, statement
from gateway.commands.terminal import (
    Usd,
    example,
    json_option,
    open_database,
    print_rows,
    read_settings,
    refuse,
    snapshot,
    transaction,
)
from gateway.pricing import NANOS_PER_CENT, format_usd, parse_usd

actor_option = click.option("--actor", default="operator", show_default=True, help="Who does it.")


@click.group()
def period() -> None:
    """Months of the books."""


@period.command("list", epilog=example("tollgate period list"))
@json_option
def period_list(as_json: bool) -> None:
    """List months, with the seals of those that are closed."""
    with snapshot() as connection:
        found = list_periods(connection)
    print_rows(found, _period_row, as_json)


@period.command(
    "close",
    epilog=example("tollgate period close 2026-11", "tollgate period close 2026-11 --dry-run"),
)
@click.argument("month", metavar="YYYY-MM")
@click.option("--dry-run", is_flag=True, help="Show its invoices and rebates, and write nothing.")
@actor_option
@json_option
def period_close(month: str, dry_run: bool, actor: str, as_json: bool) -> None:
    """Close a month that has ended: seal it, give rebates, write invoices."""
    if dry_run:
        with snapshot() as connection:
            rehearsal = rehearse_close(connection, month, now=datetime.now(UTC))
        print_rows(rehearsal.invoices, _expected_row, as_json)
        if not as_json:
            found = rehearsal.period
            click.echo(
                f"{month}: {found.receipts} receipts, ${format_usd(found.charge_nanos or 0)} "
                f"charged, {len(rehearsal.invoices)} invoices; nothing was written"
            )
        if rehearsal.obstacle is not None:
            click.echo(f"note: {rehearsal.obstacle}", err=True)
        return
    with open_database(read_settings()) as database:
        closed = close_month(database, month, actor=actor)
    print_rows([closed], _period_row, as_json)


@period.command("verify", epilog=example("tollgate period verify 2026-11"))
@click.argument("month", metavar="YYYY-MM")
def period_verify(month: str) -> None:
    """Say whether anything in a closed month has changed; exit with 1 if so."""
    with snapshot() as connection:
        changed = changed_since_close(connection, month)
    if changed:
        refuse(f"{month} is not as it was when it was closed")
    click.echo(f"{month} is as it was when it was closed")


@click.group()
def invoice() -> None:
    """Invoices and credit notes."""


@invoice.command("list", epilog=example("tollgate invoice list acme"))
@click.argument("account_name", metavar="[ACCOUNT]", required=False)
@json_option
def invoice_list(account_name: str | None, as_json: bool) -> None:
    """List what was issued, to one account or to all."""
    with snapshot() as connection:
        owner = find_account(connection, account_name).id if account_name else None
        found = invoices_of(connection, owner)
    print_rows(found, _invoice_row, as_json)


@invoice.command(
    "credit", epilog=example('tollgate invoice credit 2026-000017 2.50 --reason "double order"')
)
@click.argument("number")
@click.argument("amount", type=Usd(), metavar="USD")
@click.option("--reason", required=True, help="Why; it stands on the credit note.")
@actor_option
@json_option
def invoice_credit(number: str, amount: int, reason: str, actor: str, as_json: bool) -> None:
    """Mend an invoice by a credit note."""
    with transaction() as connection:
        made = credit_note(connection, number, amount, actor=actor, reason=reason)
    print_rows([made], _invoice_row, as_json)


@invoice.command("print", epilog=example("tollgate invoice print acme 2026-11 -o november.pdf"))
@click.argument("account_name", metavar="ACCOUNT")
@click.argument("month", metavar="YYYY-MM")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False))
def invoice_print(account_name: str, month: str, output: Path) -> None:
    """Write an account's statement of a month to a file, .pdf or .html."""
    # Fonts and templates: no other command needs them.
    from gateway.billing.statements.pages import Issuer, html, lay_out, pdf

    settings = read_settings()
    with snapshot() as connection:
        made = statement(connection, find_account(connection, account_name).id, month)
    issuer = Issuer(settings.issuer_name, settings.issuer_address, settings.issuer_note)
    page = lay_out(made, issuer)
    if output.suffix == ".html":
        output.write_text(html(page))
    elif output.suffix == ".pdf":
        output.write_bytes(
            pdf(page, at=made.invoice.issued_at if made.invoice else datetime.now(UTC))
        )
    else:
        refuse(f"{output} must end in .pdf or .html", status=2)


@click.group()
def rebate() -> None:
    """Volume discounts, given back when a month is closed."""


@rebate.command(
    "set", epilog=example("tollgate rebate set acme 1000=5 10000=7.5", "tollgate rebate set all")
)
@click.argument("account_name", metavar="ACCOUNT|all")
@click.argument("tiers", nargs=-1, metavar="[USD=PERCENT]...")
def rebate_set(account_name: str, tiers: tuple[str, ...]) -> None:
    """Give back so many percent of what a month's spending is beyond an amount; replaces tiers."""
    read = dict(_tier(text) for text in tiers)
    if len(read) < len(tiers):
        raise ValueError("two tiers start at the same amount")
    with transaction() as connection:
        owner = ALL_ACCOUNTS if account_name == "all" else find_account(connection, account_name).id
        set_rebates(connection, owner, read)
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


def _period_row(found: BillingPeriod) -> dict[str, Any]:
    charged = found.charge_nanos
    return {
        "month": found.month,
        "state": found.state,
        "receipts": found.receipts,
        "charged": None if charged is None else format_usd(charged),
        "transfers": found.transfers,
        "sha256": found.sha256,
    }


def _expected_row(expected: ExpectedInvoice) -> dict[str, Any]:
    return {
        "account": expected.account,
        "total": format_usd(expected.total_cents * NANOS_PER_CENT),
        "rebate": format_usd(expected.rebate_nanos),
    }


def _invoice_row(found: Invoice) -> dict[str, Any]:
    return {
        "number": found.number,
        "kind": found.kind,
        "month": found.month,
        "total": format_usd(found.total_cents * NANOS_PER_CENT),
        "corrects": found.corrects,
        "issued_at": found.issued_at.isoformat(timespec="seconds"),
        "reason": found.reason,
    }
