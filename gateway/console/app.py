"""Collects the routes of the console, and renders its errors as pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast
from urllib.parse import urlencode

from litestar import Litestar, Request, Response, Router, get
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.response import Redirect
from litestar.response.base import ASGIResponse
from litestar.types import ExceptionHandlersMap, Receive, Scope, Send
from redis.exceptions import RedisError
from sqlalchemy import Connection

from gateway.api.front import CONSOLE, is_console
from gateway.api.http.bodies import error_response
from gateway.api.http.request import ApiRequest, Services
from gateway.audit_log import CALL_PREFIX
from gateway.console import assets
from gateway.console.addresses import find_address
from gateway.console.catalog import addition, editor, planner
from gateway.console.entrance.enter import EntranceController
from gateway.console.entrance.oidc import oidc_handlers
from gateway.console.entrance.own import OwnController
from gateway.console.entrance.proof import ProofController
from gateway.console.entrance.reports import receive_report
from gateway.console.guards import (
    FOLLOWS,
    NotEntered,
    ProofNeeded,
    check_form,
    check_host,
    current_visitor,
    find_visitor,
    no_page,
    path_of,
)
from gateway.console.installation import pages as installation
from gateway.console.jobs import pages as jobs
from gateway.console.live import stream
from gateway.console.money import (
    bookings,
    corrections,
    organisations,
    payments,
    periods,
    prices,
    usage,
)
from gateway.console.pages import (
    accounts,
    audit,
    columns,
    find,
    home,
    keys,
    limits,
    models,
    money,
    people,
    reports,
    request_lists,
    requests,
)
from gateway.console.playground import pages as playground
from gateway.console.playground import voices
from gateway.console.records import archives, erasures, retention
from gateway.console.rendering import compile_templates, page_now
from gateway.console.running import queue, set_aside, upstream_check, workers
from gateway.console.stored import (
    access,
    batches,
    downloads,
    feedback,
    files,
    inputs,
    notices,
    webhooks,
)
from gateway.console.stored import voices as stored_voices
from gateway.console.visitors import Visitor, visitor_of
from gateway.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    TollgateError,
    Unavailable,
)
from gateway.ids import new_id
from gateway.settings import Settings
from gateway.sql.database import DatabaseTimeout
from gateway.sql.lanes import ran_too_long
from gateway.sql.outages import SQL_OUTAGE, outage_name
from gateway.sql.partitions import meet_partitions

log = logging.getLogger(__name__)

FORM_BYTES: Final = 64 * 1024
"""Size of a form beside its file."""
TITLES: Final = {
    400: "This is not accepted",
    403: "Not allowed",
    404: "This page does not exist",
    405: "This page does not work that way",
    421: "Another address is needed",
    429: "Too many at a time",
    500: "Something went wrong",
    503: "Not available at the moment",
}

DATABASE_AWAY: Final = "database_unavailable"
_IN_A_PART: Final = {"HX-Reselect": ".part-failed", "HX-Reswap": "afterbegin"}
"""Headers by which htmx shows a failure within the part, which keeps what it shows otherwise."""
_NOWHERE: Final = {"HX-Reswap": "none"}
"""Headers by which parts that follow what happens stay as they are; the live mark says why."""


def console_router(settings: Settings) -> Router:
    """Return the routes of the console."""
    return Router(
        CONSOLE,
        route_handlers=[
            EntranceController,
            OwnController,
            ProofController,
            receive_report,
            *oidc_handlers(settings),
            *stream.HANDLERS,
            *home.HANDLERS,
            *workers.HANDLERS,
            *queue.HANDLERS,
            *set_aside.HANDLERS,
            *upstream_check.HANDLERS,
            *request_lists.HANDLERS,
            *requests.HANDLERS,
            *models.HANDLERS,
            *editor.HANDLERS,
            *addition.HANDLERS,
            *planner.HANDLERS,
            *installation.HANDLERS,
            *playground.HANDLERS,
            *voices.HANDLERS,
            *money.HANDLERS,
            *corrections.HANDLERS,
            *payments.HANDLERS,
            *periods.HANDLERS,
            *usage.HANDLERS,
            *bookings.HANDLERS,
            *prices.HANDLERS,
            *jobs.HANDLERS,
            *reports.HANDLERS,
            *keys.HANDLERS,
            *limits.HANDLERS,
            *accounts.HANDLERS,
            *organisations.HANDLERS,
            *audit.HANDLERS,
            *columns.HANDLERS,
            *find.HANDLERS,
            *erasures.HANDLERS,
            *archives.HANDLERS,
            *retention.HANDLERS,
            *people.HANDLERS,
            *webhooks.HANDLERS,
            *notices.HANDLERS,
            *feedback.HANDLERS,
            *access.HANDLERS,
            *inputs.HANDLERS,
            *batches.HANDLERS,
            *files.HANDLERS,
            *stored_voices.HANDLERS,
            *downloads.HANDLERS,
            Router(
                "/",
                route_handlers=[*files.UPLOADS, *batches.UPLOADS],
                request_max_body_size=settings.file_bytes_max + FORM_BYTES,
            ),
            *assets.HANDLERS,
            _nothing,
        ],
        guards=[check_host, find_visitor, check_form],
        dependencies={"visitor": Provide(_visitor, sync_to_thread=False)},
        exception_handlers=_HANDLERS,
        include_in_schema=False,
    )


async def prepare_pages(app: Litestar) -> None:
    """Make what first visits would wait for: compiled templates, the API's reference, and
    connections that know the database."""
    services: Services = app.state.services
    try:
        await asyncio.to_thread(compile_templates)
        await installation.read_reference(app)
        await services.database.prepare_pages(partial(_read, services))
        await services.traffic.refresh()
    except Exception:  # a boundary: the page that needs it says more
        log.exception("pages could not be prepared")


def _read(services: Services, connection: Connection) -> None:
    meet_partitions(connection)
    home.read_overview(services, connection)


@get("/{rest:path}", opt={"open": True})
async def _nothing(rest: FromPath[str]) -> Response[Any]:
    raise no_page()


def refuse_route(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """Answer a call that reaches no route, and thus no handler of the console's: with a page
    below ``/console``, and as the API does elsewhere."""
    if isinstance(request, ApiRequest) and is_console(request.scope["path"]):
        return _NoRoute(error)
    return error_response(request, error)


class _NoRoute(Response[HTTPException]):
    """Page of a call that reaches no route. No guard has found its visitor, and an exception
    handler cannot wait for the database; so the page is made while it is sent."""

    def to_asgi_response(
        self, app: Litestar | None, request: Request[Any, Any, Any], **_: Any
    ) -> ASGIResponse:
        assert isinstance(request, ApiRequest)
        return _NoRoutePage(request, self.content)


class _NoRoutePage(ASGIResponse):
    def __init__(self, request: ApiRequest, error: HTTPException) -> None:
        super().__init__(status_code=error.status_code)
        self._request, self._error = request, error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, state = self._request, self._request.scope["state"]
        address = find_address(request.services.settings, request.headers.get("host", ""))
        if address is not None:
            state["address"] = address
            # Without the database, the page has no visitor, as that of an outage.
            with suppress(*SQL_OUTAGE):
                state["visitor"] = await current_visitor(request)
        answer = _http_error(request, self._error).to_asgi_response(app=None, request=request)
        await answer(scope, receive, send)


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


def _call_id(request: ApiRequest) -> str:
    """Return what identifies a request in the logs, under which its visitor's acts are recorded."""
    visitor, state = visitor_of(request), request.scope["state"]
    call_id: str = state.setdefault("call_id", visitor.call_id if visitor else new_id(CALL_PREFIX))
    return call_id


