"""Webhook deliveries: their attempts, and sending one again."""

from __future__ import annotations

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery

from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView, PageView, json_response, page_view
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import write
from gateway.api.http.request import ApiRequest
from gateway.errors import InvalidRequest
from gateway.ids import is_request_id
from gateway.operations import webhooks
from gateway.operations.webhooks import DeliveryView, delivery_view
from gateway.webhooks.deliveries import Status, find_delivery


class WebhooksController(Controller):
    path = "/v1"
    tags = ["Requests"]

    @get(
        "/webhooks/deliveries",
        opt={"scope": "read"},
        operation_id="ListWebhookDeliveries",
        summary="List webhook deliveries with their attempts, newest request first, in pages",
        description="With the scope admin: of any account.",
    )
    async def index(
        self,
        request: ApiRequest,
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
        status: FromQuery[Status | None] = None,
        account: FromQuery[str | None] = None,
    ) -> Response[PageView[DeliveryView]]:
        database = request.services.database
        owner = await database.read(
            lambda connection: requested_account(request, connection, account, "webhooks")
        )
        return await _page(request, owner.id, limit=limit, cursor=cursor, status=status)

    @get(
        "/admin/webhooks/deliveries",
        opt={"scope": "admin", "area": "webhooks"},
        operation_id="ListWebhookDeliveriesOfAll",
        summary="List the webhook deliveries of all accounts",
    )
    async def of_all(
        self,
        request: ApiRequest,
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
        status: FromQuery[Status | None] = None,
    ) -> Response[PageView[DeliveryView]]:
        return await _page(request, None, limit=limit, cursor=cursor, status=status)

    @get(
        "/requests/{request_id:str}/deliveries",
        opt={"scope": "read"},
        operation_id="GetWebhookDeliveries",
        summary="Get the webhook delivery of a request, with its attempts",
        description="With the scope admin: of any account.",
    )
    async def of_request(
        self,
        request: ApiRequest,
        request_id: FromPath[str],
        account: FromQuery[str | None] = None,
    ) -> Response[ListView[DeliveryView]]:
        database = request.services.database
        owner = await database.read(
            lambda connection: requested_account(request, connection, account, "webhooks")
        )
        # Raises if the account has no such request. A request without a webhook has no delivery.
        await request.services.requests.lookup.find(owner.id, request_id)
        found = await database.read(
            lambda connection: find_delivery(connection, request_id, account_id=owner.id)
        )
        data = [] if found is None else [delivery_view(found)]
        return json_response({"object": "list", "data": data})

    @post(
        "/requests/{request_id:str}/redeliver",
        status_code=202,
        opt={"scope": "inference", "least": "owner"},
        operation_id="RedeliverWebhook",
        summary="Send the webhook of a request again, with the same webhook-id",
    )
    async def redeliver(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[DeliveryView]:
        account_id = request.key.account_id
        made = await write(request, webhooks.resend, request_id, account_id=account_id)
        return json_response(made, status=202)

    @post(
        "/admin/requests/{request_id:str}/redeliver",
        status_code=202,
        opt={"scope": "admin", "area": "webhooks"},
        operation_id="RedeliverWebhookOfAny",
        summary="Send the webhook of any account's request again",
    )
    async def redeliver_any(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[DeliveryView]:
        made = await write(request, webhooks.resend, request_id, account_id=None)
        return json_response(made, status=202)


async def _page(
    request: ApiRequest,
    account_id: int | None,
    *,
    limit: int,
    cursor: str | None,
    status: Status | None,
) -> Response[PageView[DeliveryView]]:
    check_limit(limit)
    if cursor is not None and not is_request_id(cursor):
        raise InvalidRequest(
            "invalid_value",
            f"cursor is {cursor!r}; send the next_cursor of an answer.",
            param="cursor",
        )
    database = request.services.database
    found = await database.report(
        lambda connection: webhooks.deliveries(
            connection, account_id, limit=limit + 1, status=status, before=cursor
        ),
        account_id=account_id,
    )
    next_cursor = found[limit - 1]["request_id"] if len(found) > limit else None
    return json_response(page_view(found[:limit], next_cursor))
