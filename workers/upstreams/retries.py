"""Decides where and when a call to an upstream is retried. Knows no wire format."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from workers.upstreams.endpoints import Endpoint, Endpoints

ATTEMPTS: Final = 3
RETRY_AFTER_MAX_S: Final = 10.0
BUSY_PAUSE_S: Final = 1.0
"""Pause of a busy endpoint that sends no ``Retry-After``."""
BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0

_T = TypeVar("_T")


class EndpointBusyError(Exception):
    """The upstream accepts no more requests now."""

    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after_s = retry_after_s


class NoEndpointError(Exception):
    """Every endpoint is down."""


async def try_endpoints(
    endpoints: Endpoints,
    attempt: Callable[[Endpoint], Awaitable[_T]],
    *,
    retried: tuple[type[Exception], ...],
    key: str = "",
) -> _T:
    """Call ``attempt`` with an endpoint, chosen by the job's key if they have weights. After an
    error of ``retried``, try another endpoint, or pause if there is none. Raise the last error, or
    ``NoEndpointError``."""
    avoid: set[Endpoint] = set()
    attempts = max(ATTEMPTS, len(endpoints.all))
    for number in itertools.count(1):
        endpoint = endpoints.choose(avoid, key)
        if endpoint is None:
            break
        avoid.add(endpoint)
        try:
            return await attempt(endpoint)
        except retried as error:
            if number == attempts:
                raise
            pause_s = 0.0 if endpoints.has_other(avoid) else _pause_s(error, number)
        await asyncio.sleep(pause_s)
    raise NoEndpointError


def _pause_s(error: Exception, number: int) -> float:
    """Return the upstream's ``Retry-After``, or a randomised exponential backoff."""
    if isinstance(error, EndpointBusyError) and error.retry_after_s is not None:
        return min(error.retry_after_s, RETRY_AFTER_MAX_S)
    return random.uniform(0.0, min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** (number - 1)))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Parse ``Retry-After`` in seconds; dates are ignored because clocks can differ."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
