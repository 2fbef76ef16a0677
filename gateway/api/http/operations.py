"""Runs operations for handlers, each in the lane of the database that suits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from litestar import Response
from sqlalchemy import Connection

from gateway.api.http.answers import ListView, json_response
from gateway.api.http.request import ApiRequest

P = ParamSpec("P")
T = TypeVar("T")


async def write(
    request: ApiRequest,
    operation: Callable[Concatenate[Connection, P], T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run an operation in one transaction."""
    database = request.services.database
    return await database.write(lambda connection: operation(connection, *args, **kwargs))


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
