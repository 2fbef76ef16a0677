"""Invoices and credit notes: list, credit, print."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, TypedDict

from pydantic import Field
from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.billing.statements.close import NOTE_REASON_MAX, credit_note
from gateway.billing.statements.statement import Invoice, Statement, invoices_of
from gateway.checks.moments import timestamp
from gateway.errors import NotFound
from gateway.operations.accounts import owner_id
from gateway.operations.bodies import Body, UsdAmount
from gateway.operations.refusals import refusals, sentence
from gateway.pricing import NANOS_PER_CENT, format_usd
from gateway.settings import Settings

PAGE_FORMATS: Final = ("html", "pdf")


class CreditNoteBody(Body):
    amount: UsdAmount
    reason: Annotated[str, Field(min_length=1, max_length=NOTE_REASON_MAX)]


class InvoiceView(TypedDict):
    """An invoice or a credit note."""

    object: str
    number: str
    month: str
    total: str
    issued_at: str
    corrects: str | None
    reason: str | None


def list_all(connection: Connection, account: str | None) -> list[InvoiceView]:
    """List invoices and credit notes, of one account or of all."""
    return [invoice_view(each) for each in invoices_of(connection, owner_id(connection, account))]


@refusals(param="amount")
def credit(
    connection: Connection, author: Author, number: str, body: CreditNoteBody
) -> InvoiceView:
    """Write a credit note, which gives back part of an invoice."""
    try:
        note = credit_note(connection, number, body.amount, actor=author.name, reason=body.reason)
    except LookupError as error:
        raise NotFound("invoice_not_found", sentence(error)) from None
    view = invoice_view(note)
    record(
        connection,
        author,
        "invoice.credit",
        f"invoice {number}",
        account_id=note.account_id,
        after=view,
        reason=body.reason,
    )
    return view


def page(made: Statement, settings: Settings, format: str) -> bytes:
    """Return a statement for printing, in one of ``PAGE_FORMATS``."""
    # Imported here: fonts and templates are needed for printing only.
    from gateway.billing.statements.pages import Issuer, html, lay_out, pdf

    issuer = Issuer(settings.issuer_name, settings.issuer_address, settings.issuer_note)
    laid_out = lay_out(made, issuer)
    if format == "html":
        return html(laid_out).encode()
    return pdf(laid_out, at=made.invoice.issued_at if made.invoice else datetime.now(UTC))


def invoice_view(invoice: Invoice) -> InvoiceView:
    return {
        "object": invoice.kind,
        "number": invoice.number,
        "month": invoice.month,
        "total": format_usd(invoice.total_cents * NANOS_PER_CENT),
        "issued_at": timestamp(invoice.issued_at),
        "corrects": invoice.corrects,
        "reason": invoice.reason or None,
    }
