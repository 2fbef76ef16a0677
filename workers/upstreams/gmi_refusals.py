"""Judges responses of GMI Cloud's request queue that are not successes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from workers.contract.jobs import Failed, FailureCode
from workers.upstreams import gmi_wire as wire

CALLERS: Final = (400, 413, 422)
"""Statuses of requests that the client must change."""
BUSY: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_OPERATORS: Final[Mapping[int, str]] = {
    401: "The upstream does not accept this server's credential; its operator must renew it.",
    402: "This server's account at the upstream is out of credit; its operator must add some.",
    403: "The upstream denies access to this server's account; its operator must resolve this.",
}
_NO_MODEL: Final = "The upstream does not have this model, or not for this server's account."


def effective_status(status: int, message: str) -> int:
    """Return the status of a response, or the one that the vendor's refusal inside it had.

    A vendor that denies access denies it to the queue's account, whatever its own status.
    """
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return status
    found = wire.vendor_status(message)
    return HTTPStatus.FORBIDDEN if found == HTTPStatus.UNAUTHORIZED else found or status


def refused_call(status: int, message: str, *, what: str, is_request: bool) -> Failed:
    """Return the failure of a call that was refused with an effective status."""
    if status in CALLERS:
        reason = message or "no reason given"
        return Failed("upstream_rejected", f"The upstream rejected {what}: {reason}")
    if status == HTTPStatus.NOT_FOUND and is_request:
        return Failed("upstream_unavailable", _NO_MODEL)
    if status in _OPERATORS:
        return Failed("upstream_unavailable", _OPERATORS[status])
    return Failed("upstream_error", f"The upstream answered with status {status}.")


def failed_request(record: wire.Record, message: str) -> Failed:
    """Return the failure of a request that ended without success."""
    if record.end == "cancelled":
        return Failed("upstream_error", "The upstream cancelled the request.")
    code: FailureCode = "upstream_error"
    if wire.is_rate_limit(message):
        code = "upstream_unavailable"
    elif wire.vendor_status(message) in CALLERS:
        code = "upstream_rejected"
    reason = message or "no reason given"
    return Failed(code, f"The upstream failed on the request: {reason}")


def no_upload(why: str) -> Failed:
    return Failed(
        "upstream_unavailable", f"A source file could not be uploaded to the upstream: {why}."
    )


def not_started(timeout_s: float) -> Failed:
    return Failed(
        "upstream_timeout",
        f"The upstream accepted the request, but did not start it within {timeout_s:g} s. Nothing "
        "is charged.",
    )
