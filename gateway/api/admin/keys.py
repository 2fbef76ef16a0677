"""API keys of all accounts over HTTP."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody

from gateway.accounts.keys import KeyStatus
from gateway.api.http.answers import PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.operations import keys
from gateway.operations.keys import KeyBody, KeyChange, KeyView, NewKeyView, RotationBody


class KeysController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "keys"}

    @get(
        "/keys",
        operation_id="ListKeys",
        summary="List keys, of one account or of all; by status and by the start of their name",
    )
    async def index(
        self,
        request: ApiRequest,
        account: FromQuery[str | None] = None,
        status: FromQuery[KeyStatus | None] = None,
        name: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[KeyView]]:
        check_limit(limit)
        return await page_response(
            request,
            keys.list_page,
            account=account,
            status=status,
            name=name,
            limit=limit,
            cursor=cursor,
        )

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

    @patch(
        "/keys/{key:str}",
        operation_id="ChangeKey",
        summary="Change a key's name, models, expiry or limits; null removes a limit",
        description="In force within ten seconds in every gateway.",
    )
    async def change(
        self, request: ApiRequest, key: FromPath[str], data: JSONBody[KeyChange]
    ) -> Response[KeyView]:
        return json_response(await write(request, keys.change, key, data))

    @post(
        "/keys/{key:str}/rotate",
        status_code=201,
        operation_id="RotateKey",
        summary="Replace a key by a new one; the old one stays valid for a while",
    )
    async def rotate(
        self, request: ApiRequest, key: FromPath[str], data: JSONBody[RotationBody]
    ) -> Response[NewKeyView]:
        pepper = request.services.pepper
        return json_response(
            await write(request, keys.rotate, key, data, pepper=pepper), status=201
        )

    @delete(
        "/keys/{key:str}",
        status_code=200,
        operation_id="RevokeKey",
        summary="Revoke a key, immediately and in every gateway",
    )
    async def revoke(self, request: ApiRequest, key: FromPath[str]) -> Response[KeyView]:
        return json_response(await write(request, keys.revoke, key))
