"""Renders templates to pages."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from litestar import Response

from gateway.api.http.request import ApiRequest
from gateway.console.assets import asset
from gateway.console.headers import console_headers, new_nonce
from gateway.console.visitors import Visitor


@functools.cache
def environment() -> Environment:
    loader = PackageLoader("gateway.console")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    made.globals["asset"] = asset
    made.filters["when"] = lambda moment: moment.strftime("%Y-%m-%d %H:%M UTC")
    return made


async def page(
    request: ApiRequest,
    visitor: Visitor | None,
    name: str,
    *,
    title: str,
    status: int = 200,
    **values: Any,
) -> Response[str]:
    """Return a page."""
    return page_now(request, visitor, name, title=title, status=status, **values)


def page_now(
    request: ApiRequest,
    visitor: Visitor | None,
    name: str,
    *,
    title: str,
    status: int = 200,
    **values: Any,
) -> Response[str]:
    """Return a page, rendered in this thread."""
    nonce = new_nonce()
    shown = {"visitor": visitor, "title": title, "nonce": nonce, "path": request.scope["path"]}
    text = environment().get_template(name).render(**{**shown, **values})
    return Response(
        text,
        status_code=status,
        media_type="text/html",
        headers=console_headers(request, nonce, secret=bool(values.get("secret"))),
    )
