"""The catalog: OpenAI's and OpenRouter's lists of models, and complete entries."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final, cast

from litestar import Controller, Response, get
from litestar.params import FromPath, FromQuery

from gateway.api.http.answers import DataView, ListView, json_response
from gateway.api.http.fields import refuse_unknown_parameters
from gateway.api.http.guards import VISITOR, refuse_visitor
from gateway.api.http.headers import ALIAS_HEADER
from gateway.api.http.request import ApiRequest
from gateway.catalog.availability import availability
from gateway.catalog.derived import once_per_entry
from gateway.catalog.listing import batch_view, entry_view, model_view, providers_view
from gateway.catalog.picking.filters import (
    CatalogFilters,
    FacetsView,
    choose,
    facets,
    known_value,
    read_sort,
    read_words,
)
from gateway.catalog.picking.pick import pick, read_wish
from gateway.catalog.schema import CatalogEntry
from gateway.catalog.views import (
    BatchableView,
    EntryView,
    ModelsView,
    ModelView,
    OfferedEntryView,
    OfferedModelView,
    PickView,
    ProvidersView,
    WhosePriceView,
)
from gateway.errors import InvalidRequest
from gateway.performance import StatsView, Window, output_kind
from gateway.pricing import NANOS_PER_USD

STATS: Final = "/stats"
PROVIDERS: Final = "/endpoints"
"""Suffix of OpenRouter's path for the providers of a model."""


_USD: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,18})?", re.ASCII)
"""An amount, finer than a nano-dollar too: it is compared with the price of a single token."""
LIST_PARAMETERS: Final = (
    *("task", "role", "tier", "vendor", "family", "good_for", "q"),
    *("available", "max_price", "typical_max", "sort"),
)
PICK_PARAMETERS: Final = (
    *("task", "role", "q", "budget"),
    *("available", "language", "license", "max_seconds"),
)


class CatalogView(ListView[OfferedEntryView]):
    """Models, and the values of filters with the number of models of each."""

    facets: FacetsView


