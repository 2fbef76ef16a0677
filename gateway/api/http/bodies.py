"""Reads bodies and headers of requests, and maps exceptions to error responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.types import ExceptionHandlersMap
from pydantic import BaseModel, ValidationError
from redis.exceptions import RedisError
from sqlalchemy.exc import DataError, IntegrityError

from gateway.accounts.keys import KeyInfo
from gateway.api.http.answers import json_response
from gateway.api.http.dialects import dialect_of
from gateway.api.http.request import ApiRequest, services_of
from gateway.checks.suggestions import nearest
from gateway.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    TollgateError,
    TooLarge,
    Unavailable,
)
from gateway.requests.caller import Caller
from gateway.requests.reconnect import fingerprint
from gateway.sql.outages import SQL_OUTAGE, outage_name
from gateway.tasks.mistakes import invalid_field
from gateway.tasks.submission import Idempotency

log = logging.getLogger(__name__)


CLIENT_DISCONNECTED: Final = "client disconnected prematurely"
"""Litestar's message, in an internal error."""
LARGE: Final = 256 * 1024
"""Bytes from which a digest is computed in a thread."""
IDEMPOTENCY_KEY_MAX: Final = 255
PAGE_MAX: Final = 1000

Body = TypeVar("Body", bound=BaseModel)
AnyRequest: TypeAlias = Request[Any, Any, Any]


