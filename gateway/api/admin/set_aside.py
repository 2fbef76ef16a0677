"""Rows that were set aside, over HTTP."""

from __future__ import annotations

import functools
from typing import Literal, TypedDict

from litestar import Controller, Response, get, post
from litestar.params import FromPath, FromQuery

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.bodies import check_limit
from gateway.api.http.operations import write
from gateway.api.http.request import ApiRequest
from gateway.aside import Kind, delete_note
from gateway.operations.entrance.content_grants import key_sees
from gateway.operations.set_aside import (
    Action,
    SetAsideDetailView,
    SetAsideView,
    hide_content,
    list_all,
    owner_of,
    release,
    resolve,
    retry,
    show,
)


class ResolvedView(TypedDict):
    object: Literal["set_aside"]
    kind: Kind
    name: str
    action: Action


class SetAsideController(Controller):
    path = "/v1/admin/set-aside"
    tags = ["Operation"]
    opt = {"scope": "admin", "area": "set_aside"}

    @get(
        "/",
        operation_id="ListSetAside",
        summary="List stored rows that cannot be processed, with the reason, newest first",
    )
    async def list(
        self, request: ApiRequest, limit: FromQuery[int] = 100
    ) -> Response[ListView[SetAsideView]]:
        check_limit(limit)
        database = request.services.database
        data = await database.read(functools.partial(list_all, limit=limit))
        return json_response({"object": "list", "data": data})

    @get(
        "/{kind:str}/{name:str}",
        operation_id="ShowSetAside",
        summary="Show a row that was set aside; a result with its content, while a grant of its "
        "account allows that",
    )
    async def show(
        self, request: ApiRequest, kind: FromPath[Kind], name: FromPath[str]
    ) -> Response[SetAsideDetailView]:
        services = request.services
        row = await services.database.read(functools.partial(show, kind=kind, name=name))
        owner_id = await owner_of(services.requests.lookup, kind, name)
        sees = owner_id is not None and await services.database.read(
            functools.partial(key_sees, key=request.key, account_id=owner_id)
        )
        return json_response(row if sees else hide_content(row))

    @post(
        "/{kind:str}/{name:str}/{action:str}",
        status_code=200,
        opt={"errors": [409]},
        operation_id="ResolveSetAside",
        summary="Retry a row that was set aside, or release it without a charge",
    )
    async def resolve(
        self,
        request: ApiRequest,
        kind: FromPath[Kind],
        name: FromPath[str],
        action: FromPath[Action],
    ) -> Response[ResolvedView]:
        database = request.services.database
        if kind == "request" and action == "release":
            # Recorded first: the request is not closed in the same transaction, but by the settler,
            # so that the waiting client is notified.
            await write(request, resolve, kind, name, action)
            await request.services.requests.release(name)
            await database.write(functools.partial(delete_note, kind=kind, name=name))
        else:
            await write(request, release if action == "release" else retry, kind, name)
        return json_response({"object": "set_aside", "kind": kind, "name": name, "action": action})
