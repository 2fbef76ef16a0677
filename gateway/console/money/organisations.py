"""Organisations: their accounts, budgets of the whole and of each account, usage and statements."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from litestar import Controller, Response, get, post
from litestar.params import FromPath
from litestar.response import Redirect
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.accounts.budgets import WINDOWS, find_budget
from gateway.accounts.organisations import Organisation, accounts_at
from gateway.api.http.bodies import read_body
from gateway.api.http.request import ApiRequest
from gateway.api.native.statements import read_month, statement_file
from gateway.billing.statements.organisation import OrganisationStatement
from gateway.billing.statements.statement import months_of
from gateway.billing.usage.report import Filters, Group, Span, read_span, usage
from gateway.console.answers import see_other
from gateway.console.columns import ListColumns
from gateway.console.guards import needs
from gateway.console.queries import ROWS, FormValues, Query, problems_of, read_form
from gateway.console.rendering import page
from gateway.console.views.files import TableFile
from gateway.console.views.formats import usd
from gateway.console.views.limits import budget_row
from gateway.console.views.money import sum_rows, sum_total
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import NotFound, TollgateError
from gateway.operations import budgets, organisations
from gateway.operations.budgets import BudgetBody, BudgetChange, BudgetView, OrganisationBudgetBody
from gateway.operations.organisations import OrganisationBody, OrganisationView
from gateway.pricing import NANOS_PER_CENT, parse_usd

GROUPS: Final = ("account", "model", "task", "day", "month")
ALL_ACCOUNTS: Final = 0
"""In place of an account, whose long reports share their slot."""
USAGE_MAX: Final = 200
"""Rows of the usage that the page shows; the file has all."""
SUMS: Final = ("requests", "cost_nanos", "refund_nanos", "net_nanos")
LISTS: Final = (
    ListColumns(
        "organisations",
        {
            "number": "Number",
            "accounts": "Accounts",
            "available": "Available",
            "held": "Held",
            "created": "Created",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Found:
    organisation: Organisation
    accounts: Sequence[Account]
    budgets: Sequence[BudgetView]
    own: Mapping[int, Sequence[BudgetView]]
    """Budgets of each account as a whole."""
    months: Sequence[str]
    span: Span
    usage: Sequence[Group]

    @property
    def available_nanos(self) -> int:
        return sum(each.available_nanos for each in self.accounts)


class OrganisationPages(Controller):
    path = "/organisations"

    @get(guards=[needs("organisations.read")])
    async def index(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[str]:
        return await _index_page(request, visitor)

    @post(guards=[needs("organisations.write")])
    async def create(self, request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
        form = await read_form(request)
        try:
            body = read_body(OrganisationBody, {"name": form.text("name") or ""})
            author = visitor.author(form.text("reason") or "")
            made = await request.services.database.write(
                lambda connection: organisations.create(connection, author, body)
            )
        except TollgateError as error:
            return await _index_page(request, visitor, form.values(), error)
        return see_other(f"/console/organisations/{made['id']}")

    @get("/{organisation_id:int}", guards=[needs("organisations.read")])
    async def show(
        self, request: ApiRequest, visitor: CurrentVisitor, organisation_id: FromPath[int]
    ) -> Response[str]:
        return await _organisation_page(request, visitor, organisation_id)

    @post("/{organisation_id:int}", guards=[needs("organisations.write")])
    async def rename(
        self, request: ApiRequest, visitor: CurrentVisitor, organisation_id: FromPath[int]
    ) -> Response[Any]:
        form = await read_form(request)
        try:
            body = read_body(OrganisationBody, {"name": form.text("name") or ""})
            author = visitor.author(form.text("reason") or "")
            await request.services.database.write(
                lambda connection: organisations.rename(
                    connection, author, _number(organisation_id), body
                )
            )
        except NotFound:
            raise
        except TollgateError as error:
            return await _organisation_page(
                request, visitor, organisation_id, form, error, of="name"
            )
        return see_other(f"/console/organisations/{organisation_id}")

    @post("/{organisation_id:int}/accounts", guards=[needs("organisations.write")])
    async def add(
        self, request: ApiRequest, visitor: CurrentVisitor, organisation_id: FromPath[int]
    ) -> Response[Any]:
        form = await read_form(request)
        try:
            author, named = visitor.author(), form.text("account") or ""
            await request.services.database.write(
                lambda connection: organisations.add(
                    connection, author, _number(organisation_id), named
                )
            )
        except TollgateError as error:
            if isinstance(error, NotFound) and error.param != "account":
                raise
            return await _organisation_page(
                request, visitor, organisation_id, form, error, of="account"
            )
        return see_other(f"/console/organisations/{organisation_id}#accounts")

    @get(
        "/{organisation_id:int}/accounts/{account_number:int}/remove",
        guards=[needs("organisations.write")],
    )
    async def removal(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        organisation_id: FromPath[int],
        account_number: FromPath[int],
    ) -> Response[str]:
        def read(connection: Connection) -> tuple[Organisation, Account, list[BudgetView]]:
            found = organisations.find(connection, _number(organisation_id))
            if account_number not in accounts_at(connection, found.id):
                raise NotFound("not_found", f"{found.name} has no such account.")
            return (
                found,
                find_account(connection, account_number),
                budgets.of_organisation(connection, found),
            )

        organisation, account, bounds = await request.services.database.read(read)
        return await page(
            request,
            visitor,
            "money/organisation_remove.html",
            title=f"Remove {account.name} from {organisation.name}",
            organisation=organisation,
            account=account,
            rows=[budget_row(each, account.name) for each in bounds],
        )

    @post(
        "/{organisation_id:int}/accounts/{account_number:int}/remove",
        guards=[needs("organisations.write")],
    )
    async def remove(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        organisation_id: FromPath[int],
        account_number: FromPath[int],
    ) -> Redirect:
        form = await read_form(request)
        author = visitor.author(form.text("reason") or "")
        await request.services.database.write(
            lambda connection: organisations.remove(
                connection, author, _number(organisation_id), f"id:{account_number}"
            )
        )
        return see_other(f"/console/organisations/{organisation_id}#accounts")

    @post("/{organisation_id:int}/budgets", guards=[needs("organisation_budgets.write")])
    async def create_budget(
        self, request: ApiRequest, visitor: CurrentVisitor, organisation_id: FromPath[int]
    ) -> Response[Any]:
        """Bound the whole organisation, or one of its accounts."""
        form = await read_form(request)
        author = visitor.author(form.text("reason") or "")
        try:
            sent: dict[str, Any] = {
                "limit": form.amount("limit") or "",
                "window": form.text("window"),
                "hard": form.text("hard") is not None,
                "name": form.text("name") or "",
                "model": form.text("model"),
            }
            part = form.number("of")

            def make(connection: Connection) -> None:
                found = organisations.find(connection, _number(organisation_id))
                if part is None:
                    whole = {**sent, "overallot": form.text("overallot") is not None}
                    body = read_body(OrganisationBudgetBody, whole)
                    budgets.create_for_organisation(
                        connection, author, _number(organisation_id), body
                    )
                    return
                if part not in accounts_at(connection, found.id):
                    raise NotFound("not_found", f"{found.name} has no such account.", param="of")
                budgets.create(connection, author, read_body(BudgetBody, {**sent, "account": part}))

            await request.services.database.write(make)
        except TollgateError as error:
            return await _organisation_page(
                request, visitor, organisation_id, form, error, of="budget"
            )
        return see_other(f"/console/organisations/{organisation_id}#budgets")

    @post(
        "/{organisation_id:int}/budgets/{budget_id:int}",
        guards=[needs("organisation_budgets.write")],
    )
    async def change_budget(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        organisation_id: FromPath[int],
        budget_id: FromPath[int],
    ) -> Response[Any]:
        """Change a budget of the organisation or of one of its accounts, or end it."""
        form = await read_form(request)
        author = visitor.author()
        try:
            is_whole = form.text("whole") is not None
            change: dict[str, Any] = {
                "limit": form.amount("limit"),
                "hard": bool(form.text("hard")),
            }
            if is_whole:
                change["overallot"] = bool(form.text("overallot"))

            def alter(connection: Connection) -> None:
                _check_budget(connection, organisation_id, budget_id)
                if form.text("do") == "end":
                    budgets.end(connection, author, budget_id)
                else:
                    budgets.change(connection, author, budget_id, read_body(BudgetChange, change))

            await request.services.database.write(alter)
        except NotFound:
            raise
        except TollgateError as error:
            return await _organisation_page(
                request, visitor, organisation_id, None, error, of="change"
            )
        return see_other(f"/console/organisations/{organisation_id}#budgets")

    @get("/{organisation_id:int}/statements/{month:str}", guards=[needs("organisations.read")])
    async def statement(
        self,
        request: ApiRequest,
        visitor: CurrentVisitor,
        organisation_id: FromPath[int],
        month: FromPath[str],
    ) -> Response[Any]:
        name, form = read_month(month, organisations.FORMATS)
        services = request.services

        def read(connection: Connection) -> OrganisationStatement:
            return organisations.statement_of(connection, _number(organisation_id), name)

        made = await services.database.long_report(read, account_id=ALL_ACCOUNTS)
        if form is not None:
            data = await asyncio.to_thread(
                organisations.encode_statement, made, services.settings, form
            )
            return statement_file(data, form, f"statement-organisation-{organisation_id}-{name}")
        return await page(
            request,
            visitor,
            "money/organisation_statement.html",
            title=f"{made.organisation.name}, {name}: {usd(made.total_cents * NANOS_PER_CENT)}",
            made=made,
            per_cent=NANOS_PER_CENT,
            formats=organisations.FORMATS,
        )


def _check_budget(connection: Connection, organisation_id: int, budget_id: int) -> None:
    """Raise ``NotFound`` unless a budget is that of the organisation or of one of its accounts."""
    found = organisations.find(connection, _number(organisation_id))
    with contextlib.suppress(LookupError):
        budget = find_budget(connection, budget_id)
        if budget.organisation_id == found.id:
            return
        if budget.key_id is None and budget.account_id in accounts_at(connection, found.id):
            return
    raise NotFound("not_found", f"{found.name} has no budget {budget_id}.")


def _number(organisation_id: int) -> str:
    return f"id:{organisation_id}"


async def _index_page(
    request: ApiRequest,
    visitor: Visitor,
    values: Mapping[str, str] | None = None,
    error: TollgateError | None = None,
) -> Response[str]:
    query = Query(request)

    def read(connection: Connection) -> tuple[list[OrganisationView], str | None, dict[int, Any]]:
        found, more = organisations.list_page(
            connection, limit=query.rows, cursor=query.text("cursor")
        )
        # A file has no members.
        members = (
            {}
            if query.rows > ROWS
            else {
                each["id"]: [
                    find_account(connection, id) for id in accounts_at(connection, each["id"])
                ]
                for each in found
            }
        )
        return found, more, members

    found, more, members = await request.services.database.report(read, account_id=None)
    return await page(
        request,
        visitor,
        "money/organisations.html",
        lists=LISTS,
        title="Organisations",
        status=error.http_status if error else 200,
        as_file=TableFile(
            "organisations", ("id", "name", "created_at"), found, is_cut=more is not None
        ),
        rows=found,
        members=members,
        values=values or {},
        problems=problems_of(error),
        mistake=error.message if error else None,
        pager=query.pages(more),
    )


async def _organisation_page(
    request: ApiRequest,
    visitor: Visitor,
    organisation_id: int,
    form: FormValues | None = None,
    error: TollgateError | None = None,
    *,
    of: str = "",
) -> Response[str]:
    """Show an organisation; ``of`` is the form whose mistake is ``error``."""
    query = Query(request)
    by = query.one_of("by", GROUPS) or "account"
    now = datetime.now(UTC)

    def read(connection: Connection) -> _Found:
        organisation = organisations.find(connection, _number(organisation_id))
        ids = accounts_at(connection, organisation.id)
        span = read_span(query.text("from"), query.text("to"), visitor.zone, now=now)
        months = {month for id in ids for month in months_of(connection, id)}
        return _Found(
            organisation=organisation,
            accounts=[find_account(connection, id) for id in ids],
            budgets=budgets.of_organisation(connection, organisation),
            own={id: budgets.of_account_itself(connection, id) for id in ids},
            months=sorted(months, reverse=True),
            span=span,
            usage=usage(connection, span, [by], Filters(tuple(ids))) if ids else [],
        )

    found = await request.services.database.report(read, account_id=None)
    rows = sum_rows(found.usage)
    values = form.values() if form else {}
    return await page(
        request,
        visitor,
        "money/organisation.html",
        title=f"{found.organisation.name} has {usd(found.available_nanos)} available",
        status=error.http_status if error else 200,
        found=found,
        organisation=found.organisation,
        bounds=[(budget_row(each, ""), each, _allotted(each)) for each in found.budgets],
        own=[
            (account, budget_row(each, account.name), each)
            for account in found.accounts
            for each in found.own[account.id]
        ],
        windows=WINDOWS,
        models=request.services.live.names(),
        by=by,
        groups=GROUPS,
        as_file=TableFile(f"usage-organisation-{organisation_id}", (f"labels.{by}", *SUMS), rows),
        usage_rows=rows[:USAGE_MAX],
        usage_cut=len(rows) > USAGE_MAX,
        usage_max=USAGE_MAX,
        usage_total=sum_total(found.usage),
        filters=query.values,
        values=values,
        of=of,
        problems=problems_of(error),
        mistake=error.message if error else None,
    )


def _allotted(view: BudgetView) -> tuple[int, int] | None:
    """Return what of a budget its accounts are allotted, and what is left, in nano-dollars."""
    allotted, left = view["allotted"], view["unallotted"]
    return None if allotted is None or left is None else (parse_usd(allotted), parse_usd(left))


HANDLERS: Final[list[Any]] = [OrganisationPages]
