"""Prices over HTTP: of the list, and of single accounts."""

from __future__ import annotations

from litestar import Controller, Response, get, post
from litestar.params import FromQuery, JSONBody

from gateway.api.http.answers import PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.errors import unknown_model
from gateway.operations import prices
from gateway.operations.prices import (
    PriceBody,
    PriceCancelBody,
    PriceTrialBody,
    PriceTrialView,
    PriceView,
    what_if,
    what_if_span,
)


class PricesController(Controller):
    path = "/v1/admin/prices"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "prices"}

    @get(
        operation_id="ListPrices",
        summary="List prices that were, are or will be in force, or were cancelled, in pages",
    )
    async def index(
        self,
        request: ApiRequest,
        model: FromQuery[str | None] = None,
        account: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[PriceView]]:
        check_limit(limit)
        return await page_response(
            request,
            prices.list_page,
            model=model,
            account=account,
            limit=limit,
            cursor=cursor,
            cache=request.services.live.prices,
        )

    @post(
        status_code=201,
        opt={"errors": [409]},
        operation_id="SetPrice",
        summary="Put a price in force, for all accounts or for one",
    )
    async def create(self, request: ApiRequest, data: JSONBody[PriceBody]) -> Response[PriceView]:
        live = request.services.live
        entry = live.entry(data.model)
        if entry is None:
            raise unknown_model(data.model)
        price = None if data.price is None else prices.read(entry, data.price, data.minimum)
        made = await write(request, prices.put, data, price)
        return json_response(made, status=201)

    @post(
        "/cancel",
        status_code=200,
        opt={"errors": [409]},
        operation_id="CancelPrice",
        summary="Cancel a price that has not begun",
        description="Until ten seconds before its start; the previous price stays in force.",
    )
    async def cancel(
        self, request: ApiRequest, data: JSONBody[PriceCancelBody]
    ) -> Response[PriceView]:
        live = request.services.live
        return json_response(await write(request, prices.cancel, data, cache=live.prices))

    @post(
        "/whatif",
        status_code=200,
        opt={"errors": [410, 429], "reads": True},
        operation_id="TryPrices",
        summary="What past requests would have cost at other prices; nothing is changed",
        description="Can take minutes: every charged request of the span is priced again.",
    )
    async def what_if(
        self, request: ApiRequest, data: JSONBody[PriceTrialBody]
    ) -> Response[PriceTrialView]:
        offered, span = prices.read_offers(data.prices), what_if_span(data)
        services = request.services
        found = await services.database.long_report(
            lambda connection: what_if(
                connection, offered, span, account=data.account, blobs=services.blobs
            ),
            account_id=request.key.account_id,
        )
        return json_response(found)
