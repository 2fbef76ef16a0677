"""Budgets and rate limits: what an account can ask about its own, and an operator set of any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from litestar import Controller, Request, Response, delete, get, patch, post, put
from litestar.params import FromQuery, JSONBody
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account, list_accounts
from gateway.accounts.budgets import (
    Budget,
    BudgetState,
    Window,
    budget_states,
    change_budget,
    create_budget,
    end_budget,
    list_budgets,
)
from gateway.accounts.limits import Limit, list_limits, remove_limit, set_limit
from gateway.api.http.access import caller, requested_account
from gateway.api.http.answers import ListView, json_response
from gateway.api.http.fields import Id, IdInPath, IdInQuery, PerMinute, UsdAmount
from gateway.catalog.store import LiveCatalog
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.pricing import format_usd
from gateway.sql.database import Database

Result = TypeVar("Result")

Model = Annotated[str, Field(min_length=1, max_length=200)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class BudgetBody(BaseModel):
    """Body of ``POST /v1/admin/budgets``; without key or model it covers all of them together."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"account": "acme", "limit": "25.00", "window": "day", "name": "daily"}]
        },
    )

    account: Name | Id
    limit: UsdAmount
    window: Window
    hard: bool = True
    key: Id | None = None
    model: Model | None = None
    name: Annotated[str, Field(max_length=200)] = ""
    tz: Annotated[str, Field(max_length=64)] | None = None


class BudgetChange(BaseModel):
    """Body of ``PATCH /v1/admin/budgets/{id}``; what is left out stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"limit": "40.00"}]})

    limit: UsdAmount | None = None
    hard: bool | None = None


class RateLimitBody(BaseModel):
    """Body of ``PUT /v1/admin/rate-limits``; without key or model it covers all together."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"account": "acme", "model": "pocket-chat", "requests_per_minute": 600}]
        },
    )

    account: Name | Id
    key: Id | None = None
    model: Model | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    concurrent: PerMinute | None = None
    cancelled_seconds_per_hour: PerMinute | None = None
    """Device time of cancelled work that was not charged; without key and model."""


class BudgetView(TypedDict):
    """A budget and its window of now."""

    object: Literal["budget"]
    id: int
    account: str
    key: int | None
    model: str | None
    name: str
    window: Window
    tz: str
    hard: bool
    starts_at: str | None
    ends_at: str | None
    limit: str
    spent: str
    held: str
    remaining: str
    exceeded: bool
    created_at: str


class RateLimitView(TypedDict):
    object: Literal["rate_limit"]
    account: str
    key: int | None
    model: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None
    cancelled_seconds_per_hour: int | None


