"""Statements of an account: as JSON, as HTML and as PDF."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Literal, TypedDict, TypeVar

from litestar import Controller, Response, get
from litestar.params import FromPath, FromQuery
from sqlalchemy import Connection

from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView, json_response
from gateway.api.http.request import ApiRequest
from gateway.billing.statements.statement import (
    Statement,
    invoices_of,
    months_of,
    statement,
)
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.operations.invoices import InvoiceView, invoice_view, page
from gateway.pricing import NANOS_PER_CENT, format_usd

T = TypeVar("T")

_MONTH = re.compile(r"(20\d\d-(?:0[1-9]|1[0-2]))(?:\.(html|pdf))?")


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
            owner = requested_account(request, connection, account, "periods")
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
            return statement(
                connection, requested_account(request, connection, account, "periods").id, name
            )

        made = await _read(request, read)
        if form is None:
            return json_response(statement_view(made))
        data = await asyncio.to_thread(page, made, request.services.settings, form)
        kind = "text/html; charset=utf-8" if form == "html" else "application/pdf"
        return Response(
            data,
            media_type=kind,
            headers={
                "Content-Disposition": f'inline; filename="statement-{name}.{form}"',
                "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            },
        )


async def _read(request: ApiRequest, function: Callable[[Connection], T]) -> T:
    """Run a query for statements in the slow lane: open months are computed, which takes a while.

    Raise ``NotFound`` for a ``LookupError``.
    """
    database = request.services.database
    try:
        return await database.long_report(function, account_id=request.key.account_id)
    except LookupError as error:
        raise NotFound("not_found", f"{error.args[0]}.") from None


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
