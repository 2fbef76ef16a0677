"""Statements of an account: as JSON, as HTML and as PDF."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from typing import Final, Literal, TypedDict, TypeVar

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
from gateway.errors import InvalidRequest, NotFound
from gateway.operations.invoices import (
    PAGE_FORMATS,
    InvoiceView,
    StatementView,
    invoice_view,
    page,
    statement_view,
)

T = TypeVar("T")

_MONTH: Final = re.compile(r"(20\d\d-(?:0[1-9]|1[0-2]))(?:\.([a-z]+))?")
_MEDIA_TYPES: Final = {
    "csv": "text/csv; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "pdf": "application/pdf",
}


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
        name, form = read_month(month, PAGE_FORMATS)

        def read(connection: Connection) -> Statement:
            return statement(
                connection, requested_account(request, connection, account, "periods").id, name
            )

        made = await _read(request, read)
        if form is None:
            return json_response(statement_view(made))
        data = await asyncio.to_thread(page, made, request.services.settings, form)
        return statement_file(data, form, f"statement-{name}")


def read_month(text: str, forms: Collection[str]) -> tuple[str, str | None]:
    """Read YYYY-MM, or YYYY-MM.form for a file in one of these forms. Raise ``InvalidRequest``."""
    found = _MONTH.fullmatch(text)
    if found is None or found[2] not in (None, *forms):
        raise InvalidRequest(
            "invalid_value", f"{text!r} is not a valid month; use YYYY-MM.", param="month"
        )
    return found[1], found[2]


def statement_file(data: bytes, form: str, name: str) -> Response[bytes]:
    """Answer with a file that browsers show and that loads nothing."""
    return Response(
        data,
        media_type=_MEDIA_TYPES[form],
        headers={
            "Content-Disposition": f'inline; filename="{name}.{form}"',
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
