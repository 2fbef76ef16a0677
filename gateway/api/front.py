"""The page at ``/``, with links for a person with a browser."""

from __future__ import annotations

from typing import Final

from litestar import Controller, Response, get

PAGE: Final = """\
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
<li><a href="/schema">API documentation</a></li>
<li><a href="/health/ready">Readiness</a></li>
<li><code>GET /v1/models</code>: models and prices, with a key</li>
</ul>
</html>
"""


class FrontPageController(Controller):
    include_in_schema = False

    @get("/", media_type="text/html")
    async def front(self) -> Response[str]:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(PAGE, media_type="text/html", headers=headers)
