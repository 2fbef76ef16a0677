"""Prices as an administrator sets them: of the list, and of one account's own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from litestar import Controller, Request, Response, get, post
from litestar.params import FromQuery, JSONBody
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from gateway.api.http.access import caller, requested_account
from gateway.api.http.answers import ListView, json_response
from gateway.catalog.price_overrides import (
    InvalidPriceOverride,
    read_price_override,
    read_scheduled,
    read_start,
)
from gateway.catalog.store import LiveCatalog
from gateway.checks.moments import timestamp
from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.ledger.prices import (
    LIST,
    PriceConflict,
    PricePeriod,
    cancel_price,
    price_periods_of,
    read_price,
    set_price,
)
from gateway.pricing import Price, format_usd
from gateway.sql.database import Database

T = TypeVar("T")


class PriceBody(BaseModel):
    """Body of ``POST /v1/admin/prices``; without ``price`` the account's own price ends."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "model": "pocket-chat",
                    "account": "acme",
                    "price": [
                        {"unit": "input_token", "amount": "0.01", "per": 1000000},
                        {"unit": "output_token", "amount": "0.05", "per": 1000000},
                    ],
                    "from": "2026-12-01T00:00:00Z",
                    "reason": "contract 17",
                }
            ]
        },
    )

    model: Annotated[str, Field(min_length=1, max_length=200)]
    account: str | None = None
    price: list[dict[str, Any]] | None = None
    minimum: str | None = None
    starts: Annotated[str | None, Field(alias="from")] = None
    reason: Annotated[str, Field(min_length=1, max_length=500)]


class PriceCancelBody(BaseModel):
    """Body of ``POST /v1/admin/prices/cancel``; ``from`` is the start of the price."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "model": "pocket-chat",
                    "account": "acme",
                    "from": "2026-12-01T00:00:00Z",
                    "reason": "wrong amount",
                }
            ]
        },
    )

    model: Annotated[str, Field(min_length=1, max_length=200)]
    account: str | None = None
    starts: Annotated[str, Field(alias="from")]
    reason: Annotated[str, Field(min_length=1, max_length=500)]


class PricePartView(TypedDict):
    unit: str
    amount: str
    per: int
    when: dict[str, str] | None


class PriceCancellationView(TypedDict):
    """Who took a price back before it began, when and why."""

    at: str
    actor: str
    reason: str


PriceView = TypedDict(
    "PriceView",
    {
        "object": Literal["price"],
        "model": str,
        "account_id": int | None,
        "from": str,
        "price_id": int | None,
        "price": list[PricePartView] | None,
        "minimum": str | None,
        "source": str,
        "actor": str,
        "reason": str,
        "cancelled": PriceCancellationView | None,
    },
)


class PricesController(Controller):
    path = "/v1/admin/prices"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get(
        operation_id="ListPrices",
        summary="Every price that was, is or will be in force, or was cancelled",
    )
    async def index(
        self,
        request: Request[Any, Any, Any],
        model: FromQuery[str | None] = None,
        account: FromQuery[str | None] = None,
    ) -> Response[ListView[PriceView]]:
        database: Database = request.app.state.database
        live: LiveCatalog = request.app.state.live

        def read(connection: Connection) -> list[PriceView]:
            account_id = (
                None if account is None else requested_account(request, connection, account).id
            )
            found = price_periods_of(connection, model=model, account_id=account_id)
            return [period_view(period, _price_of(connection, period, live)) for period in found]

        return json_response(
            {
                "object": "list",
                "data": await database.report(read, account_id=caller(request).account_id),
            }
        )

    @post(
        status_code=201,
        opt={"errors": [409]},
        operation_id="SetPrice",
        summary="Put a price in force, for everybody or for one account",
    )
    async def create(
        self, request: Request[Any, Any, Any], data: JSONBody[PriceBody]
    ) -> Response[PriceView]:
        database: Database = request.app.state.database
        live: LiveCatalog = request.app.state.live
        entry = live.entry(data.model)
        if entry is None:
            raise NotFound(
                "model_not_found", f"The model {data.model!r} does not exist.", param="model"
            )
        if data.price is None and data.account is None:
            raise InvalidRequest(
                "missing_required_parameter",
                "A list price does not end; send the price that follows.",
                param="price",
            )
        try:
            price = None
            if data.price is not None:
                told: dict[str, Any] = {"price": data.price}
                if data.minimum is not None:
                    told["minimum"] = data.minimum
                price = read_price_override(entry, told)
            starts_at = read_start(data.starts, datetime.now(UTC))
        except InvalidPriceOverride as error:
            raise InvalidRequest("invalid_price", f"{error}.", param="price") from None

        def write(connection: Connection) -> PricePeriod:
            account_id = LIST
            if data.account is not None:
                account_id = requested_account(request, connection, data.account).id
            return set_price(
                connection,
                data.model,
                price,
                account_id=account_id,
                starts_at=starts_at,
                actor=caller(request).prefix,
                reason=data.reason,
            )

        made = await _write(database, write)
        return json_response(period_view(made, price), status=201)

    @post(
        "/cancel",
        status_code=200,
        opt={"errors": [409]},
        operation_id="CancelPrice",
        summary="Take back a price that has not begun",
        description="Until ten seconds before its start; what was in force before it stays.",
    )
    async def cancel(
        self, request: Request[Any, Any, Any], data: JSONBody[PriceCancelBody]
    ) -> Response[PriceView]:
        database: Database = request.app.state.database
        live: LiveCatalog = request.app.state.live
        try:
            starts_at = read_scheduled(data.starts)
        except InvalidPriceOverride as error:
            raise InvalidRequest("invalid_value", f"{error}.", param="from") from None

        def write(connection: Connection) -> tuple[PricePeriod, Price | None]:
            account_id = LIST
            if data.account is not None:
                account_id = requested_account(request, connection, data.account).id
            period = cancel_price(
                connection,
                data.model,
                account_id=account_id,
                starts_at=starts_at,
                now=datetime.now(UTC),
                actor=caller(request).prefix,
                reason=data.reason,
            )
            return period, _price_of(connection, period, live)

        return json_response(period_view(*await _write(database, write)))


async def _write(database: Database, function: Callable[[Connection], T]) -> T:
    """Run a change of prices, and raise what it refuses as errors of the API."""
    try:
        return await database.write(function)
    except PriceConflict as error:
        raise Conflict("price_conflict", f"{error}.", param="from") from None
    except LookupError as error:
        raise NotFound("not_found", f"{error.args[0]}.") from None
    except ValueError as error:
        raise InvalidRequest("invalid_value", f"{error}.") from None


def _price_of(connection: Connection, period: PricePeriod, live: LiveCatalog) -> Price | None:
    if period.price_id is None:
        return None
    return read_price(connection, period.price_id, live.prices)


def period_view(period: PricePeriod, price: Price | None) -> PriceView:
    return {
        "object": "price",
        "model": period.model,
        "account_id": period.account_id or None,
        "from": timestamp(period.effective_from),
        "price_id": period.price_id,
        "price": None
        if price is None
        else [
            {
                "unit": part.unit,
                "amount": format_usd(part.amount_nanos),
                "per": part.per,
                "when": dict(part.when) or None,
            }
            for part in price.components
        ],
        "minimum": format_usd(price.minimum_nanos) if price and price.minimum_nanos else None,
        "source": period.source,
        "actor": period.actor,
        "reason": period.reason,
        "cancelled": None
        if period.cancelled is None
        else {
            "at": timestamp(period.cancelled.cancelled_at),
            "actor": period.cancelled.actor,
            "reason": period.cancelled.reason,
        },
    }
