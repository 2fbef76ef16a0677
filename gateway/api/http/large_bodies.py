"""Bodies of more than ``SMALL`` bytes: admitted before they are read, and kept out of memory.

Nothing is read before the key and the account's standing have been checked. Bytes in flight are
limited per account and for the gateway. Files in JSON are spooled to disk as they arrive
(``gateway.files.spool``); forms and plain files are streamed anyway. Small bodies are unaffected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from litestar import Request
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler

from gateway.accounts.keys import KeyInfo
from gateway.errors import TooLarge, TooManyRequests, Unavailable
from gateway.files.room import Room, check_standing
from gateway.files.spool import SPOOL, Extractor, Spool
from gateway.sql.database import Database

FORM: Final = "multipart/form-data"
SMALL: Final = 256 * 1024
DIGITS: Final = len(str(SMALL))
RETRY_AFTER_S: Final = 2
THREADS: Final = 2


class Bodies:
    """Owns the budget of bytes in flight and the spooling threads; ``close`` stops the threads."""

    def __init__(
        self,
        database: Database,
        room: Room,
        *,
        directory: Path,
        bytes_max: int,
        account_bytes_max: int,
        memory_max: int,
        kept_max: int,
    ) -> None:
        """``kept_max`` limits the bytes of one body, without its files, in memory."""
        self._database = database
        self._room = room
        self._directory = directory
        self._bytes_max = bytes_max
        self._account_bytes_max = account_bytes_max
        self.memory_max = memory_max
        self._kept_max = kept_max
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bodies")
        self._in_flight: Counter[int] = Counter()
        self.memory = 0
        """Bytes of bodies in memory now."""

    def close(self) -> None:
        self._threads.shutdown()

    async def receive(
        self, request: Request[Any, Any, Any], handler: BaseRouteHandler, key: KeyInfo
    ) -> None:
        """Admit a body that may be large, and receive it if it is JSON. Raise ``TollgateError``."""
        size = size_of(request)
        largest = handler.resolve_request_max_body_size()  # type: ignore[attr-defined]
        if size > largest and request.headers.get("content-length"):
            raise HTTPException(status_code=413)
        size = min(size, largest)
        if handler.opt.get("scope") == "inference":
            await self._database.read(lambda found: check_standing(found, key.account_id))
        is_json = request.content_type[0] != FORM and not handler.opt.get("stores_body")
        takes_files = largest > self._kept_max
        self._admit(key.account_id, size)
        spool = Spool(
            self._directory,
            self._threads,
            closed=lambda: self._release(key.account_id, size),
        )
        memory = _Memory(self)

        def ended(_: object) -> None:
            spool.close()
            memory.release()

        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        task.add_done_callback(ended)
        if is_json and takes_files:
            with self._room.arriving(size):
                await self._room.check_disk()
                body = await self._spooled(request, spool, memory)
            SPOOL.set(spool)
            _replay(request, body)
        elif is_json:
            memory.grow(size)

    async def _spooled(
        self, request: Request[Any, Any, Any], spool: Spool, memory: _Memory
    ) -> bytes:
        """Receive a body without its files. Raise ``TooLarge`` or ``Unavailable``."""
        extractor = Extractor(spool)
        async with contextlib.aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                await extractor.feed(chunk)
                memory.grow(len(extractor.kept))
                if len(extractor.kept) > self._kept_max:
                    raise TooLarge(
                        "body_too_large",
                        f"Without its files, a body can have at most {self._kept_max} bytes; send "
                        "files as data URIs in base64, or upload them first.",
                    )
        return extractor.end()

    def _admit(self, account_id: int, size: int) -> None:
        """Count a body as in flight. Raise ``TooManyRequests`` or ``Unavailable``."""
        mine = self._in_flight[account_id]
        if mine and mine + size > self._account_bytes_max:
            raise TooManyRequests(
                "too_many_bytes_in_flight",
                f"Requests of this account with {mine} bytes are in progress; another {size} would "
                f"exceed its limit of {self._account_bytes_max}. Wait for one to end.",
                retry_after_s=RETRY_AFTER_S,
                details={"limit": self._account_bytes_max, "unit": "bytes"},
            )
        total = self._in_flight.total()
        if total and total + size > self._bytes_max:
            raise _busy()
        self._in_flight[account_id] += size

    def _release(self, account_id: int, size: int) -> None:
        self._in_flight[account_id] -= size
        if not self._in_flight[account_id]:
            del self._in_flight[account_id]


class _Memory:
    """One body's share of the memory budget."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._taken = 0

    def grow(self, size: int) -> None:
        """Raise the share to ``size`` bytes. Raise ``Unavailable`` beyond the budget."""
        more = size - self._taken
        if more > 0 and self._bodies.memory + more > self._bodies.memory_max:
            raise _busy()
        self._bodies.memory += more
        self._taken = size

    def release(self) -> None:
        self._bodies.memory -= self._taken
        self._taken = 0


def may_be_large(request: Request[Any, Any, Any]) -> bool:
    """Whether a body's announced size is large or missing."""
    announced = request.headers.get("content-length")
    if announced is None:
        return "transfer-encoding" in request.headers
    return len(announced) >= DIGITS and size_of(request) > SMALL


def size_of(request: Request[Any, Any, Any]) -> int:
    """Return a body's announced size in bytes, or 2**62 if it is unknown."""
    announced = request.headers.get("content-length")
    if announced is not None:
        return int(announced) if announced.isdecimal() else 0
    return 2**62


def _busy() -> Unavailable:
    return Unavailable(
        "too_many_bytes_in_flight",
        "This gateway has reached its limit of bytes in flight; send the request again.",
        retry_after_s=RETRY_AFTER_S,
    )


def _replay(request: Request[Any, Any, Any], body: bytes) -> None:
    """Make ``request`` deliver ``body`` in one piece when it is read again."""
    rest = request.receive
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            return await rest()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    request.receive = receive
    request.is_connected = True
