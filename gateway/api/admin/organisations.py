"""Organisations over HTTP: their accounts, budgets, statements, usage and exports."""

from __future__ import annotations

import asyncio
from typing import Annotated

from litestar import Controller, Response, delete, get, patch, post, put
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.response import Stream
from sqlalchemy import Connection

from gateway.api.http.answers import ListView, PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import MomentInQuery
from gateway.api.http.operations import list_response, page_response, write
from gateway.api.http.request import ApiRequest
from gateway.api.native.exports import (
    ExportRequest,
    FileFooterView,
    export_file,
    export_footer,
    export_span,
    select_export,
)
from gateway.api.native.statements import read_month, statement_file
from gateway.api.native.usage import UsageReportView, one_of, tag_filters, usage_report
from gateway.billing.exports.footer import Format, Profile
from gateway.billing.usage.report import Filters, read_dimensions
from gateway.operations import budgets, organisations
from gateway.operations.budgets import BudgetView, OrganisationBudgetBody
from gateway.operations.organisations import (
    OrganisationBody,
    OrganisationDetailView,
    OrganisationStatementView,
    OrganisationView,
    organisation_statement_view,
)


async def read_organisation_export(
    request: ApiRequest,
    organisation: FromPath[str],
    format: FromQuery[Format] = "csv",
    profile: FromQuery[Profile] = "native",
    tz: FromQuery[str] = "UTC",
    first: Annotated[str | None, QueryParameter(name="from")] = None,
    last: Annotated[str | None, QueryParameter(name="to")] = None,
    model: FromQuery[str | None] = None,
    margins: FromQuery[bool] = False,
) -> ExportRequest:
    """Litestar dependency: the requested export of an organisation."""

    def read(connection: Connection) -> ExportRequest:
        found = organisations.find(connection, organisation)
        ids = tuple(organisations.account_ids(connection, organisation))
        span = export_span(connection, first, last, tz)
        filters = Filters(ids, models=one_of(model))
        owner = f"organisation-{found.id}"
        return ExportRequest(span, filters, format, profile, owner, margins)

    return await select_export(request, read)


