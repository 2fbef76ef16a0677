"""Reports: usage by any dimension, margins, and monthly statements."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from litestar import Controller, Response, get
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.accounts.accounts import Account
from gateway.api.http.request import ApiRequest
from gateway.api.native.statements import read_month, statement_file
from gateway.billing.statements.statement import Invoice, invoices_of, months_of, statement
from gateway.billing.usage.report import Filters, Group, Span, read_span, usage
from gateway.catalog.tasks import TASKS
from gateway.console.guards import needs
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.scope import account_of, one_account
from gateway.console.views.formats import usd
from gateway.console.views.money import SumRow, sum_rows, sum_total
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound
from gateway.operations.invoices import PAGE_FORMATS
from gateway.operations.invoices import page as printed_page
from gateway.pricing import format_usd

GROUPS: Final = ("day", "month", "hour", "model", "task", "key")
MARGIN_GROUPS: Final = ("model", "device", "account", "task", "day", "month")
ROWS_MAX: Final = 1000
"""Rows of a report that a page shows; the file has all."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""Starts of cells that spreadsheets compute."""


class ReportPages(Controller):
    path = "/"

    @get("/usage", guards=[needs("usage.read")])
    async def usage(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        query = Query(request)
        groups = GROUPS if visitor.role is None else (*GROUPS, "account")
        by = query.one_of("by", groups) or "day"
        account, span, found = await _report(request, visitor, query, by)
        rows, total = sum_rows(found), sum_total(found)
        if query.text("format") == "csv":
            return _csv(by, rows, name=f"usage-by-{by}")
        of = f" of {account.name}" if account else ""
        return await page(
            request,
            visitor,
            "usage.html",
            title=f"Usage{of}: {usd(total.net_nanos)}",
            account=account,
            span=span,
            by=by,
            groups=groups,
            rows=rows[:ROWS_MAX],
            cut=len(rows) > ROWS_MAX,
            total=total,
            most=max((row.net_nanos for row in rows), default=0),
            tasks=tuple(TASKS),
            filters=query.values,
            csv=query.url(format="csv"),
        )

    @get("/margins", guards=[needs("margins.read")])
    async def margins(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        query = Query(request)
        by = query.one_of("by", MARGIN_GROUPS) or "model"
        account, span, found = await _report(request, visitor, query, by)
        rows, total = sum_rows(found), sum_total(found)
        return await page(
            request,
            visitor,
            "margins.html",
            title=f"Margin: {usd(total.margin_nanos)}",
            account=account,
            span=span,
            by=by,
            groups=MARGIN_GROUPS,
            rows=rows[:ROWS_MAX],
            total=total,
            filters=query.values,
        )

    @get("/statements", guards=[needs("periods.read")])
    async def statements(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        named = Query(request).text("account")

        def read(connection: Connection) -> tuple[Account, list[str], list[Invoice]]:
            account = one_account(connection, visitor, named)
            return account, months_of(connection, account.id), invoices_of(connection, account.id)

        account, months, issued = await request.services.database.report(
            read, account_id=visitor.account_id
        )
        return await page(
            request,
            visitor,
            "statements.html",
            title=f"Statements of {account.name}",
            account=account,
            months=months,
            invoices={month: [one for one in issued if one.month == month] for month in months},
        )

    @get("/statements/{month:str}", guards=[needs("periods.read")])
    async def statement(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[Any]:
        name, form = read_month(month, PAGE_FORMATS)
        named, services = Query(request).text("account"), request.services

        database = services.database
        account = await database.read(lambda connection: one_account(connection, visitor, named))
        try:
            made = await database.long_report(
                lambda connection: statement(connection, account.id, name), account_id=account.id
            )
        except LookupError as error:
            raise NotFound("not_found", f"{error.args[0]}.") from None
        if form is not None:
            data = await asyncio.to_thread(printed_page, made, services.settings, form)
            return statement_file(data, form, f"statement-{account.name}-{name}")
        return await page(
            request,
            visitor,
            "statement.html",
            title=f"{account.name}, {name}: {usd(made.total_cents * 10_000_000)}",
            account=account,
            made=made,
            formats=tuple(PAGE_FORMATS),
        )


async def _report(
    request: ApiRequest, visitor: Visitor, query: Query, by: str
) -> tuple[Account | None, Span, list[Group]]:
    def read(connection: Connection) -> tuple[Account | None, Span, list[Group]]:
        account = account_of(connection, visitor, query.text("account"))
        model, task = query.text("model"), query.one_of("task", tuple(TASKS))
        filters = Filters(
            account_ids=(account.id,) if account else None,
            models=(model,) if model else None,
            tasks=(task,) if task else None,
        )
        first, last = query.text("from"), query.text("to")
        span = read_span(first, last, visitor.zone, now=datetime.now(UTC))
        return account, span, usage(connection, span, [by], filters)

    return await request.services.database.report(read, account_id=visitor.account_id)


def _csv(by: str, rows: Sequence[SumRow], *, name: str) -> Response[bytes]:
    """Return the rows of a page as a file. Cells that a spreadsheet would compute are quoted."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    units = sorted({unit for row in rows for unit in row.units})
    writer.writerow([by, "requests", "cost", "refunded", "net_cost", *units])
    for row in rows:
        label = row.labels[by]
        amounts = (row.cost_nanos, row.refund_nanos, row.net_nanos)
        writer.writerow(
            [
                f"'{label}" if label.startswith(_FORMULA) else label,
                row.requests,
                *(format_usd(nanos) for nanos in amounts),
                *(row.units.get(unit, 0) for unit in units),
            ]
        )
    return Response(
        text.getvalue().encode(),
        media_type="text/csv; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{name}.csv"'},
    )


HANDLERS: Final[list[Any]] = [ReportPages]
