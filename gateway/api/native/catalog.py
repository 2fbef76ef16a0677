"""The catalog: OpenAI's and OpenRouter's lists of models, and complete entries."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Final, cast

from litestar import Controller, Response, get
from litestar.params import FromPath, FromQuery

from gateway.api.http.answers import DataView, ListView, json_response
from gateway.api.http.headers import ALIAS_HEADER
from gateway.api.http.request import ApiRequest
from gateway.api.openai.batches import ENDPOINTS
from gateway.catalog.listing import (
    Sort,
    batch_view,
    choose,
    entry_view,
    model_view,
    providers_view,
)
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.tasks import Task
from gateway.catalog.views import (
    BatchableView,
    EntryView,
    ModelsView,
    ModelView,
    OfferedEntryView,
    OfferedModelView,
    ProvidersView,
    WhosePriceView,
)
from gateway.errors import InvalidRequest
from gateway.performance import StatsView, Window, output_kind

STATS: Final = "/stats"
PROVIDERS: Final = "/endpoints"
"""Suffix of OpenRouter's path for the providers of a model."""


class CatalogController(Controller):
    path = "/v1"
    tags = ["Catalog"]
    opt = {"scope": "read"}

    @get(
        "/models",
        operation_id="ListModels",
        summary="List all models in OpenAI's shape, with prices",
    )
    async def models(self, request: ApiRequest) -> Response[ModelsView]:
        announcements = request.services.requests.health.announcements
        models: list[OfferedModelView] = [
            _with_price_origin(
                model_view(entry, announcements, request.services.live.on_sale_since(entry.name)),
                _price_origin(request, entry),
            )
            for entry in request.entries()
        ]
        # The last two are required by OpenRouter's client.
        return json_response(
            {
                "object": "list",
                "data": models,
                "total_count": len(models),
                "links": {"next": None},
            }
        )

    @get(
        "/models/{name:path}",
        operation_id="GetModel",
        summary="One model in OpenAI's shape; under /stats its recent performance",
        description="`GET /v1/models/{name}/stats?window=15m|1h|24h` returns queue time, errors "
        "and goodput over all requests of that time and, by kind of output: time to first token "
        "and time per output token; time per step and outputs; or time to first audio and "
        "real-time factor.",
    )
    async def model(
        self,
        request: ApiRequest,
        name: FromPath[str],
        window: FromQuery[Window] = "1h",
    ) -> Response[OfferedModelView] | Response[StatsView] | Response[DataView[ProvidersView]]:
        # Names of models can contain slashes, so the router cannot match a suffix.
        live = request.services.live
        if name.endswith(STATS) and live.find(name.strip("/")) is None:
            entry = _find(request, name.removesuffix(STATS))
            kind = output_kind(entry.task)
            return json_response(
                await request.services.performance.stats(entry.name, entry.slo, window, kind=kind)
            )
        if name.endswith(PROVIDERS) and live.find(name.strip("/")) is None:
            entry = _find(request, name.removesuffix(PROVIDERS))
            view = model_view(
                entry,
                request.services.requests.health.announcements,
                live.on_sale_since(entry.name),
            )
            providers: DataView[ProvidersView] = {"data": providers_view(entry, view)}
            return json_response(providers)
        entry = _find(request, name)
        offered = _with_price_origin(
            model_view(
                entry,
                request.services.requests.health.announcements,
                live.on_sale_since(entry.name),
            ),
            _price_origin(request, entry),
        )
        asked = name.lstrip("/")
        if asked == entry.name:
            return json_response(offered)
        # Clients look for the id that they requested, so keep it and add what it is an alias of.
        offered["id"], offered["alias_of"] = asked, entry.name
        return json_response(offered, headers={ALIAS_HEADER: f"{asked} -> {entry.name}"})

    @get(
        "/catalog",
        operation_id="ListCatalog",
        summary="List models with tasks, prices, limits and availability; filter and sort them",
    )
    async def index(
        self,
        request: ApiRequest,
        task: FromQuery[Task | None] = None,
        max_price: FromQuery[str | None] = None,
        available: FromQuery[bool | None] = None,
        good_for: FromQuery[str | None] = None,
        sort: FromQuery[Sort] = "name",
    ) -> Response[ListView[OfferedEntryView]]:
        announcements = request.services.requests.health.announcements
        is_operator = "admin" in request.key.scopes
        chosen = choose(
            request.entries(),
            announcements,
            task=task,
            max_price=_amount(max_price),
            available=available,
            good_for=good_for,
            sort=sort,
        )
        return json_response(
            {
                "object": "list",
                "data": [
                    _full_view(
                        request, entry_view(entry, announcements, for_operator=is_operator), entry
                    )
                    for entry in chosen
                ],
            }
        )

    @get(
        "/catalog/{name:path}",
        operation_id="GetCatalogEntry",
        summary="Get the complete entry of one model",
    )
    async def entry(self, request: ApiRequest, name: FromPath[str]) -> Response[OfferedEntryView]:
        entry = _find(request, name)
        view = entry_view(
            entry,
            request.services.requests.health.announcements,
            for_operator="admin" in request.key.scopes,
        )
        return json_response(_full_view(request, view, entry))


def _with_price_origin(model: ModelView, whose: WhosePriceView) -> OfferedModelView:
    return cast("OfferedModelView", {**model, **whose})


def _full_view(request: ApiRequest, view: EntryView, entry: CatalogEntry) -> OfferedEntryView:
    whole = {**view, **_in_batches(entry), **_price_origin(request, entry)}
    return cast("OfferedEntryView", whole)


def _in_batches(entry: CatalogEntry) -> BatchableView:
    """Return the batch price, if an endpoint of batches serves one of the entry's tasks."""
    does = {entry.task, *entry.also}
    asked_for = any(endpoint.tasks & does for endpoint in ENDPOINTS.values())
    return {"batch": batch_view(entry) if asked_for else None}


def _price_origin(request: ApiRequest, entry: CatalogEntry) -> WhosePriceView:
    """Return whether the price is the account's override or the list price."""
    own = request.services.live.has_price_override(entry.name, request.key.account_id)
    return {"price_of": "account" if own else "list"}


def _find(request: ApiRequest, name: str) -> CatalogEntry:
    quotes = request.services.requests.quotes
    entry = quotes.entry(name.lstrip("/"), request.key.account_id)
    request.key.check_model(entry.name)
    return entry


def _amount(text: str | None) -> Decimal | None:
    if text is None:
        return None
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite():
        raise InvalidRequest(
            "invalid_value",
            f"max_price is {text!r}; send an amount in USD, such as 0.05.",
            param="max_price",
        )
    return amount
