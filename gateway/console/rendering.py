"""Renders pages from templates: escaped everywhere, with a fresh nonce each.

Templates get plain values. They run no query and know no service; an undefined name is an error.
"""

from __future__ import annotations

import asyncio
import base64
import functools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from litestar import Response

from gateway.api.http.request import ApiRequest
from gateway.checks.moments import read_moment
from gateway.console.assets import load_assets
from gateway.console.columns import ListColumns, shown_lists
from gateway.console.compression import VARY, compressed
from gateway.console.csrf import masked
from gateway.console.headers import console_headers, new_nonce
from gateway.console.navigation import navigation
from gateway.console.queries import CURSORS
from gateway.console.views import formats
from gateway.console.views.files import AS, CSV, TableFile, attachment, table_file
from gateway.console.views.money import ALL_RULES
from gateway.console.visitors import Visitor
from gateway.pricing import parse_usd


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
        *(formats.words, formats.rate, pairs, read_moment, parse_usd),
    ):
        made.filters[format.__name__] = format
    made.globals["all_rules"] = ALL_RULES
    assets = load_assets()
    made.globals["asset"] = assets.url
    # Within the page, for one request less.
    mark = base64.b64encode(assets.files["mark.svg"].content).decode()
    made.globals["mark_address"] = f"data:image/svg+xml;base64,{mark}"
    return made


def compile_templates() -> None:
    """Compile all templates, which first visits of pages would wait for."""
    for name in environment().list_templates(extensions=["html"]):
        environment().get_template(name)


async def page(
    request: ApiRequest,
    visitor: Visitor | None,
    name: str,
    *,
    title: str,
    status: int = 200,
    as_file: TableFile | None = None,
    lists: Sequence[ListColumns] = (),
    **values: Any,
) -> Response[Any]:
    """Render a page in a thread: a list takes milliseconds, for which no order should wait.

    ``as_file`` is its table, which is the answer if the address says so. Of ``lists`` it shows the
    columns that the visitor has not hidden.
    """
    if as_file is not None and request.query_params.get(AS) == CSV:
        return Response(
            await asyncio.to_thread(table_file, as_file),
            media_type="text/csv",
            headers={**attachment(f"{as_file.name}.csv"), "Cache-Control": "private, no-cache"},
        )
    file = None if as_file is None or not as_file.rows else table_address(request)
    if visitor is not None:
        values["lists"] = shown_lists(lists, visitor.hidden)
    return await asyncio.to_thread(
        page_now, request, visitor, name, title=title, status=status, file_of_table=file, **values
    )


def table_address(request: ApiRequest) -> str:
    """Return the address of a page's table as a file: all rows of its filters."""
    kept = {name: value for name, value in request.query_params.items() if name not in CURSORS}
    return f"{request.url.path}?{urlencode({**kept, AS: CSV})}"


def page_now(
    request: ApiRequest,
    visitor: Visitor | None,
    name: str,
    *,
    title: str,
    status: int = 200,
    **values: Any,
) -> Response[Any]:
    """Render a page in this thread, and compress it where that gives nothing away.

    ``title`` is the answer that the page gives, such as "acme has $41.2 available". Without a
    visitor, the page has no navigation. With a true ``secret``, it is stored nowhere;
    with a true ``microphone``, it may record. ``live`` is the interval in seconds at which its
    parts with ``data-live`` follow what happens.
    """
    nonce, path, query = new_nonce(), request.url.path, request.url.query
    context = {
        "title": title,
        "visitor": visitor,
        "nonce": nonce,
        "form_token": masked(visitor.csrf) if visitor else "",
        "path": path,
        "here": f"{path}?{query}" if query else path,
        "status": status,
        "live": None,
        "file_of_table": None,
        "clock": formats.Clock(visitor.zone if visitor else "UTC", datetime.now(UTC)),
        # What does not exist looks alike everywhere, so an error is at no place.
        "navigation": navigation(visitor, path if status < 400 else "") if visitor else (),
        **values,
    }
    secret = bool(values.get("secret"))
    content = environment().get_template(name).render(context).encode()
    zipped = None if secret else compressed(request, content)
    headers = console_headers(
        request, nonce, secret=secret, microphone=bool(values.get("microphone"))
    )
    headers["Vary"] = VARY
    if zipped is not None:
        headers["Content-Encoding"] = "gzip"
    return Response(
        content if zipped is None else zipped,
        status_code=status,
        media_type="text/html",
        headers=headers,
    )


def pairs(values: Sequence[str]) -> list[tuple[str, str]]:
    """Return options of a choice whose values are their texts."""
    return [(value, value) for value in values]


@pass_context
def when(context: Context, moment: datetime, clock: formats.Clock | None = None) -> str:
    """Format a moment. Macros have no context of their own, and pass the page's clock."""
    return formats.when(moment, clock or context["clock"])
