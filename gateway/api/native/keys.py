"""The keys of an account and their budgets, as its members read them and its owners manage them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from litestar import Controller, Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody
from sqlalchemy import Connection

from gateway.accounts.keys import KeyStatus
from gateway.api.http.answers import PageView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import page_response, write
from gateway.api.http.request import ApiRequest
from gateway.audit_log import Author
from gateway.operations import keys
from gateway.operations.keys import KeyChange, KeyView, MemberKeyBody, NewKeyView, RotationBody

T = TypeVar("T")


class OwnKeysController(Controller):
    path = "/v1/keys"
    tags = ["Account"]
    opt = {"scope": "inference", "least": "owner", "members_only": True}

    @get(
        opt={"scope": "read", "least": "viewer"},
        operation_id="ListOwnKeys",
        summary="List the keys of the account, for its members",
    )
    async def index(
        self,
        request: ApiRequest,
        status: FromQuery[KeyStatus | None] = None,
        name: FromQuery[str | None] = None,
        limit: FromQuery[int] = 100,
        cursor: FromQuery[str | None] = None,
    ) -> Response[PageView[KeyView]]:
        check_limit(limit)
        return await page_response(
            request,
            keys.list_page,
            account=_own(request),
            status=status,
            name=name,
            limit=limit,
            cursor=cursor,
        )

    @post(
        status_code=201,
        opt={"errors": [404]},
        operation_id="CreateOwnKey",
        summary="Create a key of the account, also for a member",
    )
    async def create(
        self, request: ApiRequest, data: JSONBody[MemberKeyBody]
    ) -> Response[NewKeyView]:
        make = functools.partial(keys.create, pepper=request.services.pepper)
        return json_response(await write(request, make, _own(request), data), status=201)

    @patch(
        "/{key:str}",
        operation_id="ChangeOwnKey",
        summary="Change a key's name, models, expiry or limits",
    )
    async def change(
        self, request: ApiRequest, key: FromPath[str], data: JSONBody[KeyChange]
    ) -> Response[KeyView]:
        return json_response(await _write_own(request, key, keys.change, data))

    @post(
        "/{key:str}/rotate",
        status_code=201,
        operation_id="RotateOwnKey",
        summary="Create a key that replaces another one, which expires after an overlap",
    )
    async def rotate(
        self, request: ApiRequest, key: FromPath[str], data: JSONBody[RotationBody]
    ) -> Response[NewKeyView]:
        act = functools.partial(keys.rotate, pepper=request.services.pepper)
        return json_response(await _write_own(request, key, act, data), status=201)

    @delete(
        "/{key:str}",
        status_code=200,
        operation_id="RevokeOwnKey",
        summary="Revoke a key",
    )
    async def revoke(self, request: ApiRequest, key: FromPath[str]) -> Response[KeyView]:
        return json_response(await _write_own(request, key, keys.revoke))


async def _write_own(request: ApiRequest, key: str, act: Callable[..., T], *arguments: object) -> T:
    """Do an act on a key of the caller's account. Raise ``NotFound``."""

    def run(connection: Connection, author: Author) -> T:
        own = str(keys.own_key(connection, request.key.account_id, key))
        return act(connection, author, own, *arguments)

    return await write(request, run)


def _own(request: ApiRequest) -> str:
    """Return the number of the caller's account, as operations find it."""
    return f"id:{request.key.account_id}"
