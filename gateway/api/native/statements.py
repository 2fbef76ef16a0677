"""Statements of an account as JSON, HTML and PDF, and the closing of months."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict, TypeVar

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView, json_response
from gateway.api.http.fields import UsdAmount
from gateway.api.http.request import ApiRequest
from gateway.billing.statements.close import (
    BillingPeriod,
    CannotClose,
    Rehearsal,
    changed_since_close,
    close_month,
    credit_note,
    list_periods,
    rehearse_close,
)
from gateway.billing.statements.statement import (
    Invoice,
    Statement,
    invoices_of,
    months_of,
    statement,
)
from gateway.checks.moments import timestamp
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.pricing import NANOS_PER_CENT, format_usd
from gateway.settings import Settings

T = TypeVar("T")

_MONTH = re.compile(r"(20\d\d-(?:0[1-9]|1[0-2]))(?:\.(html|pdf))?")


class CreditNoteBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amount: UsdAmount
    reason: Annotated[str, Field(min_length=1, max_length=400)]


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


class PeriodView(TypedDict):
    object: Literal["period"]
    month: str
    state: str
    closed_at: str | None
    receipts: int | None
    charged: str | None
    transfers: int | None
    sha256: str | None


class RehearsedInvoiceView(TypedDict):
    account: str
    total: str
    rebate: str


class RehearsalView(TypedDict):
    """Dry run of closing a month: what would be written, or the obstacle."""

    object: Literal["period.rehearsal"]
    month: str
    obstacle: str | None
    receipts: int | None
    charged: str
    transfers: int | None
    invoices: list[RehearsedInvoiceView]


class VerifiedView(TypedDict):
    object: Literal["period"]
    month: str
    changed: bool


class StatementSummaryView(TypedDict):
    object: Literal["statement"]
    month: str
    draft: bool
    invoices: list[InvoiceView]


class StatementsController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        "/statements",
        operation_id="ListStatements",
        summary="List months with their invoices and credit notes",
    )
    async def index(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[ListView[StatementSummaryView]]:
        def read(connection: Connection) -> ListView[StatementSummaryView]:
            owner = requested_account(request, connection, account)
            issued = invoices_of(connection, owner.id)
            return {
                "object": "list",
                "data": [
                    {
                        "object": "statement",
                        "month": month,
                        "draft": not any(
                            each.month == month and each.kind == "invoice" for each in issued
                        ),
                        "invoices": [invoice_view(each) for each in issued if each.month == month],
                    }
                    for month in months_of(connection, owner.id)
                ],
            }

        return json_response(await _read(request, read))

    @get(
        "/statements/{month:str}",
        opt={"media": ["text/html", "application/pdf"]},
        operation_id="GetStatement",
        summary="Statement of a month: YYYY-MM, YYYY-MM.html or YYYY-MM.pdf; a draft while open",
    )
    async def show(
        self,
        request: ApiRequest,
        month: FromPath[str],
        account: FromQuery[str | None] = None,
    ) -> Response[StatementView] | Response[bytes]:
        found = _MONTH.fullmatch(month)
        if found is None:
            raise InvalidRequest(
                "invalid_value", f"{month!r} is not a valid month; use YYYY-MM.", param="month"
            )
        name, form = found.groups()

        def read(connection: Connection) -> Statement:
            return statement(connection, requested_account(request, connection, account).id, name)

        made = await _read(request, read)
        if form is None:
            return json_response(statement_view(made))
        data = await asyncio.to_thread(_page, made, request.services.settings, form)
        kind = "text/html; charset=utf-8" if form == "html" else "application/pdf"
        return Response(
            data,
            media_type=kind,
            headers={
                "Content-Disposition": f'inline; filename="statement-{name}.{form}"',
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            },
        )


class AdminPeriodsController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get("/periods", operation_id="ListPeriods", summary="List accounting months and their seals")
    async def index(self, request: ApiRequest) -> Response[ListView[PeriodView]]:
        found = await _read(request, list_periods)
        return json_response({"object": "list", "data": [period_view(each) for each in found]})

    @post(
        "/periods/{month:str}/close",
        status_code=200,
        opt={"errors": [409]},
        operation_id="ClosePeriod",
        summary="Close a past month: seal, rebates, invoices; dry_run writes nothing",
    )
    async def close(
        self,
        request: ApiRequest,
        month: FromPath[str],
        dry_run: FromQuery[bool] = False,
    ) -> Response[PeriodView] | Response[RehearsalView]:
        actor = request.key.prefix
        try:
            if dry_run:
                now = datetime.now(UTC)
                return json_response(
                    rehearsal_view(
                        await request.services.database.slow(
                            lambda connection: rehearse_close(connection, month, now=now)
                        )
                    )
                )
            closed = await asyncio.to_thread(
                close_month, request.services.database, month, actor=actor
            )
        except CannotClose as error:
            raise Conflict("cannot_close", f"{error}.", param="month") from None
        except ValueError as error:
            raise InvalidRequest("invalid_value", f"{error}.", param="month") from None
        return json_response(period_view(closed))

    @get(
        "/periods/{month:str}/verify",
        operation_id="VerifyPeriod",
        summary="Check whether a closed month has changed since it was sealed",
    )
    async def verify(self, request: ApiRequest, month: FromPath[str]) -> Response[VerifiedView]:
        changed = await _read(request, lambda connection: changed_since_close(connection, month))
        return json_response({"object": "period", "month": month, "changed": changed})

    @post(
        "/invoices/{number:str}/credit-notes",
        status_code=201,
        opt={"errors": [409]},
        operation_id="CreateCreditNote",
        summary="Correct an invoice by refunding part of it",
    )
    async def create_note(
        self,
        request: ApiRequest,
        number: FromPath[str],
        data: JSONBody[CreditNoteBody],
    ) -> Response[InvoiceView]:
        actor = request.key.prefix
        try:
            made = await request.services.database.write(
                lambda connection: credit_note(
                    connection, number, data.amount, actor=actor, reason=data.reason
                )
            )
        except LookupError as error:
            raise NotFound("invoice_not_found", f"{error.args[0]}.") from None
        except ValueError as error:
            raise InvalidRequest("invalid_value", f"{error}.", param="amount") from None
        return json_response(invoice_view(made), status=201)


async def _read(request: ApiRequest, function: Callable[[Connection], T]) -> T:
    """Run a query for statements in the slow lane: open months are computed, which takes a while.

    Raise ``NotFound`` for a ``LookupError``.
    """
    try:
        return await request.services.database.long_report(
            function, account_id=request.key.account_id
        )
    except LookupError as error:
        raise NotFound("not_found", f"{error.args[0]}.") from None


def _page(made: Statement, settings: Settings, form: str) -> bytes:
    # Imported late: fonts and templates are needed for pages only.
    from gateway.billing.statements.pages import Issuer, html, lay_out, pdf

    issuer = Issuer(settings.issuer_name, settings.issuer_address, settings.issuer_note)
    page = lay_out(made, issuer)
    if form == "html":
        return html(page).encode()
    return pdf(page, at=made.invoice.issued_at if made.invoice else datetime.now(UTC))


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


def period_view(period: BillingPeriod) -> PeriodView:
    return {
        "object": "period",
        "month": period.month,
        "state": period.state,
        "closed_at": timestamp(period.closed_at) if period.closed_at else None,
        "receipts": period.receipts,
        "charged": None if period.charge_nanos is None else format_usd(period.charge_nanos),
        "transfers": period.transfers,
        "sha256": period.sha256,
    }


def rehearsal_view(rehearsal: Rehearsal) -> RehearsalView:
    """Return what closing a month would write."""
    found = rehearsal.period
    return {
        "object": "period.rehearsal",
        "month": found.month,
        "obstacle": rehearsal.obstacle,
        "receipts": found.receipts,
        "charged": format_usd(found.charge_nanos or 0),
        "transfers": found.transfers,
        "invoices": [
            {
                "account": each.account,
                "total": format_usd(each.total_cents * NANOS_PER_CENT),
                "rebate": format_usd(each.rebate_nanos),
            }
            for each in rehearsal.invoices
        ],
    }
