"""Budgets and rate limits: what an account can ask about its own, and an operator set of any."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from litestar import Controller, Request, Response, delete, get, patch, post, put
from litestar.params import FromPath, FromQuery, JSONBody
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
from gateway.accounts.limits import LIMIT_MAX, Limit, list_limits, remove_limit, set_limit
from gateway.api.access import find_asked
from gateway.api.answers import json_response
from gateway.api.bodies import UsdAmount
from gateway.api.views import timestamp
from gateway.catalog.store import LiveCatalog
from gateway.database import Database
from gateway.errors import InvalidRequest, NotFound
from gateway.pricing import format_usd

Result = TypeVar("Result")

Model = Annotated[str, Field(min_length=1, max_length=200)]
Number = Annotated[int, Field(ge=1, le=LIMIT_MAX)]


class BudgetBody(BaseModel):
    """Body of ``POST /v1/admin/budgets``; without key or model it covers all of them together."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"account": "acme", "limit": "25.00", "window": "day", "name": "daily"}]
        },
    )

    account: str | int
    limit: UsdAmount
    window: Window
    hard: bool = True
    key: int | None = None
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

    account: str | int
    key: int | None = None
    model: Model | None = None
    requests_per_minute: Number | None = None
    tokens_per_minute: Number | None = None
    concurrent: Number | None = None


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
    ) -> Response[bytes]:
        def read(connection: Connection) -> list[dict[str, Any]]:
            owner = find_asked(request, connection, account)
            return _budget_views(connection, [owner], list_budgets(connection, owner.id))

        return await _read(request, read)

    @get(
        "/rate-limits",
        operation_id="ListRateLimits",
        summary="Limits of requests and tokens per minute, and of requests at once",
    )
    async def rate_limits(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[bytes]:
        def read(connection: Connection) -> list[dict[str, Any]]:
            owner = find_asked(request, connection, account)
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
    ) -> Response[bytes]:
        def read(connection: Connection) -> list[dict[str, Any]]:
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
    ) -> Response[bytes]:
        _check_model(request, data.model)

        def write(connection: Connection) -> dict[str, Any]:
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
        budget_id: FromPath[int],
        data: JSONBody[BudgetChange],
    ) -> Response[bytes]:
        def write(connection: Connection) -> dict[str, Any]:
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
        self, request: Request[Any, Any, Any], budget_id: FromPath[int]
    ) -> Response[bytes]:
        def write(connection: Connection) -> dict[str, Any]:
            return _one_budget(connection, end_budget(connection, budget_id))

        return json_response(await _write(request, write))

    @get(
        "/rate-limits",
        operation_id="ListAllRateLimits",
        summary="Rate limits of one account or of all",
    )
    async def rate_limits(
        self, request: Request[Any, Any, Any], account: FromQuery[str | None] = None
    ) -> Response[bytes]:
        def read(connection: Connection) -> list[dict[str, Any]]:
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
    ) -> Response[bytes]:
        _check_model(request, data.model)

        def write(connection: Connection) -> dict[str, Any]:
            owner = find_account(connection, data.account)
            limit = Limit(
                owner.id,
                data.key,
                data.model,
                requests_per_minute=data.requests_per_minute,
                tokens_per_minute=data.tokens_per_minute,
                concurrent_max=data.concurrent,
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
        key: FromQuery[int | None] = None,
        model: FromQuery[str | None] = None,
    ) -> Response[bytes]:
        def write(connection: Connection) -> dict[str, Any]:
            owner = find_account(connection, account)
            removed = remove_limit(connection, owner.id, key_id=key, model=model)
            return _limit_views([owner], [removed])[0]

        return json_response(await _write(request, write))


def budget_view(state: BudgetState, *, account: str) -> dict[str, Any]:
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


def limit_view(limit: Limit, *, account: str) -> dict[str, Any]:
    return {
        "object": "rate_limit",
        "account": account,
        "key": limit.key_id,
        "model": limit.model,
        "requests_per_minute": limit.requests_per_minute,
        "tokens_per_minute": limit.tokens_per_minute,
        "concurrent": limit.concurrent_max,
    }


def _one_budget(connection: Connection, budget: Budget) -> dict[str, Any]:
    owner = find_account(connection, budget.account_id)
    return _budget_views(connection, [owner], [budget])[0]


def _budget_views(
    connection: Connection, owners: Sequence[Account], found: Sequence[Budget]
) -> list[dict[str, Any]]:
    names = {owner.id: owner.name for owner in owners}
    states = budget_states(connection, found, datetime.now(UTC))
    return [budget_view(state, account=names[state.budget.account_id]) for state in states]


def _limit_views(owners: Sequence[Account], found: Sequence[Limit]) -> list[dict[str, Any]]:
    names = {owner.id: owner.name for owner in owners}
    return [limit_view(limit, account=names[limit.account_id]) for limit in found]


def _check_model(request: Request[Any, Any, Any], model: str | None) -> None:
    """Refuse a name that no model has or had: it would bound nothing, silently."""
    live: LiveCatalog = request.app.state.live
    if model is not None and model not in live.names_ever():
        raise NotFound("model_not_found", f"The model {model!r} does not exist.", param="model")


async def _read(
    request: Request[Any, Any, Any], read: Callable[[Connection], list[dict[str, Any]]]
) -> Response[bytes]:
    database: Database = request.app.state.database
    with _refused():
        return json_response({"object": "list", "data": await database.read(read)})


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