class LimitsController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        "/budgets",
        operation_id="ListBudgets",
        summary="Budgets in force, and how far their windows of now are used",
    )
    async def budgets(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[ListView[BudgetView]]:
        def read(connection: Connection) -> list[BudgetView]:
            owner = requested_account(request, connection, account)
            return _budget_views(connection, [owner], list_budgets(connection, owner.id))

        return await _read(request, read)

    @get(
        "/rate-limits",
        operation_id="ListRateLimits",
        summary="Limits of requests and tokens per minute, and of requests at once",
    )
    async def rate_limits(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[ListView[RateLimitView]]:
        def read(connection: Connection) -> list[RateLimitView]:
            owner = requested_account(request, connection, account)
            return _limit_views([owner], list_limits(connection, owner.id))

        return await _read(request, read)


class AdminLimitsController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get(
        "/budgets",
        operation_id="ListAllBudgets",
        summary="Budgets in force of one account or of all",
    )
    async def budgets(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[ListView[BudgetView]]:
        def read(connection: Connection) -> list[BudgetView]:
            owner = find_account(connection, account).id if account is not None else None
            return _budget_views(
                connection, list_accounts(connection), list_budgets(connection, owner)
            )

        return await _read(request, read)

    @post(
        "/budgets",
        status_code=201,
        operation_id="CreateBudget",
        summary="Bound what an account, key or model may cost in an hour, a day, a month or in all",
    )
    async def create_budget(
        self, request: Request[Any, Any, Any], data: JSONBody[BudgetBody]
    ) -> Response[BudgetView]:
        _check_model(request, data.model)

        def write(connection: Connection) -> BudgetView:
            owner = find_account(connection, data.account)
            made = create_budget(
                connection,
                owner.id,
                data.limit,
                window=data.window,
                hard=data.hard,
                key_id=data.key,
                model=data.model,
                name=data.name,
                tz=data.tz,
            )
            return _budget_views(connection, [owner], [made])[0]

        return json_response(await _write(request, write), status=201)

    @patch(
        "/budgets/{budget_id:int}",
        operation_id="ChangeBudget",
        summary="Change how much a budget is or whether it refuses, from the next request on",
    )
    async def change_budget(
        self,
        request: Request[Any, Any, Any],
        budget_id: IdInPath,
        data: JSONBody[BudgetChange],
    ) -> Response[BudgetView]:
        def write(connection: Connection) -> BudgetView:
            changed = change_budget(connection, budget_id, limit_nanos=data.limit, hard=data.hard)
            return _one_budget(connection, changed)

        return json_response(await _write(request, write))

    @delete(
        "/budgets/{budget_id:int}",
        status_code=200,
        operation_id="EndBudget",
        summary="Take a budget out of force",
    )
    async def end_budget(
        self, request: Request[Any, Any, Any], budget_id: IdInPath
    ) -> Response[BudgetView]:
        def write(connection: Connection) -> BudgetView:
            return _one_budget(connection, end_budget(connection, budget_id))

        return json_response(await _write(request, write))

    @get(
        "/rate-limits",
        operation_id="ListAllRateLimits",
        summary="Rate limits of one account or of all",
    )
    async def rate_limits(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[ListView[RateLimitView]]:
        def read(connection: Connection) -> list[RateLimitView]:
            owner = find_account(connection, account).id if account is not None else None
            return _limit_views(list_accounts(connection), list_limits(connection, owner))

        return await _read(request, read)

    @put(
        "/rate-limits",
        operation_id="SetRateLimit",
        summary="Put a limit in the place of what this account, key and model had",
    )
    async def set_rate_limit(
        self, request: Request[Any, Any, Any], data: JSONBody[RateLimitBody]
    ) -> Response[RateLimitView]:
        _check_model(request, data.model)

        def write(connection: Connection) -> RateLimitView:
            owner = find_account(connection, data.account)
            limit = Limit(
                owner.id,
                data.key,
                data.model,
                requests_per_minute=data.requests_per_minute,
                tokens_per_minute=data.tokens_per_minute,
                concurrent_max=data.concurrent,
                cancelled_seconds_per_hour=data.cancelled_seconds_per_hour,
            )
            return _limit_views([owner], [set_limit(connection, limit)])[0]

        return json_response(await _write(request, write))

    @delete(
        "/rate-limits",
        status_code=200,
        operation_id="RemoveRateLimit",
        summary="Take a limit away",
    )
    async def remove_rate_limit(
        self,
        request: Request[Any, Any, Any],
        account: FromQuery[str],
        key: IdInQuery = None,
        model: FromQuery[str | None] = None,
    ) -> Response[RateLimitView]:
        def write(connection: Connection) -> RateLimitView:
            owner = find_account(connection, account)
            removed = remove_limit(connection, owner.id, key_id=key, model=model)
            return _limit_views([owner], [removed])[0]

        return json_response(await _write(request, write))


def budget_view(state: BudgetState, *, account: str) -> BudgetView:
    budget = state.budget
    return {
        "object": "budget",
        "id": budget.id,
        "account": account,
        "key": budget.key_id,
        "model": budget.model,
        "name": budget.name,
        "window": budget.window,
        "tz": budget.tz,
        "hard": budget.hard,
        "starts_at": timestamp(state.starts_at) if budget.window != "total" else None,
        "ends_at": timestamp(state.ends_at) if state.ends_at else None,
        "limit": format_usd(budget.limit_nanos),
        "spent": format_usd(state.spent_nanos),
        "held": format_usd(state.held_nanos),
        "remaining": format_usd(state.remaining_nanos),
        "exceeded": state.remaining_nanos <= 0,
        "created_at": timestamp(budget.created_at),
    }


def limit_view(limit: Limit, *, account: str) -> RateLimitView:
    return {
        "object": "rate_limit",
        "account": account,
        "key": limit.key_id,
        "model": limit.model,
        "requests_per_minute": limit.requests_per_minute,
        "tokens_per_minute": limit.tokens_per_minute,
        "concurrent": limit.concurrent_max,
        "cancelled_seconds_per_hour": limit.cancelled_seconds_per_hour,
    }


def _one_budget(connection: Connection, budget: Budget) -> BudgetView:
    owner = find_account(connection, budget.account_id)
    return _budget_views(connection, [owner], [budget])[0]


def _budget_views(
    connection: Connection, owners: Sequence[Account], found: Sequence[Budget]
) -> list[BudgetView]:
    names = {owner.id: owner.name for owner in owners}
    states = budget_states(connection, found, datetime.now(UTC))
    return [budget_view(state, account=names[state.budget.account_id]) for state in states]


def _limit_views(owners: Sequence[Account], found: Sequence[Limit]) -> list[RateLimitView]:
    names = {owner.id: owner.name for owner in owners}
    return [limit_view(limit, account=names[limit.account_id]) for limit in found]


def _check_model(request: Request[Any, Any, Any], model: str | None) -> None:
    """Refuse a name that no model has or had: it would bound nothing, silently."""
    live: LiveCatalog = request.app.state.live
    if model is not None and model not in live.names_ever():
        raise NotFound("model_not_found", f"The model {model!r} does not exist.", param="model")


async def _read(
    request: Request[Any, Any, Any], read: Callable[[Connection], list[Result]]
) -> Response[ListView[Result]]:
    database: Database = request.app.state.database
    with _refused():
        return json_response(
            {
                "object": "list",
                "data": await database.report(read, account_id=caller(request).account_id),
            }
        )


async def _write(request: Request[Any, Any, Any], write: Callable[[Connection], Result]) -> Result:
    database: Database = request.app.state.database
    with _refused():
        return await database.write(write)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turn what the accounts' own functions refuse into answers."""
    try:
        yield
    except LookupError as error:
        raise NotFound("not_found", _sentence(error)) from None
    except ValueError as error:
        raise InvalidRequest("invalid_value", _sentence(error)) from None


def _sentence(error: Exception) -> str:
    text = str(error.args[0])
    return f"{text[0].upper()}{text[1:]}."
