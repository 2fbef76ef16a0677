"""File storage of an account: usage and limits."""

from __future__ import annotations

from litestar import Controller, Response, get
from litestar.params import FromQuery
from sqlalchemy import Connection

from gateway.api.http.access import requested_account
from gateway.api.http.answers import json_response
from gateway.api.http.request import ApiRequest
from gateway.operations import storage
from gateway.operations.storage import StorageView


class StorageController(Controller):
    path = "/v1"
    tags = ["Account"]
    opt = {"scope": "read"}

    @get(
        "/storage",
        operation_id="GetStorage",
        summary="Stored files and bytes of an account, and their limits",
    )
    async def show(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[StorageView]:
        database = request.services.database

        def read(connection: Connection) -> StorageView:
            owner = requested_account(request, connection, account, "limits")
            return storage.of_account(connection, owner, request.services.settings)

        return json_response(await database.read(read))
