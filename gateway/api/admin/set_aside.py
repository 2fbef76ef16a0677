"""What could not be worked on, for administrators: shown, tried again, or released."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypedDict

from litestar import Controller, Request, Response, get, post
from litestar.params import FromPath, FromQuery

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.bodies import check_limit
from gateway.aside import Kind, Note, delete_note, list_notes
from gateway.checks.moments import timestamp
from gateway.operations.set_aside import check, release, retry
from gateway.requests.service import Requests
from gateway.sql.database import Database


class SetAsideView(TypedDict):
    """A stored row that could not be worked on."""

    object: Literal["set_aside"]
    kind: Kind
    name: str
    reason: str
    times: int
    first_at: str
    last_at: str


class ResolvedView(TypedDict):
    object: Literal["set_aside"]
    kind: Kind
    name: str
    action: Literal["retry", "release"]


class SetAsideController(Controller):
    path = "/v1/admin/set-aside"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @get(
        "/",
        operation_id="ListSetAside",
        summary="Stored rows that cannot be worked on, with the reason; the newest first",
    )
    async def list(
        self, request: Request[Any, Any, Any], limit: FromQuery[int] = 100
    ) -> Response[ListView[SetAsideView]]:
        check_limit(limit)
        database: Database = request.app.state.database
        found = await database.read(lambda connection: list_notes(connection, limit=limit))
        return json_response({"object": "list", "data": [_view(note) for note in found]})

    @post(
        "/{kind:str}/{name:str}/{action:str}",
        status_code=200,
        opt={"errors": [409]},
        operation_id="ResolveSetAside",
        summary="Try what was set aside again (retry), or close it for nothing (release)",
    )
    async def resolve(
        self,
        request: Request[Any, Any, Any],
        kind: FromPath[Kind],
        name: FromPath[str],
        action: FromPath[Literal["retry", "release"]],
    ) -> Response[ResolvedView]:
        state = request.app.state
        database: Database = state.database
        requests: Requests = state.requests
        if kind == "request" and action == "release":
            await database.read(lambda connection: check(connection, kind, name))
            # Here, and not in SQL alone: whoever waits for it is told.
            await requests.release(name)
            await database.write(functools.partial(delete_note, kind=kind, name=name))
        else:
            act = release if action == "release" else retry
            await database.write(functools.partial(act, kind=kind, name=name))
        return json_response({"object": "set_aside", "kind": kind, "name": name, "action": action})


def _view(note: Note) -> SetAsideView:
    return {
        "object": "set_aside",
        "kind": note.kind,
        "name": note.name,
        "reason": note.reason,
        "times": note.times,
        "first_at": timestamp(note.first_at),
        "last_at": timestamp(note.last_at),
    }
