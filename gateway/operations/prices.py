"""Prices, of the list or of one account: list, set, end, cancel, try on the past."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from gateway.audit_log import Author, record
from gateway.billing.charged import NoteProgress
from gateway.billing.usage.report import Span, read_span
from gateway.billing.usage.whatif import RepricedUsage, total_of, whatif
from gateway.catalog.price_overrides import (
    InvalidPriceOverride,
    read_offer,
    read_price_override,
    read_scheduled,
    read_start,
)
from gateway.catalog.schema import CatalogEntry
from gateway.checks.moments import microseconds_of, moment_of, timestamp
from gateway.errors import InvalidRequest
from gateway.ledger.prices import (
    LIST,
    PriceCache,
    PricePeriod,
    cancel_price,
    price_periods_of,
    read_price,
    read_prices,
    set_price,
)
from gateway.operations.accounts import owner_id
from gateway.operations.bodies import Body, Name, Reason
from gateway.operations.pages import cut_places, read_place, wrong_cursor
from gateway.operations.refusals import refusals, sentence
from gateway.pricing import Price, format_usd
from workers.contract.blobs import Blobs


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


class OfferBody(Body):
    """A price that is tried."""

    price: list[dict[str, Any]]
    minimum: str | None = None


class PriceTrialBody(Body):
    """Prices by model, and the days or moments of which the requests are priced again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prices": {
                        "pocket-chat": {
                            "price": [{"unit": "output_token", "amount": "0.05", "per": 1000000}]
                        }
                    },
                    "from": "2026-10-01",
                    "to": "2026-10-31",
                }
            ]
        },
    )

    prices: Annotated[dict[Name, OfferBody], Field(min_length=1, max_length=1000)]
    account: str | None = None
    first: Annotated[str | None, Field(alias="from")] = None
    last: Annotated[str | None, Field(alias="to")] = None
    tz: str = "UTC"


class RepricedView(TypedDict):
    """Requests of a model: what they cost, and what they would have cost.

    Those that the other price does not cover are counted separately, in neither amount.
    """

    model: str
    requests: int
    charged: str
    would_be: str
    difference: str
    not_priced: int
    not_priced_charged: str


PriceTrialView = TypedDict(
    "PriceTrialView",
    {
        "object": Literal["whatif"],
        "from": str,
        "to": str,
        "data": list[RepricedView],
        "total": RepricedView,
    },
)


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


def list_page(
    connection: Connection,
    *,
    model: str | None,
    account: str | None,
    limit: int,
    cursor: str | None,
    cache: PriceCache,
) -> tuple[list[PriceView], str | None]:
    """List prices that were, are or will be in force, or were cancelled, by model, account and
    start, and return the cursor of the next page."""
    place, owner = read_place(cursor), owner_id(connection, account)
    try:
        after = None if place is None else (place[2], place[1], moment_of(place[0]))
    except OverflowError:
        raise wrong_cursor(cursor) from None
    found = price_periods_of(
        connection,
        model=model,
        account_ids=None if owner is None else [owner],
        limit=limit + 1,
        after=after,
    )
    page, more = cut_places(found, limit, _place_of)
    read_prices(connection, (each.price_id for each in page if each.price_id is not None), cache)
    return [price_view(period, _price_of(connection, period, cache)) for period in page], more


@refusals()
def put(connection: Connection, author: Author, body: PriceBody, price: Price | None) -> PriceView:
    """Put a price in force for all accounts or for one. Without a price, end the account's own."""
    if price is None and body.account is None:
        raise InvalidRequest(
            "missing_required_parameter",
            "A list price does not end; send the price that follows.",
            param="price",
        )
    starts_at = start_of(body)
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


def start_of(body: PriceBody) -> datetime:
    """Return the start of a price. Raise ``InvalidRequest`` if it is too early."""
    with _start_refused():
        return read_start(body.starts, datetime.now(UTC))


@refusals()
def cancel(
    connection: Connection, author: Author, body: PriceCancelBody, *, cache: PriceCache
) -> PriceView:
    """Cancel a price that has not begun."""
    with _start_refused():
        starts_at = read_scheduled(body.starts)
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


@refusals(param="prices")
def read_offers(prices: Mapping[str, OfferBody]) -> dict[str, Price]:
    """Read prices by model. What a model uses is not checked: usage without a price is counted."""
    found = {}
    for model, body in prices.items():
        minimum = {} if body.minimum is None else {"minimum": body.minimum}
        found[model] = read_offer(model, {"price": body.price, **minimum})
    return found


def what_if(
    connection: Connection,
    prices: Mapping[str, Price],
    span: Span,
    *,
    account: str | None = None,
    model: str | None = None,
    without_accounts: Collection[int] = (),
    blobs: Blobs | None = None,
    progress: NoteProgress | None = None,
) -> PriceTrialView:
    """Return what the charged requests of a span would have cost at other prices, by model."""
    found = whatif(
        connection,
        prices,
        starts_at=span.starts_at,
        ends_at=span.ends_at,
        account_id=owner_id(connection, account),
        model=model,
        without_accounts=without_accounts,
        blobs=blobs,
        progress=progress,
    )
    return {
        "object": "whatif",
        "from": span.starts_at.astimezone(span.zone).isoformat(),
        "to": span.ends_at.astimezone(span.zone).isoformat(),
        "data": [_repriced_view(each) for each in found],
        "total": _repriced_view(total_of(found)),
    }


def what_if_span(body: PriceTrialBody) -> Span:
    return read_span(body.first, body.last, body.tz, now=datetime.now(UTC))


@contextlib.contextmanager
def _start_refused() -> Iterator[None]:
    """Translate the refusal of a start."""
    try:
        yield
    except InvalidPriceOverride as error:
        raise InvalidRequest("invalid_value", sentence(error), param="from") from None


def _repriced_view(each: RepricedUsage) -> RepricedView:
    return {
        "model": each.model,
        "requests": each.requests,
        "charged": format_usd(each.charged_nanos),
        "would_be": format_usd(each.repriced_nanos),
        "difference": format_usd(each.difference_nanos),
        "not_priced": each.unpriced_requests,
        "not_priced_charged": format_usd(each.unpriced_nanos),
    }


def _place_of(period: PricePeriod) -> tuple[int, int, str]:
    return microseconds_of(period.effective_from), period.account_id, period.model


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


def offer_digest(price: Price) -> list[Any]:
    """Return what two prices have in common if they are the same."""
    parts = [
        [part.unit, part.amount_nanos, part.per, sorted(part.when.items())]
        for part in price.components
    ]
    return [parts, price.minimum_nanos]
