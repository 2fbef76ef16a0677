"""Accounting months: closing, verifying, rebates; and credit notes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, account_names
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.api.native.statements import read_month
from gateway.billing.statements.close import BillingPeriod, list_periods
from gateway.billing.statements.statement import Invoice, invoices_of
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs, require_proof
from gateway.console.jobs.pages import start_job
from gateway.console.jobs.runner import Progress, Work
from gateway.console.jobs.store import ConsoleJob, NewJob, digest_of, find_latest
from gateway.console.queries import FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.scope import one_account
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound, TollgateError
from gateway.ledger.periods import month_of
from gateway.operations import invoices, periods
from gateway.operations.invoices import CreditNoteBody
from gateway.operations.periods import RebatesBody, RebatesView
from gateway.pricing import NANOS_PER_CENT, parse_usd

KINDS: Final = ("period.rehearse", "period.close", "period.verify")
INVOICES_SHOWN: Final = 200
TIERS: Final = 4
"""Empty tiers that the form of rebates offers."""
LISTS: Final = (
    ListColumns(
        "periods",
        {
            "state": "State",
            "receipts": "Receipts",
            "charged": "Charged, $",
            "transfers": "Transfers",
            "closed": "Closed",
            "seal": "Seal",
        },
    ),
)


class MonthJobs(NamedTuple):
    rehearsal: ConsoleJob | None
    close: ConsoleJob | None
    verification: ConsoleJob | None

    @property
    def running(self) -> ConsoleJob | None:
        return next((job for job in self if job is not None and job.is_running), None)


class PeriodPages(Controller):
    path = "/periods"

    @get(guards=[needs("installation.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _index_page(request, visitor)

    @post("/rebates", guards=[needs("periods.write")])
    async def set_rebates(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form = await read_form(request)
        try:
            body = read_body(RebatesBody, _tiers(form))
            checked = periods.read_tiers(body.tiers)
            await require_proof(request)
            await request.services.database.write(
                lambda connection: periods.set_tiers(
                    connection, visitor.author(), body.account, checked
                )
            )
        except TollgateError as error:
            return await _index_page(request, visitor, form.values(), error)
        return see_other("/console/periods")

    @get("/{month:str}", guards=[needs("installation.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[str]:
        name, _ = read_month(month, ())

        def read(
            connection: Connection,
        ) -> tuple[BillingPeriod | None, MonthJobs, list[Invoice], dict[int, str]]:
            found = {each.month: each for each in list_periods(connection)}
            jobs = MonthJobs(*(find_latest(connection, kind, digest_of(name)) for kind in KINDS))
            issued = invoices_of(connection, None, name, limit=INVOICES_SHOWN)
            names = account_names(connection, {each.account_id for each in issued})
            return found.get(name), jobs, issued, names

        period, jobs, issued, names = await request.services.database.report(read, account_id=None)
        if period is None:
            raise NotFound("not_found", f"Nothing was booked in {name}.")
        return await page(
            request,
            visitor,
            "money/period.html",
            title=f"{name} is {period.state}",
            period=period,
            jobs_of=jobs,
            rehearsal=_result(jobs.rehearsal),
            verified=_result(jobs.verification),
            has_ended=name < month_of(datetime.now(UTC)),
            issued=issued,
            names=names,
            nanos_of=parse_usd,
            may_write=visitor.may("periods.write"),
        )

    @post("/{month:str}", guards=[needs("periods.write")])
    async def act(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[Any]:
        """Rehearse the close of a month, close it, or verify its seal."""
        name, _ = read_month(month, ())
        kind = f"period.{(await request.form()).get('do')}"
        if kind not in KINDS:
            raise InvalidRequest("invalid_value", "do is rehearse, close or verify.", param="do")
        if kind == "period.close":
            await require_proof(request)
        job = NewJob(
            kind=kind,
            digest=digest_of(name),
            starter=visitor.author().name,
            act="installation.read",
            back=f"/console/periods/{name}",
            can_cancel=kind != "period.close",
        )
        await start_job(request, job, _work(request, visitor, kind, name))
        return see_other(f"/console/periods/{name}")


class CreditNotePages(Controller):
    path = "/statements/{month:str}/credit-note"

    @get(guards=[needs("credit.write")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[str]:
        """Show the form or, once it is filled in, what it would do."""
        return await _note_page(request, visitor, month)

    @post(guards=[needs("credit.write")])
    async def book(
        self, request: ApiRequest, visitor: CurrentVisitor, month: FromPath[str]
    ) -> Response[Any]:
        form = await read_form(request)
        try:
            account, invoice, _ = await _invoice(request, visitor, month)
            sent = {"amount": form.amount("amount") or "", "reason": form.text("reason") or ""}
            body = read_body(CreditNoteBody, sent)
            await require_proof(request)
            await request.services.database.write(
                lambda connection: invoices.credit(
                    connection, visitor.author(), invoice.number, body
                )
            )
        except TollgateError as error:
            return await _note_page(request, visitor, month, form.values(), error)
        return see_other(f"/console/ledger?account=id:{account.id}&kind=correction")


def _work(request: ApiRequest, visitor: Visitor, kind: str, month: str) -> Work:
    """Return what a job of a month does."""
    database = request.services.database

    async def work(_: Progress) -> Any:
        if kind == "period.close":
            return await asyncio.to_thread(periods.close, database, visitor.author(), month)
        read: Any = periods.rehearse if kind == "period.rehearse" else periods.verify
        async with database.long_reports(None):
            return await database.slow(partial(read, month=month))

    return work


def _result(job: ConsoleJob | None) -> Mapping[str, Any] | None:
    return job.result if job is not None and job.state == "done" else None


def _tiers(form: FormValues) -> dict[str, Any]:
    tiers = []
    for number in range(TIERS):
        start, percent = form.amount(f"from{number}"), form.text(f"percent{number}")
        if start or percent:
            tiers.append({"from": start or "0", "percent": percent or ""})
    account = form.text("account")
    return {"tiers": tiers, **({"account": account} if account else {})}


async def _index_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    def read(connection: Connection) -> tuple[list[BillingPeriod], list[RebatesView]]:
        return list_periods(connection), periods.list_rebates(connection)

    found, rebates = await request.services.database.report(read, account_id=None)
    this_month = month_of(datetime.now(UTC))
    due = [each.month for each in found if each.state != "closed" and each.month < this_month]
    return await page(
        request,
        visitor,
        "money/periods.html",
        lists=LISTS,
        title=f"{len(due)} month{'' if len(due) == 1 else 's'} to close" if due else "Months",
        status=error.http_status if error else 200,
        rows=found[::-1],
        due=due,
        rebates=rebates,
        tiers=range(TIERS),
        values=values or {},
        problems=problems_of(error),
        mistake=error.message if error else None,
        may_write=visitor.may("periods.write"),
    )


async def _invoice(
    request: ApiRequest, visitor: Visitor, month: str
) -> tuple[Account, Invoice, int]:
    """Return an account's invoice of a month, and what can still be credited of it."""
    name, _ = read_month(month, ())
    named = Query(request).text("account")

    def read(connection: Connection) -> tuple[Account, Invoice | None, int]:
        account = one_account(connection, visitor, named)
        issued = invoices_of(connection, account.id)
        invoice = next((one for one in issued if one.month == name and one.kind == "invoice"), None)
        credited = (
            sum(one.total_cents for one in issued if one.corrects == invoice.number)
            if invoice
            else 0
        )
        left = invoice.total_cents + credited if invoice else 0
        return account, invoice, left * NANOS_PER_CENT

    account, invoice, left = await request.services.database.read(read)
    if invoice is None:
        raise NotFound("invoice_not_found", f"{account.name} has no invoice of {name}.")
    return account, invoice, left


async def _note_page(
    request: ApiRequest,
    visitor: Visitor,
    month: str,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    query = Query(request)
    account, invoice, left = await _invoice(request, visitor, month)
    amount = None
    if query.values.get("do") == "review" and error is None:
        try:
            sent = {"amount": (query.text("amount") or "").removeprefix("$")}
            body = read_body(CreditNoteBody, {**sent, "reason": query.text("reason") or ""})
            amount = body.amount
            if amount % NANOS_PER_CENT or not 0 < amount <= left:
                raise InvalidRequest(
                    "invalid_value",
                    "Enter whole cents, at most what is left of the invoice.",
                    param="amount",
                )
        except TollgateError as refused:
            error, amount = refused, None
    return await page(
        request,
        visitor,
        "money/credit_note.html",
        title=f"Credit note to {invoice.number}",
        status=error.http_status if error else 200,
        account=account,
        invoice=invoice,
        total_nanos=invoice.total_cents * NANOS_PER_CENT,
        left_nanos=left,
        amount=amount,
        values=values or query.values,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


HANDLERS: Final[list[Any]] = [PeriodPages, CreditNotePages]
