"""The door: every body, form, path and query is checked here before a handler sees it."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import FormMultiDict, UploadFile
from litestar.handlers import BaseRouteHandler

from gateway.checks.decoding import check_text, refuse_null, unreadable


class CheckedRequest(Request[Any, Any, Any]):
    """A request whose body, as JSON or as a form, has no text that cannot be stored."""

    async def json(self) -> Any:
        try:
            value = await super().json()
        except (RecursionError, UnicodeDecodeError) as error:
            raise unreadable(error) from None
        refuse_null(await self.body(), value)
        return value

    async def form(self) -> FormMultiDict:
        try:
            form = await super().form()
        except UnicodeDecodeError as error:
            raise unreadable(error) from None
        for name, value in form.multi_items():
            check_text(name, "")
            if isinstance(value, UploadFile):
                check_text(value.filename, name)
            elif isinstance(value, str):
                check_text(value, name)
        return form


async def check_address(
    connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler
) -> None:
    """Litestar guard: refuse U+0000 in the path and the query."""
    check_text(connection.scope["path"], "")
    if b"%00" in connection.scope["query_string"]:
        for name, value in connection.query_params.multi_items():
            check_text(name, "")
            check_text(value, name)
