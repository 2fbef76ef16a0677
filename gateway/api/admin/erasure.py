"""Erasing what is personal, over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, post
from litestar.params import JSONBody

from gateway.api.http.answers import json_response
from gateway.api.http.operations import author_of
from gateway.api.http.request import ApiRequest
from gateway.operations.retention import ErasureBody, ErasureView, erase


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
