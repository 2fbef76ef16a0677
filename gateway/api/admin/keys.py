"""API keys of all accounts over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.operations import list_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import keys
from gateway.operations.keys import KeyBody, KeyView, NewKeyView


class KeysController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get("/keys", operation_id="ListKeys", summary="List keys, of one account or of all")
    async def index(
        self, request: ApiRequest, account: FromQuery[str | None] = None
    ) -> Response[ListView[KeyView]]:
        return await list_response(request, keys.list_all, account)

    @post(
        "/accounts/{account:str}/keys",
        status_code=201,
        operation_id="CreateKey",
        summary="Create a key; its secret is returned only once",
    )
    async def create(
        self, request: ApiRequest, account: FromPath[str], data: JSONBody[KeyBody]
    ) -> Response[NewKeyView]:
        pepper = request.services.pepper
        made = await write(request, keys.create, account, data, pepper=pepper)
        return json_response(made, status=201)

    @delete(
        "/keys/{key:str}",
        status_code=200,
        operation_id="RevokeKey",
        summary="Revoke a key, immediately and in every gateway",
    )
    async def revoke(self, request: ApiRequest, key: FromPath[str]) -> Response[KeyView]:
        return json_response(await write(request, keys.revoke, key))
