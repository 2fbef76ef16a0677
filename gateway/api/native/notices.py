"""Notices of an account: what was sent, and the account's own subscriptions."""

from __future__ import annotations

from typing import Any, Final

from litestar import Controller, Response, delete, get, post
from litestar.params import FromQuery, JSONBody

from gateway.api.http.access import requested_account
from gateway.api.http.answers import PageView, json_response, page_view
from gateway.api.http.bodies import check_limit
from gateway.api.http.fields import IdInPath
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.notices.kinds import AnyKind
from gateway.operations import notices
from gateway.operations.notices import (
    ConfirmationBody,
    NoticeView,
    OwnSubscriptionBody,
    SubscriptionView,
)

OWNERS: Final[dict[str, Any]] = {"scope": "inference", "least": "owner"}


class NoticesController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        "/notices",
        operation_id="ListNotices",
        summary="List what the account was told, newest first, with each delivery",
        description="With the scope admin: of any account.",
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
        database = request.services.database
        owner = await database.read(
            lambda connection: requested_account(request, connection, account, "notices")
        )
        found, more = await database.report(
            lambda connection: notices.sent(
                connection, owner.id, kind=kind, limit=limit, cursor=cursor
            ),
            account_id=owner.id,
        )
        return json_response(page_view(found, more))

    @get(
        "/notices/subscriptions",
        operation_id="ListOwnSubscriptions",
        summary="List where notices of the account go",
    )
    async def subscriptions(
        self,
        request: ApiRequest,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[SubscriptionView]]:
        check_limit(limit)
        own = f"id:{request.key.account_id}"
        return await page_response(
            request, notices.list_page, account=own, limit=limit, cursor=cursor
        )

    @post(
        "/notices/subscriptions",
        status_code=201,
        opt={**OWNERS, "errors": [409]},
        operation_id="AddOwnSubscription",
        summary="Send notices of the account to a URL, or by mail to an address that agrees",
    )
    async def add(
        self, request: ApiRequest, data: JSONBody[OwnSubscriptionBody]
    ) -> Response[SubscriptionView]:
        settings, account_id = request.services.settings, request.key.account_id
        made = await write(request, notices.add_own, account_id, data, settings=settings)
        return json_response(made, status=201)

    @post(
        "/notices/subscriptions/{subscription_id:int}/confirm",
        status_code=200,
        opt=OWNERS,
        operation_id="ConfirmOwnSubscription",
        summary="Confirm a mail subscription with the token that its address received",
    )
    async def confirm(
        self, request: ApiRequest, subscription_id: IdInPath, data: JSONBody[ConfirmationBody]
    ) -> Response[SubscriptionView]:
        pepper, account_id = request.services.pepper, request.key.account_id
        made = await write(
            request, notices.confirm_own, account_id, subscription_id, data, pepper=pepper
        )
        return json_response(made)

    @delete(
        "/notices/subscriptions/{subscription_id:int}",
        status_code=200,
        opt=OWNERS,
        operation_id="RemoveOwnSubscription",
        summary="Stop sending notices of the account to a subscription",
    )
    async def remove(
        self, request: ApiRequest, subscription_id: IdInPath
    ) -> Response[SubscriptionView]:
        account_id = request.key.account_id
        return json_response(await write(request, notices.remove_own, account_id, subscription_id))
