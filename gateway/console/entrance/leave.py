"""Leaving: the session is ended, its cookie and all that the browser stored are deleted."""

from __future__ import annotations

from typing import Any

from litestar import Response, post
from litestar.response import Redirect

from gateway.api.http.request import ApiRequest
from gateway.console.guards import address_of, needs
from gateway.console.sessions import CLEARED, no_session_cookie
from gateway.console.visitors import Visitor
from gateway.operations import sessions


@post("/leave", guards=[needs("own.write")])
async def leave(request: ApiRequest, visitor: Visitor) -> Response[Any]:
    await request.services.database.write(lambda each: sessions.leave(each, visitor.session))
    return Redirect(
        "/console/enter",
        status_code=303,
        cookies=[no_session_cookie(address_of(request))],
        headers={"Clear-Site-Data": CLEARED},
    )
