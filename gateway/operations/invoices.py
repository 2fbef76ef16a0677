"""Statements, invoices and credit notes: list, credit, print."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypedDict

from pydantic import Field
from sqlalchemy import Connection, select

from gateway.audit_log import Author, record
from gateway.billing.statements.close import NOTE_REASON_MAX, credit_note
from gateway.billing.statements.organisation import OrganisationStatement
from gateway.billing.statements.statement import Invoice, Statement, invoices_of
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.operations.accounts import owner_id
from gateway.operations.bodies import Body, UsdAmount
from gateway.operations.refusals import refusals, sentence
from gateway.pricing import NANOS_PER_CENT, format_usd
from gateway.settings import Settings
from gateway.tables.invoices import invoices

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


class StatementLineView(TypedDict):
    kind: str
    model: str | None
    unit: str | None
    quantity: int | str | None
    description: str | None
    amount: str


class MovementView(TypedDict):
    booked_at: str
    kind: str
    amount: str
    reason: str


class StatementView(TypedDict):
    """The statement of a month; a draft while the month is open."""

    object: Literal["statement"]
    account: str
    month: str
    draft: bool
    invoice: InvoiceView | None
    credit_notes: list[InvoiceView]
    opening_balance: str
    closing_balance: str
    lines: list[StatementLineView]
    sum: str
    carried_in: str
    carried_out: str
    total: str
    payments: list[MovementView]


def list_page(
    connection: Connection, account: str | None, *, limit: int, cursor: str | None
) -> tuple[list[InvoiceView], str | None]:
    """List invoices and credit notes of one account or of all in order of issue, and return the
    number after which the next page begins."""
    after = 0 if cursor is None else _id_of(connection, cursor)
    found = invoices_of(connection, owner_id(connection, account), limit=limit + 1, after=after)
    more = found[limit - 1].number if len(found) > limit else None
    return [invoice_view(each) for each in found[:limit]], more


def _id_of(connection: Connection, number: str) -> int:
    id = connection.execute(select(invoices.c.id).where(invoices.c.number == number)).scalar()
    if id is None:
        raise InvalidRequest(
            "invalid_value", f"{number!r} is not the number of an invoice.", param="cursor"
        )
    return int(id)


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


def page(made: Statement | OrganisationStatement, settings: Settings, format: str) -> bytes:
    """Return a statement for printing, in one of ``PAGE_FORMATS``."""
    # Imported here: fonts and templates are needed for printing only.
    from gateway.billing.statements.pages import Issuer, html, lay_out, lay_out_organisation, pdf

    issuer = Issuer(settings.issuer_name, settings.issuer_address, settings.issuer_note)
    if isinstance(made, Statement):
        laid_out, issued = lay_out(made, issuer), [made.invoice]
    else:
        laid_out = lay_out_organisation(made, issuer)
        issued = [each.invoice for each in made.accounts]
    if format == "html":
        return html(laid_out).encode()
    at = None if laid_out.draft else max(each.issued_at for each in issued if each is not None)
    return pdf(laid_out, at=at or datetime.now(UTC))


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


def statement_view(made: Statement) -> StatementView:
    return {
        "object": "statement",
        "account": made.account,
        "month": made.month,
        "draft": made.invoice is None,
        "invoice": invoice_view(made.invoice) if made.invoice else None,
        "credit_notes": [invoice_view(each) for each in made.credit_notes],
        "opening_balance": format_usd(made.opening_nanos),
        "closing_balance": format_usd(made.closing_nanos),
        "lines": [
            {
                "kind": line.kind,
                "model": line.model,
                "unit": line.unit,
                "quantity": line.quantity,
                "description": line.description or None,
                "amount": format_usd(line.amount_nanos),
            }
            for line in made.lines
        ],
        "sum": format_usd(made.sum_nanos),
        "carried_in": format_usd(made.carried_in_nanos),
        "carried_out": format_usd(made.carried_out_nanos),
        "total": format_usd(made.total_cents * NANOS_PER_CENT),
        "payments": [
            {
                "booked_at": timestamp(each.booked_at),
                "kind": each.kind,
                "amount": format_usd(each.amount_nanos),
                "reason": each.reason,
            }
            for each in made.movements
        ],
    }
