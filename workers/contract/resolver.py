"""Resolves untrusted host names without blocking other threads of the process.

The system's resolver blocks a thread until it gives up, which takes half a minute if a name server
does not respond. Therefore each lookup has a separate daemon thread, lookups are limited in total
and per owner, equal lookups share a thread, and no caller waits longer than ``TIMEOUT_S``. A thread
counts until it ends, even if all its callers have given up.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Final

TOTAL_MAX: Final = 64
OWNER_MAX: Final = 8
"""Maximum number of concurrent lookups of one account."""
TIMEOUT_S: Final = 5.0


class HostResolver:
    """Resolves host names. Thread-safe, and not bound to an event loop."""

    def __init__(
        self,
        *,
        total_max: int = TOTAL_MAX,
        owner_max: int = OWNER_MAX,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._total_max = total_max
        self._owner_max = owner_max
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str, int], Future[list[str]]] = {}
        self._owners: Counter[str] = Counter()

    async def resolve(self, host: str, port: int, *, owner: str = "") -> list[str]:
        """Return the addresses of a host. Raise ``OSError`` if there are none or on timeout."""
        found = self._begin(host, port, owner)
        try:
            async with asyncio.timeout(self._timeout_s):
                # The lookup continues for other callers.
                return await asyncio.shield(asyncio.wrap_future(found))
        except TimeoutError:
            raise OSError(f"no answer from a name server within {self._timeout_s:g} s") from None

    def _begin(self, host: str, port: int, owner: str) -> Future[list[str]]:
        name = (owner, host, port)
        with self._lock:
            known = self._running.get(name)
            if known is not None:
                return known
            if len(self._running) >= self._total_max or self._owners[owner] >= self._owner_max:
                raise OSError("too many concurrent name lookups")
            future: Future[list[str]] = Future()
            self._running[name] = future
            self._owners[owner] += 1
        threading.Thread(
            target=self._look_up, args=(name, future), name="names", daemon=True
        ).start()
        return future

    def _look_up(self, name: tuple[str, str, int], future: Future[list[str]]) -> None:
        owner, host, port = name
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [str(entry[4][0]) for entry in found]
        except UnicodeError as error:
            outcome: OSError | None = OSError(f"no such host: {error}")
        except OSError as error:
            outcome = error
        else:
            outcome = None if addresses else OSError("no such host")
        with self._lock:
            del self._running[name]
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
        if outcome is not None:
            future.set_exception(outcome)
        else:
            future.set_result(addresses)
