"""Prices, of the list or of one account: list, set, end, cancel."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.catalog.price_overrides import (
    InvalidPriceOverride,
    read_price_override,
    read_scheduled,
    read_start,
)
from gateway.catalog.schema import CatalogEntry
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest
from gateway.ledger.prices import (
    LIST,
    PriceCache,
    PricePeriod,
    cancel_price,
    price_periods_of,
    read_price,
    set_price,
)
from gateway.operations.accounts import owner_id
from gateway.operations.bodies import Body, Name, Reason
from gateway.operations.refusals import refusals, sentence
from gateway.pricing import Price, format_usd


class PriceBody(Body):
    """A price to be put in force. Without ``price``, the account's own price ends."""

    model_config = ConfigDict(
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

    model: Name
    account: str | None = None
    price: list[dict[str, Any]] | None = None
    minimum: str | None = None
    starts: Annotated[str | None, Field(alias="from")] = None
    reason: Reason


class PriceCancelBody(Body):
    """A price to be cancelled, found by its start (``from``)."""

    model_config = ConfigDict(
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

    model: Name
    account: str | None = None
    starts: Annotated[str, Field(alias="from")]
    reason: Reason


class PricePartView(TypedDict):
    unit: str
    amount: str
    per: int
    when: dict[str, str] | None


class PriceCancellationView(TypedDict):
    """When, by whom and why a price was cancelled before it began."""

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


@refusals()
def read(entry: CatalogEntry, components: object, minimum: str | None) -> Price:
    """Read a price for a model, in the form of the catalog."""
    value = {"price": components}
    return read_price_override(entry, value if minimum is None else {**value, "minimum": minimum})


def list_all(
    connection: Connection, *, model: str | None, account: str | None, cache: PriceCache
) -> list[PriceView]:
    """Return every price that was, is or will be in force, or was cancelled."""
    found = price_periods_of(connection, model=model, account_id=owner_id(connection, account))
    return [price_view(period, _price_of(connection, period, cache)) for period in found]


@refusals()
def put(connection: Connection, author: Author, body: PriceBody, price: Price | None) -> PriceView:
    """Put a price in force for all accounts or for one. Without a price, end the account's own."""
    if price is None and body.account is None:
        raise InvalidRequest(
            "missing_required_parameter",
            "A list price does not end; send the price that follows.",
            param="price",
        )
    starts_at = read_start(body.starts, datetime.now(UTC))
    account_id = owner_id(connection, body.account)
    made = set_price(
        connection,
        body.model,
        price,
        account_id=account_id or LIST,
        starts_at=starts_at,
        actor=author.name,
        reason=body.reason,
    )
    view = price_view(made, price)
    record(
        connection,
        author,
        "price.end" if price is None else "price.set",
        f"model {body.model}",
        account_id=account_id,
        after=view,
        reason=body.reason,
    )
    return view


@refusals()
def cancel(
    connection: Connection, author: Author, body: PriceCancelBody, *, cache: PriceCache
) -> PriceView:
    """Cancel a price that has not begun."""
    try:
        starts_at = read_scheduled(body.starts)
    except InvalidPriceOverride as error:
        raise InvalidRequest("invalid_value", sentence(error), param="from") from None
    account_id = owner_id(connection, body.account)
    period = cancel_price(
        connection,
        body.model,
        account_id=account_id or LIST,
        starts_at=starts_at,
        now=datetime.now(UTC),
        actor=author.name,
        reason=body.reason,
    )
    view = price_view(period, _price_of(connection, period, cache))
    record(
        connection,
        author,
        "price.cancel",
        f"model {body.model}",
        account_id=account_id,
        before=view,
        reason=body.reason,
    )
    return view


def _price_of(connection: Connection, period: PricePeriod, cache: PriceCache) -> Price | None:
    return None if period.price_id is None else read_price(connection, period.price_id, cache)


def price_view(period: PricePeriod, price: Price | None) -> PriceView:
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
