"""The page at ``/schema``: the API's documentation, without requests to other origins.

Users enter keys there, so its script is bundled and pinned by version and digest, and the content
security policy allows nothing else: RapiDoc 9.3.8 from npm (MIT, licences beside it), without its
source map.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from typing import Any, Final

from litestar import Request, Response, Router, get
from litestar.openapi.plugins import OpenAPIRenderPlugin

SCRIPT: Final = "rapidoc-9.3.8.js"
SHA256: Final = "48abb9e9accf460fa1ff21377dc1e4802b16722cce25a3996f33cc54583655d5"
CSP: Final = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{csp}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ margin: 0 }}</style>
<script type="module" src="/schema/{script}" integrity="sha256-{digest}"></script>
<rapi-doc spec-url="{spec}" load-fonts="false" show-header="false" render-style="focused"
 persist-auth="false" allow-spec-file-download="true" regular-font="system-ui, sans-serif"
 mono-font="ui-monospace, monospace"></rapi-doc>
</html>
"""


class DocumentationPlugin(OpenAPIRenderPlugin):
    """Renders the page, and serves its script."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return PAGE.format(
            csp=CSP,
            title="Tollgate API",
            script=SCRIPT,
            digest=base64.b64encode(bytes.fromhex(SHA256)).decode(),
            spec=self.get_openapi_json_route(request),
        ).encode()

    def receive_router(self, router: Router) -> None:
        router.register(_script)


@get(f"/{SCRIPT}", include_in_schema=False, sync_to_thread=False)
def _script() -> Response[bytes]:
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(read_script(), media_type="text/javascript", headers=headers)


@functools.cache
def read_script() -> bytes:
    """Read the bundled script, and check its digest."""
    data = importlib.resources.files("gateway.api").joinpath("assets", SCRIPT).read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256, f"{SCRIPT} does not match its digest"
    return data
