"""Notices that were sent to an account."""

from __future__ import annotations

from litestar import Controller, Response, get
from litestar.params import FromQuery

from gateway.api.http.access import requested_account
from gateway.api.http.answers import PageView, json_response, page_view
from gateway.api.http.bodies import check_limit
from gateway.api.http.request import ApiRequest
from gateway.notices.kinds import AnyKind
from gateway.operations import notices
from gateway.operations.notices import NoticeView


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
