"""The front page."""

from __future__ import annotations

from typing import Any, Final

from litestar import Response, get

from gateway.api.http.request import ApiRequest
from gateway.console.guards import needs
from gateway.console.rendering import page
from gateway.console.visitors import CurrentVisitor


@get("/", guards=[needs("own.write")])
async def home(request: ApiRequest, visitor: CurrentVisitor) -> Response[Any]:
    return await page(request, visitor, "home.html", title="Tollgate")


HANDLERS: Final[list[Any]] = [home]
