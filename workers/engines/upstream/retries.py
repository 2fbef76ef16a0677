"""When a call to an upstream is repeated, and after how long. Knows no wire format."""

from __future__ import annotations

from typing import Final

import httpx
import tenacity

ATTEMPTS: Final = 3
RETRY_AFTER_MAX_S: Final = 10.0
PARK_S: Final = 1.0
"""For an endpoint that is busy and does not say how long."""


class Busy(Exception):
    """The upstream takes nothing more at present."""

    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s


class NobodyThereError(Exception):
    """Every endpoint is down."""


_backoff = tenacity.wait_random_exponential(multiplier=0.2, max=5)


def wait_s(state: tenacity.RetryCallState) -> float:
    """As long as the upstream asks for, or ever longer."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, Busy) and error.retry_after_s is not None:
        return min(error.retry_after_s, RETRY_AFTER_MAX_S)
    return _backoff(state)


def retry_after_s(headers: httpx.Headers) -> float | None:
    """Only in seconds; a date would need the upstream's clock."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
