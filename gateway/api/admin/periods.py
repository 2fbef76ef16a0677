"""Accounting months, and credit notes, over HTTP."""

from __future__ import annotations

import asyncio
import functools

from litestar import Controller, Response, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.http.answers import ListView, PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import author_of, list_response, page_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import invoices, periods
from gateway.operations.invoices import CreditNoteBody, InvoiceView
from gateway.operations.periods import (
    PeriodView,
    RebatesBody,
    RebatesView,
    RehearsalView,
    VerifiedView,
)


class AdminPeriodsController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "periods"}

    @get(
        "/periods",
        operation_id="ListPeriods",
        summary="List accounting months, with the digests of those that are closed",
    )
    async def index(self, request: ApiRequest) -> Response[ListView[PeriodView]]:
        database = request.services.database
        data = await database.long_report(periods.list_all, account_id=request.key.account_id)
        return json_response({"object": "list", "data": data})

    @post(
        "/periods/{month:str}/close",
        status_code=200,
        opt={"errors": [409]},
        operation_id="ClosePeriod",
        summary="Close a month that has ended: seal, rebates, invoices; dry_run writes nothing",
    )
    async def close(
        self,
        request: ApiRequest,
        month: FromPath[str],
        dry_run: FromQuery[bool] = False,
    ) -> Response[PeriodView] | Response[RehearsalView]:
        database = request.services.database
        if dry_run:
            rehearse = functools.partial(periods.rehearse, month=month)
            return json_response(await database.slow(rehearse))
        author = author_of(request)
        return json_response(await asyncio.to_thread(periods.close, database, author, month))

    @get(
        "/periods/{month:str}/verify",
        operation_id="VerifyPeriod",
        summary="Check whether a closed month has changed since",
    )
    async def verify(self, request: ApiRequest, month: FromPath[str]) -> Response[VerifiedView]:
        database = request.services.database
        verify = functools.partial(periods.verify, month=month)
        account_id = request.key.account_id
        return json_response(await database.long_report(verify, account_id=account_id))

    @get(
        "/rebates",
        operation_id="ListRebates",
        summary="List volume rebates: the tiers of all accounts, and of those with their own",
    )
    async def rebates(self, request: ApiRequest) -> Response[ListView[RebatesView]]:
        return await list_response(request, periods.list_rebates)

    @put(
        "/rebates",
        operation_id="SetRebates",
        summary="Replace the rebate tiers of an account, or of all without their own",
    )
    async def set_rebates(
        self, request: ApiRequest, data: JSONBody[RebatesBody]
    ) -> Response[ListView[RebatesView]]:
        made = await write(request, periods.put_rebates, data)
        return json_response({"object": "list", "data": made})

    @get(
        "/invoices",
        operation_id="ListInvoices",
        summary="List invoices and credit notes in order of issue, of one account or of all",
    )
    async def invoices(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[InvoiceView]]:
        check_limit(limit)
        return await page_response(request, invoices.list_page, account, limit=limit, cursor=cursor)

    @post(
        "/invoices/{number:str}/credit-notes",
        status_code=201,
        opt={"area": "credit", "errors": [409]},
        operation_id="CreateCreditNote",
        summary="Write a credit note, which gives back part of an invoice",
    )
    async def create_note(
        self,
        request: ApiRequest,
        number: FromPath[str],
        data: JSONBody[CreditNoteBody],
    ) -> Response[InvoiceView]:
        made = await write(request, invoices.credit, number, data)
        return json_response(made, status=201)
