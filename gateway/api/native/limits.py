"""Budgets and rate limits, as their account can read them."""

from __future__ import annotations

from litestar import Controller, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection

from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView
from gateway.api.http.operations import list_response
from gateway.api.http.request import ApiRequest
from gateway.operations import budgets, limits
from gateway.operations.budgets import BudgetView
from gateway.operations.limits import RateLimitView


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

    @get(
        "/rate-limits",
        operation_id="ListRateLimits",
        summary="List limits of requests and tokens per minute, and of concurrent requests",
    )
    async def rate_limits(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[ListView[RateLimitView]]:
        def read(connection: Connection) -> list[RateLimitView]:
            return limits.of_account(
                connection, requested_account(request, connection, account, "limits")
            )

        return await list_response(request, read)
