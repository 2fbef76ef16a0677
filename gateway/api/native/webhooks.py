"""Webhook deliveries: their attempts, and sending one again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NotRequired, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery

from gateway.api.http.access import requested_account
from gateway.api.http.answers import ListView, PageView, json_response, page_view
from gateway.api.http.bodies import check_limit
from gateway.api.http.request import ApiRequest
from gateway.checks.moments import timestamp
from gateway.errors import InvalidRequest, NotFound
from gateway.ids import is_request_id
from gateway.webhooks.deliveries import Delivery, find_delivery, list_deliveries, send_again

Status = Literal["pending", "delivered", "gone", "failed"]


class AttemptView(TypedDict):
    """One attempt; ``code`` is the receiver's HTTP status."""

    number: int
    started_at: str
    duration_ms: int
    code: int | None
    error: str | None


class DeliveryView(TypedDict):
    """A webhook delivery with its attempts; administrators also get ``account_id``."""

    object: Literal["webhook.delivery"]
    id: str
    request_id: str
    url: str
    status: str
    queued_at: str
    next_attempt_at: str | None
    ended_at: str | None
    attempts: list[AttemptView]
    account_id: NotRequired[int]


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
        owner = await request.services.database.read(
            lambda connection: requested_account(request, connection, account)
        )
        return await _page(request, owner.id, limit=limit, cursor=cursor, status=status)

    @get(
        "/admin/webhooks/deliveries",
        opt={"scope": "admin"},
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
        owner = await request.services.database.read(
            lambda connection: requested_account(request, connection, account)
        )
        # Raises if the account has no such request. A request without a webhook has no delivery.
        await request.services.requests.lookup.find(owner.id, request_id)
        found = await request.services.database.read(
            lambda connection: find_delivery(connection, request_id, account_id=owner.id)
        )
        data = [] if found is None else [delivery_view(found)]
        return json_response({"object": "list", "data": data})

    @post(
        "/requests/{request_id:str}/redeliver",
        status_code=202,
        opt={"scope": "inference"},
        operation_id="RedeliverWebhook",
        summary="Send the webhook of a request again, with the same webhook-id",
    )
    async def redeliver(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[DeliveryView]:
        return await _send_again(request, request_id, request.key.account_id)

    @post(
        "/admin/requests/{request_id:str}/redeliver",
        status_code=202,
        opt={"scope": "admin"},
        operation_id="RedeliverWebhookOfAny",
        summary="Send the webhook of any account's request again",
    )
    async def redeliver_any(
        self, request: ApiRequest, request_id: FromPath[str]
    ) -> Response[DeliveryView]:
        return await _send_again(request, request_id, None)


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
    found = await request.services.database.report(
        lambda connection: list_deliveries(
            connection, account_id=account_id, limit=limit + 1, status=status, before=cursor
        ),
        account_id=account_id,
    )
    views = [delivery_view(one) for one in found[:limit]]
    if account_id is None:
        for one, view in zip(found, views, strict=False):
            view["account_id"] = one.account_id
    return json_response(
        page_view(views, found[limit - 1].request_id if len(found) > limit else None)
    )


async def _send_again(
    request: ApiRequest, request_id: str, account_id: int | None
) -> Response[DeliveryView]:
    found = None
    if is_request_id(request_id):
        found = await request.services.database.write(
            lambda connection: send_again(
                connection, request_id, account_id=account_id, now=datetime.now(UTC)
            )
        )
    if found is None:
        raise NotFound(
            "delivery_not_found",
            f"No webhook delivery for {request_id!r}: the request has not ended, has no "
            "webhook, or its delivery was deleted.",
            param="request_id",
        )
    return json_response(delivery_view(found), status=202)


def delivery_view(found: Delivery) -> DeliveryView:
    """Return the view of a delivery. An attempt that a stopping gateway interrupted is missing."""
    return {
        "object": "webhook.delivery",
        "id": found.request_id,
        "request_id": found.request_id,
        "url": found.url,
        "status": found.status,
        "queued_at": timestamp(found.queued_at),
        "next_attempt_at": timestamp(found.due_at) if found.due_at else None,
        "ended_at": timestamp(found.ended_at) if found.ended_at else None,
        "attempts": [
            {
                "number": attempt.number,
                "started_at": timestamp(attempt.started_at),
                "duration_ms": attempt.duration_ms,
                "code": attempt.code,
                "error": attempt.error,
            }
            for attempt in found.attempts
        ],
    }
