"""When a call to an upstream is repeated, and after how long. Knows no wire format."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import httpx
import tenacity

ATTEMPTS: Final = 3
RETRY_AFTER_MAX_S: Final = 10.0
BUSY_PAUSE_S: Final = 1.0
"""For an endpoint that is busy and does not say how long."""


CLOSED_S: Final = 0.5
"""Time after sending within which a break of a reused connection means that it was closed idle."""


class EndpointBusyError(Exception):
    """The upstream takes nothing more at present."""

    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s


class NoEndpointError(Exception):
    """Every endpoint is down."""


class NotSentError(Exception):
    """The connection broke before the request was sent, so nothing was produced for it."""


class Sending:
    """Observes one exchange (httpcore's ``trace`` extension): was the request sent as a whole?

    A connection that was used before can be closed by the upstream in the instant in which it is
    used again. Such a request was not read, so it counts as not sent if the break comes at once.
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
    """As long as the upstream asks for, or ever longer."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, EndpointBusyError) and error.retry_after_s is not None:
        return min(error.retry_after_s, RETRY_AFTER_MAX_S)
    return _backoff(state)


def retry_after_s(headers: httpx.Headers) -> float | None:
    """Only in seconds; a date would need the upstream's clock."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
