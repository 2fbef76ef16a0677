"""Decides when a call to an upstream is retried, and after how long. Knows no wire format."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import httpx
import tenacity

ATTEMPTS: Final = 3
RETRY_AFTER_MAX_S: Final = 10.0
BUSY_PAUSE_S: Final = 1.0
"""Pause of a busy endpoint that sends no ``Retry-After``."""
CLOSED_S: Final = 0.5
"""Time after sending within which the loss of a reused connection means that it was closed while
idle."""


class EndpointBusyError(Exception):
    """The upstream accepts no more requests now."""

    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s


class NoEndpointError(Exception):
    """Every endpoint is down."""


class NotSentError(Exception):
    """The connection was lost before the request was sent, so it produced nothing."""


class Sending:
    """Observes one exchange by httpcore's ``trace`` extension: whether the request was fully sent.

    The upstream can close an idle connection just as it is reused. Such a request was not read, so
    it counts as not sent if the connection is lost immediately.
    """

    def __init__(self) -> None:
        self._is_reused = True
        self._sent_s: float | None = None

    async def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            self._is_reused = False
        elif event == "http11.send_request_body.complete":
            self._sent_s = time.monotonic()

    @property
    def is_sent(self) -> bool:
        if self._sent_s is None:
            return False
        return not self._is_reused or time.monotonic() - self._sent_s > CLOSED_S


_backoff = tenacity.wait_random_exponential(multiplier=0.2, max=5)


def wait_s(state: tenacity.RetryCallState) -> float:
    """Return the upstream's ``Retry-After``, or an exponential backoff."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, EndpointBusyError) and error.retry_after_s is not None:
        return min(error.retry_after_s, RETRY_AFTER_MAX_S)
    return _backoff(state)


def retry_after_s(headers: httpx.Headers) -> float | None:
    """Parse ``Retry-After`` in seconds; dates are ignored because clocks can differ."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
