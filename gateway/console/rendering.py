"""Renders pages from templates: escaped everywhere, with a fresh nonce each.

Templates get plain values. They run no query and know no service; an undefined name is an error.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from litestar import Response

from gateway.api.http.request import ApiRequest
from gateway.console.assets import load_assets
from gateway.console.headers import console_headers, new_nonce
from gateway.console.navigation import navigation
from gateway.console.views import formats
from gateway.console.visitors import Visitor


@functools.cache
def environment() -> Environment:
    """Create the environment of the templates, once per process."""
    made = Environment(
        loader=PackageLoader("gateway.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        cache_size=-1,
    )
    for format in (
        *(formats.usd, formats.amount, formats.places, when, formats.precisely),
        *(formats.iso, formats.ago, formats.duration, formats.count, formats.size, formats.share),
        *(formats.words, pairs),
    ):
        made.filters[format.__name__] = format
    made.globals["asset"] = load_assets().url
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
    """Render a page in a thread: a list takes milliseconds, for which no order should wait."""
    return await asyncio.to_thread(
        page_now, request, visitor, name, title=title, status=status, **values
    )


def page_now(
    request: ApiRequest,
    visitor: Visitor | None,
    name: str,
    *,
    title: str,
    status: int = 200,
    **values: Any,
) -> Response[str]:
    """Render a page in this thread.

    ``title`` is the answer that the page gives, such as "acme has $41.2 available". Without a
    visitor, the page has no navigation. With a true ``secret``, it is stored nowhere.
    """
    nonce, path, query = new_nonce(), request.url.path, request.url.query
    context = {
        "title": title,
        "visitor": visitor,
        "nonce": nonce,
        "path": path,
        "here": f"{path}?{query}" if query else path,
        "status": status,
        "clock": formats.Clock(visitor.zone if visitor else "UTC", datetime.now(UTC)),
        # What does not exist looks alike everywhere, so an error is at no place.
        "navigation": navigation(visitor, path if status < 400 else "") if visitor else (),
        **values,
    }
    return Response(
        environment().get_template(name).render(context),
        status_code=status,
        media_type="text/html",
        headers=console_headers(request, nonce, secret=bool(values.get("secret"))),
    )


def pairs(values: Sequence[str]) -> list[tuple[str, str]]:
    """Return options of a choice whose values are their texts."""
    return [(value, value) for value in values]


@pass_context
def when(context: Context, moment: datetime, clock: formats.Clock | None = None) -> str:
    """Format a moment. Macros have no context of their own, and pass the page's clock."""
    return formats.when(moment, clock or context["clock"])
