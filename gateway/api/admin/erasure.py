"""What is kept for how long, and erasing what is personal, over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, get, post
from litestar.params import JSONBody

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.operations import author_of
from gateway.api.http.request import ApiRequest
from gateway.operations.retention import (
    ErasureBody,
    ErasureView,
    RetentionView,
    erase,
    list_states,
)
from gateway.retention.clearing import Retention
from gateway.retention.kinds import all_kinds


class RetentionController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "accounts"}

    @get(
        "/retention",
        operation_id="ListRetention",
        summary="List what is kept for how long, how much is due, and what was cleared",
    )
    async def list(self, request: ApiRequest) -> Response[ListView[RetentionView]]:
        services = request.services
        kinds = all_kinds(services.settings, services.database, services.blobs)
        retention = Retention(services.database, kinds)
        data = await services.database.report(
            lambda connection: list_states(connection, retention),
            account_id=request.key.account_id,
        )
        return json_response({"object": "list", "data": data})


class ErasureController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "erasure"}

    @post(
        "/erasures",
        opt={"errors": [404, 409]},
        status_code=200,
        operation_id="Erase",
        summary="Erase what is personal of an account, a request or a tag; repeat with the cursor",
    )
    async def erase(
        self, request: ApiRequest, data: JSONBody[ErasureBody]
    ) -> Response[ErasureView]:
        services = request.services
        return json_response(
            await erase(services.database, services.eraser, author_of(request), data)
        )
