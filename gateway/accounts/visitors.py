"""Bounds calls without a key: by network, and in total. Counts in memory, for each process.

Nothing is written for a visitor, and an address costs a few bytes until the minute is over.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Final

from gateway.errors import TooManyRequests

WINDOW_S: Final = 60.0
TOTAL_FACTOR: Final = 20
"""The maximum of all networks together, as a multiple of that of one."""


class Visitors:
    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._began = -WINDOW_S
        self._counts: Counter[str] = Counter()
        self._total = 0

    def admit(self, address: str, now: float) -> None:
        """Count a call at a moment of a monotonic clock. Raise ``TooManyRequests``."""
        if now - self._began >= WINDOW_S:
            self._began, self._total = now, 0
            self._counts.clear()
        network = _network(address)
        if (
            self._counts[network] >= self._per_minute
            or self._total >= TOTAL_FACTOR * self._per_minute
        ):
            raise TooManyRequests(
                "rate_limit_exceeded",
                f"At most {self._per_minute} calls per minute are accepted without a key; send "
                "one, or try again later.",
                retry_after_s=max(1, round(self._began + WINDOW_S - now)),
            )
        self._counts[network] += 1
        self._total += 1


def _network(address: str) -> str:
    """Return the network that one visitor controls: an IPv4 address, or a /64 of IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6 and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
