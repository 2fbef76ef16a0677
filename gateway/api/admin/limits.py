"""Budgets, rate limits and storage limits of all accounts over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, patch, post, put
from litestar.params import FromQuery, JSONBody

from gateway.api.http.answers import PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import IdInPath, IdInQuery
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import budgets, limits, storage
from gateway.operations.budgets import BudgetBody, BudgetChange, BudgetView
from gateway.operations.limits import RateLimitBody, RateLimitView
from gateway.operations.storage import StorageLimitBody, StorageView


class AdminLimitsController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "limits"}

    @get(
        "/budgets",
        opt={"area": "budgets"},
        operation_id="ListAllBudgets",
        summary="List the budgets in force, of one account or organisation, or of all",
    )
    async def budgets(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        organisation: FromQuery[str | None] = None,
        key: IdInQuery = None,
        model: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[BudgetView]]:
        check_limit(limit)
        return await page_response(
            request,
            budgets.list_page,
            account=account,
            organisation=organisation,
            key=key,
            model=model,
            limit=limit,
            cursor=cursor,
        )

    @post(
        "/budgets",
        opt={"area": "budgets"},
        status_code=201,
        operation_id="CreateBudget",
        summary="Limit the spending of an account, key or model: per hour, day, month or in total",
    )
    async def create_budget(
        self, request: ApiRequest, data: JSONBody[BudgetBody]
    ) -> Response[BudgetView]:
        return json_response(await write(request, budgets.create, data), status=201)

    @patch(
        "/budgets/{budget_id:int}",
        opt={"area": "budgets"},
        operation_id="ChangeBudget",
        summary="Change a budget's limit or whether it refuses, from the next request on",
    )
    async def change_budget(
        self,
        request: ApiRequest,
        budget_id: IdInPath,
        data: JSONBody[BudgetChange],
    ) -> Response[BudgetView]:
        return json_response(await write(request, budgets.change, budget_id, data))

    @delete(
        "/budgets/{budget_id:int}",
        opt={"area": "budgets"},
        status_code=200,
        operation_id="EndBudget",
        summary="End a budget",
    )
    async def end_budget(self, request: ApiRequest, budget_id: IdInPath) -> Response[BudgetView]:
        return json_response(await write(request, budgets.end, budget_id))

    @get(
        "/rate-limits",
        operation_id="ListAllRateLimits",
        summary="List rate limits, of one account or of all, in pages",
    )
    async def rate_limits(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[RateLimitView]]:
        check_limit(limit)
        return await page_response(request, limits.list_page, account, limit=limit, cursor=cursor)

    @put(
        "/rate-limits",
        operation_id="SetRateLimit",
        summary="Create a limit, or replace that of the same account, key and model",
    )
    async def set_rate_limit(
        self, request: ApiRequest, data: JSONBody[RateLimitBody]
    ) -> Response[RateLimitView]:
        return json_response(await write(request, limits.put, data))

    @delete(
        "/rate-limits",
        status_code=200,
        operation_id="RemoveRateLimit",
        summary="Remove a limit",
    )
    async def remove_rate_limit(
        self,
        request: ApiRequest,
        account: FromQuery[str],
        key: IdInQuery = None,
        model: FromQuery[str | None] = None,
    ) -> Response[RateLimitView]:
        return json_response(await write(request, limits.remove, account, key=key, model=model))

    @put(
        "/storage-limits",
        operation_id="SetStorageLimits",
        summary="Set an account's limits of stored files and bytes",
    )
    async def set_storage_limits(
        self, request: ApiRequest, data: JSONBody[StorageLimitBody]
    ) -> Response[StorageView]:
        return json_response(await write(request, storage.put, data, request.services.settings))