class OrganisationsController(Controller):
    path = "/v1/admin/organisations"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "accounts"}

    @get(operation_id="ListOrganisations", summary="List organisations")
    async def index(
        self,
        request: ApiRequest,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[OrganisationView]]:
        check_limit(limit)
        return await page_response(request, organisations.list_page, limit=limit, cursor=cursor)

    @post(
        status_code=201,
        opt={"errors": [409]},
        operation_id="CreateOrganisation",
        summary="Create an organisation, to which accounts can be added",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[OrganisationBody]
    ) -> Response[OrganisationView]:
        return json_response(await write(request, organisations.create, data), status=201)

    @get(
        "/{organisation:str}",
        operation_id="GetOrganisation",
        summary="Get an organisation with its accounts, their balances, and its budgets",
    )
    async def show(
        self, request: ApiRequest, organisation: FromPath[str]
    ) -> Response[OrganisationDetailView]:
        found = await request.services.database.read(
            lambda connection: organisations.show(connection, organisation)
        )
        return json_response(found)

    @patch(
        "/{organisation:str}",
        opt={"errors": [409]},
        operation_id="RenameOrganisation",
        summary="Rename an organisation",
    )
    async def rename(
        self, request: ApiRequest, organisation: FromPath[str], data: JSONBody[OrganisationBody]
    ) -> Response[OrganisationView]:
        return json_response(await write(request, organisations.rename, organisation, data))

    @put(
        "/{organisation:str}/accounts/{account:str}",
        opt={"errors": [409]},
        operation_id="AddOrganisationAccount",
        summary="Add an account to an organisation",
    )
    async def add(
        self, request: ApiRequest, organisation: FromPath[str], account: FromPath[str]
    ) -> Response[OrganisationDetailView]:
        return json_response(await write(request, organisations.add, organisation, account))

    @delete(
        "/{organisation:str}/accounts/{account:str}",
        status_code=200,
        operation_id="RemoveOrganisationAccount",
        summary="Remove an account from an organisation",
    )
    async def remove(
        self, request: ApiRequest, organisation: FromPath[str], account: FromPath[str]
    ) -> Response[OrganisationDetailView]:
        return json_response(await write(request, organisations.remove, organisation, account))

    @get(
        "/{organisation:str}/budgets",
        opt={"area": "budgets"},
        operation_id="ListOrganisationBudgets",
        summary="List the budgets of an organisation, with what its accounts are allotted",
    )
    async def budgets(
        self, request: ApiRequest, organisation: FromPath[str]
    ) -> Response[ListView[BudgetView]]:
        return await list_response(
            request,
            lambda connection: budgets.of_organisation(
                connection, organisations.find(connection, organisation)
            ),
        )

    @post(
        "/{organisation:str}/budgets",
        status_code=201,
        opt={"area": "budgets", "errors": [409]},
        operation_id="CreateOrganisationBudget",
        summary="Limit the spending of all accounts of an organisation together",
    )
    async def create_budget(
        self,
        request: ApiRequest,
        organisation: FromPath[str],
        data: JSONBody[OrganisationBudgetBody],
    ) -> Response[BudgetView]:
        made = await write(request, budgets.create_for_organisation, organisation, data)
        return json_response(made, status=201)

    @get(
        "/{organisation:str}/statements/{month:str}",
        opt={"area": "periods", "media": ["text/csv", "text/html", "application/pdf"]},
        operation_id="GetOrganisationStatement",
        summary="Statements of a month of all accounts: YYYY-MM, or with .csv, .html or .pdf",
    )
    async def statement(
        self, request: ApiRequest, organisation: FromPath[str], month: FromPath[str]
    ) -> Response[OrganisationStatementView] | Response[bytes]:
        name, form = read_month(month, organisations.FORMATS)
        made = await request.services.database.long_report(
            lambda connection: organisations.statement_of(connection, organisation, name),
            account_id=request.key.account_id,
        )
        if form is None:
            return json_response(organisation_statement_view(made))
        data = await asyncio.to_thread(
            organisations.encode_statement, made, request.services.settings, form
        )
        return statement_file(data, form, f"statement-organisation-{made.organisation.id}-{name}")

    @get(
        "/{organisation:str}/usage",
        opt={"area": "usage"},
        operation_id="GetOrganisationUsage",
        summary="Usage of the accounts of an organisation, also by account",
    )
    async def usage(
        self,
        request: ApiRequest,
        organisation: FromPath[str],
        group_by: FromQuery[str] = "account",
        tz: FromQuery[str] = "UTC",
        first: Annotated[str | None, QueryParameter(name="from")] = None,
        last: Annotated[str | None, QueryParameter(name="to")] = None,
        model: FromQuery[str | None] = None,
        task: FromQuery[str | None] = None,
        as_of: MomentInQuery = None,
    ) -> Response[UsageReportView]:
        def choose(connection: Connection) -> tuple[Filters, str]:
            ids = tuple(organisations.account_ids(connection, organisation))
            tags = tag_filters(request)
            return Filters(ids, models=one_of(model), tasks=one_of(task), tags=tags), tz

        by = read_dimensions(group_by, accounts=True)
        return await usage_report(request, choose, by, first=first, last=last, as_of=as_of)


class OrganisationExportsController(Controller):
    path = "/v1/admin/organisations/{organisation:str}/usage/export"
    dependencies = {"selection": Provide(read_organisation_export)}
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "usage"}

    @get(
        opt={"media": ["text/csv", "application/vnd.apache.parquet"], "errors": [404, 429]},
        operation_id="ExportOrganisationUsage",
        summary="Every charge and refund of an organisation's accounts as CSV or Parquet",
    )
    async def file(self, request: ApiRequest, selection: NamedDependency[ExportRequest]) -> Stream:
        return export_file(request, selection)

    @get(
        "/footer",
        opt={"errors": [404, 429]},
        operation_id="GetOrganisationExportFooter",
        summary="How many rows that file has, what they sum to, and its SHA-256",
    )
    async def footer(
        self, request: ApiRequest, selection: NamedDependency[ExportRequest]
    ) -> Response[FileFooterView]:
        return await export_footer(request, selection)
