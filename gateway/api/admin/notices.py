"""Subscriptions to notices over HTTP, and what was sent to them."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, post
from litestar.params import FromQuery, JSONBody

from gateway.api.http.answers import PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import IdInPath
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.notices.kinds import AnyKind
from gateway.operations import notices
from gateway.operations.notices import (
    NewSubscriptionView,
    NoticeView,
    SubscriptionBody,
    SubscriptionView,
)


class AdminNoticesController(Controller):
    path = "/v1/admin/notices"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "notices"}

    @get(
        "/",
        operation_id="ListAllNotices",
        summary="List notices with their deliveries, newest first, of an account or of all",
    )
    async def index(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        kind: FromQuery[AnyKind | None] = None,
        limit: FromQuery[int] = 20,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[NoticeView]]:
        check_limit(limit)
        return await page_response(
            request, notices.sent_of, account=account, kind=kind, limit=limit, cursor=cursor
        )

    @get(
        "/subscriptions",
        operation_id="ListNoticeSubscriptions",
        summary="List where notices go, of an account or of all and the operator",
    )
    async def subscriptions(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[SubscriptionView]]:
        check_limit(limit)
        return await page_response(
            request, notices.list_page, account=account, limit=limit, cursor=cursor
        )

    @post(
        "/subscriptions",
        status_code=201,
        opt={"errors": [409]},
        operation_id="AddNoticeSubscription",
        summary="Send notices of an account, or those for the operator, to a URL or by mail",
    )
    async def add(
        self, request: ApiRequest, data: JSONBody[SubscriptionBody]
    ) -> Response[NewSubscriptionView]:
        services = request.services
        made = await write(
            request, notices.add, data, settings=services.settings, pepper=services.pepper
        )
        return json_response(made, status=201)

    @delete(
        "/subscriptions/{subscription_id:int}",
        status_code=200,
        operation_id="RemoveNoticeSubscription",
        summary="Stop sending notices to a subscription",
    )
    async def remove(
        self, request: ApiRequest, subscription_id: IdInPath
    ) -> Response[SubscriptionView]:
        return json_response(await write(request, notices.remove, subscription_id))

    @post(
        "/subscriptions/{subscription_id:int}/test",
        status_code=202,
        operation_id="TestNoticeSubscription",
        summary="Send a test notice to a subscription",
    )
    async def test(self, request: ApiRequest, subscription_id: IdInPath) -> Response[NoticeView]:
        made = await write(request, notices.send_test, subscription_id)
        return json_response(made, status=202)