class CatalogController(Controller):
    path = "/v1"
    tags = ["Catalog"]
    opt = {"scope": "read", "public": True}

    @get(
        "/models",
        operation_id="ListModels",
        summary="List all models in OpenAI's shape, with prices",
        description="`available=true` leaves out models that cannot be called now.",
    )
    async def models(
        self, request: ApiRequest, available: FromQuery[bool | None] = None
    ) -> Response[ModelsView]:
        announcements = request.services.requests.health.announcements
        models: list[OfferedModelView] = [
            _with_price_origin(
                model_view(entry, announcements, request.services.live.on_sale_since(entry.name)),
                _price_origin(request, entry),
            )
            for entry in request.entries()
            if available in (None, availability(entry, announcements) is None)
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
            if request.key is VISITOR:
                refuse_visitor(request)
            entry = _find(request, name.removesuffix(STATS))
            kind = output_kind(entry.task)
            stats = await request.services.performance.stats(
                entry.name, entry.slo, window, kind=kind
            )
            return json_response(stats if "admin" in request.key.scopes else _of_all(stats))
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
        asked = live.spelling(name.lstrip("/"))
        if asked == entry.name:
            return json_response(offered)
        # Clients look for the id that they requested, so keep it and add what it is an alias of.
        offered["id"], offered["alias_of"] = asked, entry.name
        return json_response(offered, headers={ALIAS_HEADER: f"{asked} -> {entry.name}"})

    @get(
        "/catalog",
        operation_id="ListCatalog",
        summary="List models with tasks, prices, limits and availability; filter and sort them",
        description="`facets` lists the values that the filters accept. `typical_max` and "
        "`sort=typical` compare prices of a typical order, whatever their units; `q` is a text, "
        "each word of which must occur in the entry. Anything unknown is refused.",
    )
    async def index(
        self,
        request: ApiRequest,
        task: FromQuery[str | None] = None,
        role: FromQuery[str | None] = None,
        tier: FromQuery[str | None] = None,
        vendor: FromQuery[str | None] = None,
        family: FromQuery[str | None] = None,
        good_for: FromQuery[str | None] = None,
        q: FromQuery[str | None] = None,
        available: FromQuery[bool | None] = None,
        max_price: FromQuery[str | None] = None,
        typical_max: FromQuery[str | None] = None,
        sort: FromQuery[str] = "name",
    ) -> Response[CatalogView]:
        refuse_unknown_parameters(request, LIST_PARAMETERS)
        entries = request.entries()

        def known(name: str, value: str | None) -> Any:
            return None if value is None else known_value(name, value, entries)

        filters = CatalogFilters(
            task=known("task", task),
            role=known("role", role),
            tier=known("tier", tier),
            vendor=known("vendor", vendor),
            family=known("family", family),
            good_for=known("good_for", good_for),
            available=available,
            max_price=_amount("max_price", max_price),
            typical_max=_amount("typical_max", typical_max),
            words=read_words(q),
        )
        announcements = request.services.requests.health.announcements
        order = read_sort(sort)
        chosen = choose(
            entries,
            announcements,
            filters,
            find=request.find,
            sort=order,
            seconds=await _seconds(request) if order in ("speed", "-speed") else None,
        )
        is_operator = "admin" in request.key.scopes
        return json_response(
            {
                "object": "list",
                "data": [
                    _full_view(
                        request,
                        entry_view(
                            entry, announcements, find=request.find, for_operator=is_operator
                        ),
                        entry,
                    )
                    for entry in chosen
                ],
                "facets": facets(entries),
            }
        )

    @get(
        "/catalog/pick",
        operation_id="PickModels",
        summary="Pick models for a task, a role and a budget, each with its reason",
        description="`task` is a task's name or words of your own, as is `q`; `budget` is in USD "
        "for one typical result. `best` fits most words within the budget, `cheaper` costs less, "
        "`better` is of a higher tier, and `today` runs on this gateway now. `left_out` lists what "
        "does not meet a condition: the budget, `available`, `language`, `license` or "
        "`max_seconds`, as measured here.",
    )
    async def pick(
        self,
        request: ApiRequest,
        task: FromQuery[str | None] = None,
        role: FromQuery[str | None] = None,
        q: FromQuery[str | None] = None,
        budget: FromQuery[str | None] = None,
        available: FromQuery[bool] = False,
        language: FromQuery[str | None] = None,
        license: FromQuery[str | None] = None,
        max_seconds: FromQuery[float | None] = None,
    ) -> Response[PickView]:
        refuse_unknown_parameters(request, PICK_PARAMETERS)
        entries = request.entries()
        most = _amount("budget", budget)
        wish = read_wish(
            entries,
            task=task,
            role=role,
            text=q,
            budget_nanos=None if most is None else math.floor(most * NANOS_PER_USD),
            available=available,
            language=language,
            license=license,
            seconds_max=max_seconds,
        )
        return json_response(
            pick(
                entries,
                request.services.requests.health.announcements,
                wish,
                find=request.find,
                seconds=await _seconds(request),
            )
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
            find=request.find,
            for_operator="admin" in request.key.scopes,
        )
        return json_response(_full_view(request, view, entry))


def _of_all(stats: StatsView) -> StatsView:
    """Return statistics without those of each version, which concern the operator alone."""
    return cast("StatsView", {name: stats[name] for name in stats if name != "versions"})  # type: ignore[literal-required]  # its own


def _with_price_origin(model: ModelView, whose: WhosePriceView) -> OfferedModelView:
    return cast("OfferedModelView", {**model, **whose})


def _full_view(request: ApiRequest, view: EntryView, entry: CatalogEntry) -> OfferedEntryView:
    whole = {**view, **_in_batches(entry), **_price_origin(request, entry)}
    return cast("OfferedEntryView", whole)


@once_per_entry
def _in_batches(entry: CatalogEntry) -> BatchableView:
    return {"batch": batch_view(entry)}


def _price_origin(request: ApiRequest, entry: CatalogEntry) -> WhosePriceView:
    """Return whether the price is the account's override or the list price."""
    own = request.services.live.has_price_override(entry.name, request.key.account_id)
    return {"price_of": "account" if own else "list"}


def _find(request: ApiRequest, name: str) -> CatalogEntry:
    quotes = request.services.requests.quotes
    entry = quotes.entry(name.lstrip("/"), request.key.account_id)
    request.key.check_model(entry.name)
    return entry


async def _seconds(request: ApiRequest) -> Mapping[str, float]:
    """Return the durations measured here, by model."""
    services = request.services
    return await services.performance.median_seconds(services.live.names())


def _amount(name: str, text: str | None) -> Fraction | None:
    if text is None:
        return None
    if not _USD.fullmatch(text):
        raise InvalidRequest(
            "invalid_value",
            f"{name} is {text!r}; send an amount in USD, such as 0.05.",
            param=name,
        )
    return Fraction(text)
