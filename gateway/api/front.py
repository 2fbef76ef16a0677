"""What is at ``/``: links, as a page for a person with a browser, otherwise as JSON."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from litestar import Controller, Response, get

from gateway.api.http.answers import json_response
from gateway.api.http.request import ApiRequest

CONSOLE: Final = "/console"
"""Where the console is."""
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tollgate</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 15vh auto; padding: 0 1rem }
code { background: #8882; padding: .1em .3em; border-radius: .2em }
</style>
<h1>Tollgate</h1>
<p>This inference gateway is running. Clients of OpenAI reach it under <code>/v1</code>, with an API
key.</p>
<ul>
{console}<li><a href="/schema">API documentation</a></li>
<li><a href="/health/ready">Readiness</a></li>
<li><code>GET /v1/models</code>: models and prices, with a key</li>
</ul>
</html>
"""
_CONSOLE_LINK: Final = f'<li><a href="{CONSOLE}">Console</a></li>\n'


def is_console(path: str) -> bool:
    return path == CONSOLE or path.startswith(f"{CONSOLE}/")


class FrontView(TypedDict):
    """Where a client finds what."""

    object: Literal["gateway"]
    name: str
    models: str
    documentation: str
    readiness: str
    console: str | None


class FrontPageController(Controller):
    include_in_schema = False

    @get("/")
    async def front(self, request: ApiRequest) -> Response[str] | Response[FrontView]:
        has_console = request.services.settings.console
        if "text/html" not in request.headers.get("accept", ""):
            view: FrontView = {
                "object": "gateway",
                "name": "Tollgate",
                "models": "/v1/models",
                "documentation": "/schema",
                "readiness": "/health/ready",
                "console": CONSOLE if has_console else None,
            }
            return json_response(view, headers={"Vary": "Accept"})
        headers = {
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            "Vary": "Accept",
        }
        page = _PAGE.replace("{console}", _CONSOLE_LINK if has_console else "")
        return Response(page, media_type="text/html", headers=headers)
