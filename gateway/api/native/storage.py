"""File storage of accounts: usage and limits."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from litestar import Controller, Response, get, put
from litestar.params import FromQuery, JSONBody
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from gateway.accounts.accounts import Account, find_account
from gateway.api.http.access import requested_account
from gateway.api.http.answers import json_response
from gateway.api.http.fields import AccountName, Id
from gateway.api.http.request import ApiRequest
from gateway.errors import NotFound
from gateway.files.room import BYTES_MAX, COUNT_MAX, Room, measure, set_limits


class StorageLimitBody(BaseModel):
    """Body of ``PUT /v1/admin/storage-limits``. An omitted limit is the installation's default."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"account": "acme", "bytes": 107374182400}]},
    )

    account: AccountName | Id
    files: Annotated[int, Field(ge=0, le=COUNT_MAX)] | None = None
    bytes: Annotated[int, Field(ge=0, le=BYTES_MAX)] | None = None


class StorageView(TypedDict):
    """An account's stored files and bytes, and their limits."""

    object: Literal["storage"]
    account: str
    files: int
    bytes: int
    files_max: int | None
    bytes_max: int | None


class StorageController(Controller):
    path = "/v1"

    @get(
        "/storage",
        tags=["Account"],
        opt={"scope": "read"},
        operation_id="GetStorage",
        summary="Stored files and bytes of an account, and their limits",
    )
    async def show(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[StorageView]:

        def read(connection: Connection) -> StorageView:
            return storage_view(
                connection, request.services.room, requested_account(request, connection, account)
            )

        return json_response(await request.services.database.read(read))

    @put(
        "/admin/storage-limits",
        tags=["Operation"],
        opt={"scope": "admin"},
        operation_id="SetStorageLimits",
        summary="Set an account's limits on stored files and bytes",
    )
    async def set_limits(
        self, request: ApiRequest, data: JSONBody[StorageLimitBody]
    ) -> Response[StorageView]:

        def write(connection: Connection) -> StorageView:
            owner = find_account(connection, data.account)
            set_limits(connection, owner.id, files_max=data.files, bytes_max=data.bytes)
            return storage_view(connection, request.services.room, owner)

        try:
            return json_response(await request.services.database.write(write))
        except LookupError as error:
            raise NotFound("not_found", f"{str(error.args[0]).capitalize()}.") from None


def storage_view(connection: Connection, room: Room, owner: Account) -> StorageView:
    stored, limits = measure(connection, owner.id), room.limits_of(connection, owner.id)
    return {
        "object": "storage",
        "account": owner.name,
        "files": stored.files,
        "bytes": stored.bytes,
        "files_max": limits.files_max,
        "bytes_max": limits.bytes_max,
    }
