"""Budgets and rate limits, as their account can read them; budgets of keys, which owners manage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from litestar import Controller, Response, delete, get, patch, post
from litestar.params import FromQuery, JSONBody
from sqlalchemy import Connection

from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView, PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import IdInPath
from gateway.api.http.operations import list_response, page_response, write
from gateway.api.http.request import ApiRequest
from gateway.audit_log import Author
from gateway.operations import budgets, limits
from gateway.operations.budgets import BudgetChange, BudgetView, KeyBudgetBody
from gateway.operations.limits import RateLimitView

OWNERS: Final[dict[str, Any]] = {"scope": "inference", "least": "owner", "members_only": True}
"""Options of routes by which owners manage their account."""


class LimitsController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        "/budgets",
        operation_id="ListBudgets",
        summary="List budgets in force, with the usage of their current windows",
    )
    async def budgets(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[ListView[BudgetView]]:
        def read(connection: Connection) -> list[BudgetView]:
            return budgets.of_account(
                connection, requested_account(request, connection, account, "budgets")
            )

        return await list_response(request, read)

    @post(
        "/budgets",
        status_code=201,
        opt={**OWNERS, "errors": [404]},
        operation_id="CreateKeyBudget",
        summary="Create a budget of a key, as an owner",
    )
    async def create_budget(
        self, request: ApiRequest, data: JSONBody[KeyBudgetBody]
    ) -> Response[BudgetView]:
        made = await write(request, budgets.create_for_key, request.key.account_id, data)
        return json_response(made, status=201)

    @patch(
        "/budgets/{budget_id:int}",
        opt=OWNERS,
        operation_id="ChangeKeyBudget",
        summary="Change a budget of a key, as an owner",
    )
    async def change_budget(
        self, request: ApiRequest, budget_id: IdInPath, data: JSONBody[BudgetChange]
    ) -> Response[BudgetView]:
        return json_response(await _write_own(request, budget_id, budgets.change, data))

    @delete(
        "/budgets/{budget_id:int}",
        status_code=200,
        opt=OWNERS,
        operation_id="EndKeyBudget",
        summary="End a budget of a key, as an owner",
    )
    async def end_budget(self, request: ApiRequest, budget_id: IdInPath) -> Response[BudgetView]:
        return json_response(await _write_own(request, budget_id, budgets.end))

    @get(
        "/rate-limits",
        operation_id="ListRateLimits",
        summary="List limits of requests and tokens per minute, and of concurrent requests",
    )
    async def rate_limits(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[RateLimitView]]:
        check_limit(limit)

        def read(connection: Connection) -> tuple[list[RateLimitView], str | None]:
            owner = requested_account(request, connection, account, "limits")
            return limits.page_of(connection, owner, limit=limit, cursor=cursor)

        return await page_response(request, read)


async def _write_own(
    request: ApiRequest, budget_id: int, act: Callable[..., BudgetView], *arguments: object
) -> BudgetView:
    """Do an act on a budget of a key of the caller's account. Raise ``NotFound``."""

    def run(connection: Connection, author: Author) -> BudgetView:
        budgets.check_key_budget(connection, request.key.account_id, budget_id)
        return act(connection, author, budget_id, *arguments)

    return await write(request, run)
