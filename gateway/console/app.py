"""Collects the routes of the console, and renders its errors as pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import urlencode

from litestar import Request, Response, Router, get
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.response import Redirect
from litestar.types import ExceptionHandlersMap
from redis.exceptions import RedisError

from gateway.api.http.request import ApiRequest
from gateway.console import assets
from gateway.console.entrance.enter import EntranceController
from gateway.console.entrance.oidc import oidc_handlers
from gateway.console.entrance.own import OwnController
from gateway.console.entrance.proof import ProofController
from gateway.console.entrance.reports import receive_report
from gateway.console.guards import (
    NotEntered,
    ProofNeeded,
    check_form,
    check_host,
    find_visitor,
    no_page,
    path_of,
)
from gateway.console.headers import PREFIX
from gateway.console.pages import (
    accounts,
    audit,
    home,
    keys,
    limits,
    models,
    money,
    people,
    reports,
    requests,
)
from gateway.console.playground import pages as playground
from gateway.console.rendering import page_now
from gateway.console.visitors import Visitor, visitor_of
from gateway.errors import InternalError, InvalidRequest, TollgateError, Unavailable
from gateway.settings import Settings
from gateway.sql.outages import SQL_OUTAGE, outage_name

log = logging.getLogger(__name__)

TITLES: Final = {
    400: "This is not accepted",
    403: "Not allowed",
    404: "This page does not exist",
    421: "Another address is needed",
    429: "Too many at a time",
    500: "Something went wrong",
    503: "Not available at the moment",
}


def console_router(settings: Settings) -> Router:
    """Return the routes of the console."""
    return Router(
        PREFIX,
        route_handlers=[
            EntranceController,
            OwnController,
            ProofController,
            receive_report,
            *oidc_handlers(settings),
            *home.HANDLERS,
            *requests.HANDLERS,
            *models.HANDLERS,
            *playground.HANDLERS,
            *money.HANDLERS,
            *reports.HANDLERS,
            *keys.HANDLERS,
            *limits.HANDLERS,
            *accounts.HANDLERS,
            *audit.HANDLERS,
            *people.HANDLERS,
            *assets.HANDLERS,
            _nothing,
        ],
        guards=[check_host, find_visitor, check_form],
        dependencies={"visitor": Provide(_visitor, sync_to_thread=False)},
        exception_handlers=_HANDLERS,
        include_in_schema=False,
    )


@get("/{rest:path}", opt={"open": True})
async def _nothing(rest: FromPath[str]) -> Response[Any]:
    raise no_page()


def _visitor(request: ApiRequest) -> Visitor:
    visitor = visitor_of(request)
    assert visitor is not None
    return visitor


def _to_entrance(request: ApiRequest, _: NotEntered) -> Response[Any]:
    return _detour(request, "/console/enter")


def _to_proof(request: ApiRequest, _: ProofNeeded) -> Response[Any]:
    return _detour(request, "/console/prove")


def _detour(request: ApiRequest, target: str) -> Response[Any]:
    """Redirect to a page that leads back to the one that was asked for."""
    if request.method == "GET":
        target = f"{target}?{urlencode({'next': path_of(request)})}"
    if request.headers.get("hx-request"):
        return Response(None, headers={"HX-Redirect": target})
    return Redirect(target, status_code=303)


def _error_page(request: ApiRequest, error: TollgateError) -> Response[Any]:
    status = error.http_status
    found = page_now(
        request,
        visitor_of(request),
        "error.html",
        title=TITLES.get(status, TITLES[400 if status < 500 else 500]),
        status=status,
        message=error.message,
        call_id=error.request_id,
        retry_after_s=error.retry_after_s,
    )
    found.headers.update(error.headers)
    return found


def _http_error(request: ApiRequest, error: HTTPException) -> Response[Any]:
    if error.status_code >= 500:
        return _unexpected(request, error)
    if error.status_code == 404:
        return _error_page(request, no_page())
    return _error_page(request, InvalidRequest("invalid_request", str(error.detail)))


def _outage(request: ApiRequest, error: Exception) -> Response[Any]:
    log.error("the console reached no service: %s", outage_name(error))
    message = "The database or the queue server does not answer; nothing was changed. Try again."
    return _error_page(request, Unavailable("database_unavailable", message, retry_after_s=2))


def _unexpected(request: ApiRequest, error: Exception) -> Response[Any]:
    path = request.scope["path"]
    log.error("unexpected error at %s %s", request.method, path, exc_info=error)
    return _error_page(
        request, InternalError("internal_error", "An internal error occurred; it was logged.")
    )


def _with(
    handler: Callable[[ApiRequest, Any], Response[Any]],
) -> Callable[[Request[Any, Any, Any], Any], Response[Any]]:
    """Return an exception handler, which Litestar calls with the application's request class."""
    return cast("Callable[[Request[Any, Any, Any], Any], Response[Any]]", handler)


_HANDLERS: Final[ExceptionHandlersMap] = {
    NotEntered: _with(_to_entrance),
    ProofNeeded: _with(_to_proof),
    TollgateError: _with(_error_page),
    HTTPException: _with(_http_error),
    **dict.fromkeys(SQL_OUTAGE, _with(_outage)),
    RedisError: _with(_outage),
    Exception: _with(_unexpected),
}
