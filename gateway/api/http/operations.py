"""Runs operations for handlers, each in the lane of the database that suits it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from litestar import Response
from sqlalchemy import Connection

from gateway.api.http.answers import ListView, PageView, json_response, page_view
from gateway.api.http.request import ApiRequest
from gateway.audit_log import CALL_PREFIX, Author
from gateway.checks.entered import NAME_MAX
from gateway.errors import InvalidRequest
from gateway.ids import new_id

P = ParamSpec("P")
T = TypeVar("T")

REASON_HEADER: Final = "X-Audit-Reason"
CALL_HEADER: Final = "X-Request-Id"


async def write(
    request: ApiRequest,
    operation: Callable[Concatenate[Connection, Author, P], T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run an operation in one transaction, as an act of the caller."""
    database, author = request.services.database, author_of(request)
    return await database.write(lambda connection: operation(connection, author, *args, **kwargs))


async def list_response(
    request: ApiRequest,
    operation: Callable[Concatenate[Connection, P], list[T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Response[ListView[T]]:
    """Run an operation that reads a list, and answer with it."""
    database = request.services.database
    data = await database.report(
        lambda connection: operation(connection, *args, **kwargs),
        account_id=request.key.account_id,
    )
    return json_response({"object": "list", "data": data})


async def page_response(
    request: ApiRequest,
    operation: Callable[Concatenate[Connection, P], tuple[list[T], str | None]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Response[PageView[T]]:
    """Run an operation that reads a page of a list, and answer with it and the next cursor."""
    database = request.services.database
    found, more = await database.report(
        lambda connection: operation(connection, *args, **kwargs),
        account_id=request.key.account_id,
    )
    return json_response(page_view(found, more))


async def export_pages(
    request: ApiRequest, operation: Callable[..., tuple[bytes, str | None]], /, **kwargs: Any
) -> AsyncIterator[bytes]:
    """Run an operation that encodes a part of an export after a ``cursor``, until the last part."""
    cursor: str | None = None
    while True:
        read = functools.partial(operation, **kwargs, cursor=cursor)
        page, cursor = await request.services.database.report(
            read, account_id=request.key.account_id
        )
        yield page
        if cursor is None:
            return


def author_of(request: ApiRequest) -> Author:
    """Return the author of a call: its key, with the reason and the id that its headers give.

    Raise ``InvalidRequest`` if the reason cannot be stored.
    """
    sent = request.headers.get(CALL_HEADER, "")
    known = 0 < len(sent) <= NAME_MAX and sent.isascii() and sent.isprintable()
    call_id = sent if known else new_id(CALL_PREFIX)
    request.state.call_id = call_id
    try:
        # Litestar decodes headers as Latin-1; clients send UTF-8.
        reason = request.headers.get(REASON_HEADER, "").encode("latin-1").decode()
        return Author(request.key.prefix, "http", call_id, request.key.id, reason)
    except ValueError as error:
        raise InvalidRequest(
            "invalid_value", f"{REASON_HEADER}: {error}.", param=REASON_HEADER
        ) from None