def _error_page(request: ApiRequest, error: TollgateError) -> Response[Any]:
    status = error.http_status
    is_part = "hx-request" in request.headers
    found = page_now(
        request,
        visitor_of(request),
        "parts/failed.html" if is_part else "error.html",
        title=TITLES.get(status, TITLES[400 if status < 500 else 500]),
        status=status,
        message=error.message,
        call_id=_call_id(request),
        retry_after_s=error.retry_after_s,
        is_page=request.method == "GET",
        comes_back=request.method == "GET" and error.code == DATABASE_AWAY,
    )
    found.headers.update(error.headers)
    if is_part:
        found.headers.update(_IN_A_PART if FOLLOWS not in request.headers else _NOWHERE)
    return found


def _http_error(request: ApiRequest, error: HTTPException) -> Response[Any]:
    if error.status_code >= 500:
        return _unexpected(request, error)
    if error.status_code == 404:
        return _error_page(request, no_page())
    if error.status_code == 405:
        message = f"This address does not take {request.method}; nothing was changed."
        refused = _error_page(request, MethodNotAllowed("method_not_allowed", message))
        allowed = (error.headers or {}).get("allow", "").split(", ")
        refused.headers["Allow"] = ", ".join(sorted(allowed))
        return refused
    return _error_page(request, InvalidRequest("invalid_request", str(error.detail)))


def _outage(request: ApiRequest, error: Exception) -> Response[Any]:
    if isinstance(error, DatabaseTimeout) or ran_too_long(error):
        log.warning("%s took too long to read (%s)", request.scope["path"], _call_id(request))
        message = (
            "The database did not answer this page within two seconds, and no order waits for it. "
            "Choose one account or fewer days, or try again."
        )
        return _error_page(request, Unavailable("page_too_slow", message, retry_after_s=2))
    log.error("the console reached no service: %s (%s)", outage_name(error), _call_id(request))
    message = "The database or the queue server does not answer; nothing was changed. Try again."
    return _error_page(request, Unavailable(DATABASE_AWAY, message, retry_after_s=2))


def _unexpected(request: ApiRequest, error: Exception) -> Response[Any]:
    path, call_id = request.scope["path"], _call_id(request)
    log.error("unexpected error at %s %s (%s)", request.method, path, call_id, exc_info=error)
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