async def idempotency(request: ApiRequest, canonical: bytes | None = None) -> Idempotency | None:
    """Read ``Idempotency-Key`` and bind it to the body, or to ``canonical`` in its place."""
    key = request.header(b"idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= IDEMPOTENCY_KEY_MAX or not key.isprintable():
        raise InvalidRequest(
            "invalid_value",
            f"An Idempotency-Key must have 1 to {IDEMPOTENCY_KEY_MAX} printable characters.",
            param="Idempotency-Key",
        )
    body = await request.body() if canonical is None else canonical
    return Idempotency.of(key, request.scope["path"], msgspec.json.decode(body))


async def body_fingerprint(request: ApiRequest, canonical: bytes | None = None) -> str:
    """Digest a submission, to recognise a client that sends it again after a disconnect."""
    body = await request.body() if canonical is None else canonical
    key_id = request.caller.key.id
    if len(body) > LARGE:
        return await asyncio.to_thread(fingerprint, key_id, request.scope["path"], body)
    return fingerprint(key_id, request.scope["path"], body)


def is_retry(request: ApiRequest) -> bool:
    """Whether the client counts its attempts, as OpenAI's do, and this is not the first."""
    return request.header(b"x-stainless-retry-count") not in (None, "", "0")


def check_limit(limit: int, most: int = PAGE_MAX, *, param: str = "limit", least: int = 1) -> None:
    """Check the number of items on a page. Raise ``InvalidRequest``."""
    if not least <= limit <= most:
        raise InvalidRequest(
            "invalid_value",
            f"{param} is {limit}; it must be between {least} and {most}.",
            param=param,
        )


def read_body(schema: type[Body], value: Mapping[str, Any]) -> Body:
    """Check a body against a schema. Raise ``InvalidRequest``."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False)) from None


def refuse_in_batch(data: BaseModel, *names: str) -> None:
    """Refuse fields without a meaning in a batch. Raise ``InvalidRequest``."""
    for name in names:
        if getattr(data, name):
            raise InvalidRequest(
                "unsupported_parameter",
                f"{name} is not supported in a batch; leave it out.",
                param=name,
            )


def _render(request: AnyRequest, error: TollgateError) -> Response[Mapping[str, Any]]:
    if isinstance(error, NotFound) and error.model is not None:
        _suggest_model(request, error.model, error)
    if isinstance(error, Forbidden):
        _note_refusal(request, error)
    body = dialect_of(request.scope["path"]).render(error)
    return json_response(body, status=error.http_status, headers=error.headers)


def _note_refusal(request: AnyRequest, error: Forbidden) -> None:
    """Note for the audit log that scopes or the role of a key do not allow an administrative call,
    which is one of administrators or of the owners of an account."""
    key: KeyInfo | None = request.scope["state"].get("key")
    if key is None or error.code not in ("missing_scope", "role_not_allowed"):
        return
    opt = request.scope["route_handler"].opt
    if opt.get("scope") == "admin" or opt.get("least") == "owner" or "admin" in key.scopes:
        call = f"{request.scope['method']} {request.scope['path_template']}"
        services_of(request).refused.note(key, call)


def _suggest_model(request: AnyRequest, name: str, error: NotFound) -> None:
    """Add the nearest name among the models that the caller's key may use."""
    call: Caller | None = request.scope["state"].get("call")
    if call is None:
        return
    live = services_of(request).live
    visible = (each for each in live.spellings() if call.key.allows(live.resolve(each)))
    if (found := nearest(name, visible)) is not None:
        error.message += f" Did you mean {found}?"


def _invalid(request: AnyRequest, error: ValidationException) -> Response[Mapping[str, Any]]:
    found = getattr(error.__cause__, "errors", None)
    if isinstance(found, list) and found:
        return _render(request, invalid_field(found))
    extra = error.extra if isinstance(error.extra, list) else []
    first = extra[0] if extra else {}
    name = first.get("key") if isinstance(first, dict) else None
    if name == "data":
        return _render(
            request, InvalidRequest("invalid_json", "The body is empty; send a JSON object.")
        )
    message = first.get("message", error.detail) if isinstance(first, dict) else error.detail
    return _render(
        request,
        InvalidRequest("invalid_value", f"Invalid value for {name}: {message}.", param=name),
    )


def _http(request: AnyRequest, error: HTTPException) -> Response[Mapping[str, Any]]:
    path = request.scope["path"]
    method = request.scope["method"]
    if isinstance(error, NotFoundException):
        return _render(
            request, NotFound("not_found", f"No such endpoint: {method} {path}; see /schema.")
        )
    if isinstance(error, MethodNotAllowedException):
        refused = _render(
            request, MethodNotAllowed("method_not_allowed", f"{path} does not support {method}.")
        )
        refused.headers["Allow"] = (error.headers or {}).get("allow", "")
        return refused
    if error.status_code == 413:
        return _render(
            request, TooLarge("body_too_large", "The body is larger than this server accepts.")
        )
    if error.status_code < 500:
        return _render(request, InvalidRequest("invalid_request", str(error.detail)))
    if error.detail == CLIENT_DISCONNECTED:
        log.info("the client disconnected while sending its body: %s %s", method, path)
        return _render(
            request,
            InvalidRequest("incomplete_body", "The body ended before its announced length."),
        )
    return _unexpected(request, error)


def _database(request: AnyRequest, error: Exception) -> Response[Mapping[str, Any]]:
    log.error("the database failed: %s", outage_name(error))
    return _render(
        request,
        Unavailable(
            "database_unavailable",
            "The ledger is unavailable; nothing was charged. Try again.",
            retry_after_s=2,
        ),
    )


def _queue(request: AnyRequest, error: Exception) -> Response[Mapping[str, Any]]:
    log.error("the queue server failed: %s", outage_name(error))
    return _render(
        request,
        Unavailable(
            "queue_unavailable",
            "The queue server is unavailable; nothing was charged. Try again.",
            retry_after_s=2,
        ),
    )


UNSTORABLE: Final = (DataError, IntegrityError, OverflowError, RecursionError, UnicodeDecodeError)
"""Raised for a value that passed validation but cannot be stored in SQL or the queue."""


def _unstorable(request: AnyRequest, error: Exception) -> Response[Mapping[str, Any]]:
    log.warning(
        "a value passed validation but could not be stored: %s %s: %s",
        request.scope["method"],
        request.scope["path"],
        type(error).__name__,
    )
    return _render(
        request,
        InvalidRequest(
            "invalid_value", "A value is too large, nested too deeply or malformed to be stored."
        ),
    )


def _unexpected(request: AnyRequest, error: Exception) -> Response[Mapping[str, Any]]:
    log.error(
        "unexpected error at %s %s", request.scope["method"], request.scope["path"], exc_info=error
    )
    return _render(
        request, InternalError("internal_error", "An internal error occurred; it was logged.")
    )


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    TollgateError: _render,
    ValidationException: _invalid,
    HTTPException: _http,
    **dict.fromkeys(SQL_OUTAGE, _database),
    **dict.fromkeys(UNSTORABLE, _unstorable),
    RedisError: _queue,
    Exception: _unexpected,
}


def error_response(request: AnyRequest, error: Exception) -> Response[Any]:
    """Return the response to an error by the handler that the framework would choose."""
    kind = next(kind for kind in type(error).__mro__ if kind in EXCEPTION_HANDLERS)
    response: Response[Any] = EXCEPTION_HANDLERS[kind](request, error)
    return response
