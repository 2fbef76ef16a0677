"""All errors that clients can receive, with stable codes and HTTP statuses; rendered in one place.

    TollgateError
    ├── InvalidRequest          400  invalid_request, unknown_parameter, unsupported_parameter, …
    ├── Unauthorized            401  invalid_api_key, key_expired, key_revoked
    ├── PaymentRequired         402  insufficient_credit, budget_exceeded, key_spend_limit
    ├── Forbidden               403  missing_scope, role_not_allowed, model_not_allowed, …
    ├── NotFound                404  model_not_found, request_not_found, not_found
    ├── MethodNotAllowed        405  method_not_allowed
    ├── Conflict                409  idempotency_conflict
    ├── Gone                    410  link_expired, blob_expired, archived
    ├── TooLarge                413  body_too_large
    ├── RequestFailed      400, 424  a worker's failure of an accepted request
    ├── TooManyRequests         429  rate_limit_exceeded, too_many_concurrent, credit_in_use, …
    ├── InternalError           500  internal_error
    └── Unavailable             503  upstream_not_configured, no_worker, queue_unavailable, …

An error is raised where it is detected and rendered once, in the dialect that was called. Codes
never change once released. After a request has been accepted, its answer is never 5xx or 409:
clients retry those automatically, and a retry would be another request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, NotRequired, TypedDict, cast


class TollgateError(Exception):
    """An error for the client. Its message states the problem, the value and what is accepted."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    should_retry: bool | None = None
    """Value of ``X-Should-Retry`` for clients that retry automatically; None omits the header."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
        request_id: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        if should_retry is not None:
            self.should_retry = should_retry
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.details = details or {}

    @property
    def http_status(self) -> int:
        return self.status

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response, in every dialect."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.should_retry is not None:
            headers["X-Should-Retry"] = "true" if self.should_retry else "false"
        if self.request_id is not None:
            headers["X-Request-Id"] = self.request_id
        return headers


class InvalidRequest(TollgateError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(TollgateError):
    status = 401
    type = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "WWW-Authenticate": "Bearer"}


class PaymentRequired(TollgateError):
    status = 402
    type = "insufficient_quota"
    should_retry = False


class Forbidden(TollgateError):
    status = 403
    type = "permission_error"


class NotFound(TollgateError):
    status = 404
    type = "invalid_request_error"
    model: str | None = None
    """The unknown model; the response suggests the nearest one that the key may use."""


class MethodNotAllowed(TollgateError):
    status = 405
    type = "invalid_request_error"


class Conflict(TollgateError):
    status = 409
    type = "invalid_request_error"


class Gone(TollgateError):
    status = 410
    type = "invalid_request_error"


class TooLarge(TollgateError):
    status = 413
    type = "invalid_request_error"


class TooManyRequests(TollgateError):
    status = 429
    type = "rate_limit_error"
    should_retry = True


class InternalError(TollgateError):
    status = 500


class Unavailable(TollgateError):
    status = 503


def unknown_model(name: str, *, param: str = "model", listed: str = "GET /v1/models") -> NotFound:
    """Return the error for a model that does not exist; ``listed`` is where those that do are."""
    error = NotFound(
        "model_not_found",
        f"The model {name!r} does not exist; {listed} lists those that do.",
        param=param,
    )
    error.model = name
    return error


FAILURE_STATUS: Final[dict[str, int]] = {
    "invalid_input": 400,
    "context_length_exceeded": 400,
    "unsupported_parameter": 400,
    "upstream_rejected": 400,
    "model_load_failed": 424,
    "out_of_memory": 424,
    "engine_error": 424,
    "worker_lost": 424,
    "upstream_error": 424,
    "upstream_timeout": 424,
    "upstream_unavailable": 424,
    "output_too_large": 424,
}
"""HTTP status of each worker failure code; a test keeps the table complete."""


class RequestFailed(TollgateError):
    """An accepted request that ended without a complete answer. ``details`` has its ``cost`` if a
    part was delivered, and therefore charged."""

    should_retry = False

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        request_id: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(code, message, param=param, request_id=request_id, details=details)
        self._status = FAILURE_STATUS.get(code, 424)

    @property
    def http_status(self) -> int:
        return self._status


def rename(error: TollgateError, names: Mapping[str, str]) -> None:
    """Replace the name of a parameter in an error by its name in the dialect that was called."""
    ours, dot, place = (error.param or "").partition(".")
    theirs = names.get(ours, ours)
    if theirs != ours:
        error.message = f"{theirs}: {error.message}"
        error.param = f"{theirs}{dot}{place}"


class ErrorView(TypedDict):
    """An error; some have further fields (``details``)."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: NotRequired[str]


class OpenAIError(TypedDict):
    """The error body of OpenAI's API."""

    error: ErrorView


class QueueError(TypedDict):
    """The error body of GMI's request queue: one sentence."""

    error: str


class DetailView(TypedDict):
    """An error; ``code`` is Tollgate's."""

    status: str
    message: str
    code: str
    param: NotRequired[str]
    request_id: NotRequired[str]


class ElevenLabsError(TypedDict):
    """The error body of ElevenLabs' API."""

    detail: DetailView


def render_openai(error: TollgateError) -> OpenAIError:
    """Render an error as OpenAI's API does, with some extra fields, which clients ignore."""
    kind = error.type
    if isinstance(error, RequestFailed) and error.http_status == 400:
        kind = InvalidRequest.type
    body: ErrorView = {
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    if error.request_id is not None:
        body["request_id"] = error.request_id
    body.update(cast("ErrorView", error.details))
    return {"error": body}


def render_text(error: TollgateError) -> QueueError:
    """Render an error as GMI's request queue does."""
    return {"error": error.message}


_STATUSES: Final[dict[str, str]] = {
    "insufficient_credit": "quota_exceeded",
    "budget_exceeded": "quota_exceeded",
    "key_spend_limit": "quota_exceeded",
    "too_many_concurrent": "too_many_concurrent_requests",
    "queue_full": "system_busy",
    "account_full": "system_busy",
    "missing_scope": "missing_permissions",
}
"""Error code → ElevenLabs' status; codes that are missing here are used as they are."""


def render_detail(error: TollgateError) -> ElevenLabsError:
    """Render an error as ElevenLabs' API does; ``code`` is Tollgate's."""
    detail = {
        "status": _STATUSES.get(error.code, error.code),
        "message": error.message,
        "code": error.code,
        "param": error.param,
        "request_id": error.request_id,
    }
    shown = {name: value for name, value in detail.items() if value is not None}
    return {"detail": cast("DetailView", shown)}
