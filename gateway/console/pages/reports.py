"""Reports: margins, and monthly statements."""

from __future__ import annotations

import asyncio
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
from gateway.checks.months import next_month, starts_at
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import Query
from gateway.console.rendering import page
from gateway.console.scope import account_of, one_account
from gateway.console.views.evidence import bookings_url, row_url, row_urls
from gateway.console.views.files import TableFile
from gateway.console.views.formats import Clock, usd
from gateway.console.views.money import sum_rows, sum_total
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound
from gateway.operations.invoices import PAGE_FORMATS
from gateway.operations.invoices import page as printed_page

MARGIN_GROUPS: Final = ("model", "device", "account", "task", "day", "month")
ROWS_MAX: Final = 1000
"""Rows of a report that a page shows; the file has all."""


MARGIN_COLUMNS: Final = (
    *("requests", "cost_nanos", "refund_nanos", "net_nanos", "expense_nanos", "margin_nanos"),
    "expensed",
)
LISTS: Final = (
    ListColumns(
        "margins",
        {
            "requests": "Requests",
            "known": "Cost known of",
            "revenue": "Revenue, $",
            "cost": "Cost, $",
            "margin": "Margin, $",
            "margin_share": "Margin",
        },
    ),
    ListColumns(
        "statements",
        {
            "state": "State",
            "documents": "Documents",
            "total": "Total, $",
        },
    ),
)


class ReportPages(Controller):
    path = "/"

    @get("/margins", guards=[needs("margins.read")])
    async def margins(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        query = Query(request)
        by = query.one_of("by", MARGIN_GROUPS) or "model"
        account, span, found = await _report(request, visitor, query, by)
        rows, total = sum_rows(found), sum_total(found)
        chosen = {name: query.text(name) for name in ("model", "task")}
        chosen["account"] = account.name if account else None
        return await page(
            request,
            visitor,
            "margins.html",
            lists=LISTS,
            title=f"Margin: {usd(total.margin_nanos)}",
            account=account,
            span=span,
            by=by,
            groups=MARGIN_GROUPS,
            as_file=TableFile("margins", (f"labels.{by}", *MARGIN_COLUMNS), rows),
            rows=rows[:ROWS_MAX],
            proofs=row_urls([row.labels for row in rows[:ROWS_MAX]], span, chosen),
            proof=row_url({}, span, chosen),
            total=total,
            filters=query.values,
            presets=query.presets(Clock(visitor.zone, datetime.now(UTC))),
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
            lists=LISTS,
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
            issued = await database.read(lambda connection: invoices_of(connection, account.id))
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
            corrected_by=[
                each for each in issued if made.invoice and each.corrects == made.invoice.number
            ],
            proofs={
                line.model: bookings_url(
                    starts_at(name),
                    starts_at(next_month(name)),
                    account=account.name,
                    model=line.model,
                )
                for line in made.lines
                if line.model
            },
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


HANDLERS: Final[list[Any]] = [ReportPages]
