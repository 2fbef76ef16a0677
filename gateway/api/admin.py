"""What an operator asks of a running gateway. Accounts, keys and credit are the command line's."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, Response, post

from gateway.api.answers import json_response
from gateway.catalog.store import LiveCatalog
from gateway.errors import InvalidRequest


class AdminController(Controller):
    path = "/v1/admin"
    tags = ["Operation"]
    opt = {"scope": "admin"}

    @post(
        "/catalog/reload",
        status_code=200,
        operation_id="ReloadCatalog",
        summary="Read catalog.yaml again; a changed price is a new price version",
    )
    async def reload(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        live: LiveCatalog = request.app.state.live
        problems = await live.reload()
        if problems:
            raise InvalidRequest(
                "invalid_catalog",
                f"The catalog was not changed: {problems[0]}"
                + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
                details={"problems": [str(problem) for problem in problems]},
            )
        return json_response({"object": "catalog", "models": len(live.names())})
