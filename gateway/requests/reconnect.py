"""Reconnects: a request that is sent again after a disconnect joins the first one.

A client that lost its connection sends the same bytes again and must not pay twice. So a request
whose client has disconnected is remembered for a while by its fingerprint, by all gateways, and the
next one with the same bytes and key is treated as a retry. Two equal requests whose clients both
wait are separate: clients send the same request concurrently to choose among the answers. Only a
client that declares a retry joins a request that is still awaited here.

Nearly every request repeats none, and must not ask the queue server about it. So disconnects are
also announced on a stream that every gateway reads, and only a fingerprint that was announced there
is looked up. A gateway that cannot read the stream looks every fingerprint up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import time
from typing import Any, Final, cast

from redis.asyncio import Redis

from gateway.sql.outages import QUEUE_OUTAGE
from gateway.supervision import Beat, no_beat
from workers.contract.jobs import RequestId

log = logging.getLogger(__name__)

NOTICE_S: Final = 0.01
"""Time to detect a disconnect, since a client can reconnect sooner than that."""
LOOK_S: Final = 1.0
"""Timeout of the search for an earlier request."""
PATIENCE_S: Final = 0.2
"""Minimum time for which a client waits before it retries."""
STREAM_MAX: Final = 10_000
"""Maximum number of disconnects on the stream."""
READ_MAX: Final = 500
BLOCK_MS: Final = 1000
STALE_S: Final = 1.5
"""Time since the last reading of the stream after which every fingerprint is looked up."""


def fingerprint(key_id: int, path: str, body: bytes) -> str:
    """Digest key, path and body, to recognise the same request."""
    return hashlib.sha256(b"%d %s\n" % (key_id, path.encode()) + body).hexdigest()


class Reconnects:
    """Finds the earlier request that a submission repeats."""

    def __init__(self, redis: Redis, *, namespace: str, window_s: float) -> None:
        self._redis = redis
        self._prefix = f"{namespace}:retry:"
        self._stream = f"{namespace}:disconnects"
        self._window_ms = int(window_s * 1000)
        self._running: dict[str, tuple[RequestId, float]] = {}
        # Known here immediately; the other gateways are informed through Redis.
        self._lost: dict[str, tuple[RequestId, float]] = {}
        self._announced: dict[str, float] = {}
        """Fingerprints announced by any gateway, and when that was learnt."""
        self._cursor = "0-0"
        self._read_at = -math.inf

    async def listen(self, beat: Beat = no_beat) -> None:
        """Read which clients have disconnected from any gateway, until cancelled."""
        while True:
            try:
                await self._read()
            except QUEUE_OUTAGE as error:
                self._read_at = -math.inf
                log.warning("could not read disconnects, retrying: %s", type(error).__name__)
                await asyncio.sleep(0.5)
            beat()

    async def earlier(self, name: str, *, says_so: bool) -> RequestId | None:
        """Return the request that a submission of this fingerprint repeats, to one caller only.

        ``says_so``: whether the client declares a retry.
        """
        if name in self._running:
            request_id, since = self._running[name]
            if says_so:
                return request_id
            if time.monotonic() - since > PATIENCE_S:
                await asyncio.sleep(NOTICE_S)
        here = self._take_lost(name)
        if name not in self._announced and time.monotonic() - self._read_at < STALE_S:
            return here
        learnt_at = self._announced.get(name)
        with contextlib.suppress(*QUEUE_OUTAGE):
            async with asyncio.timeout(LOOK_S):
                found = cast(bytes | None, await self._redis.getdel(self._prefix + name))
                if self._announced.get(name) == learnt_at:  # not announced again meanwhile
                    self._announced.pop(name, None)
                return here if found is None else RequestId(found.decode())
        return here

    def begin(self, name: str, request_id: RequestId) -> None:
        """Record that a client waits here for a request of this fingerprint."""
        self._running[name] = (request_id, time.monotonic())

    def end(self, name: str, request_id: RequestId) -> None:
        """Record that the client no longer waits."""
        if name in self._running and self._running[name][0] == request_id:
            del self._running[name]

    def lose(self, name: str, request_id: RequestId) -> None:
        """Record that the client disconnected before the answer."""
        self._lost.pop(name, None)
        self._lost[name] = (request_id, time.monotonic())
        # In order of time. What could not be announced expires here.
        for old, (_, since) in tuple(itertools.islice(self._lost.items(), 2)):
            if time.monotonic() - since > self._window_ms / 1000:
                del self._lost[old]

    def _take_lost(self, name: str) -> RequestId | None:
        request_id, since = self._lost.pop(name, (None, 0.0))
        return request_id if time.monotonic() - since <= self._window_ms / 1000 else None

    async def announce(self, name: str) -> None:
        """Announce a disconnected request to all gateways, unless its client is back already."""
        lost = self._lost.get(name)
        if lost is not None:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(self._prefix + name, lost[0], px=self._window_ms)
                pipeline.xadd(self._stream, {b"f": name}, maxlen=STREAM_MAX, approximate=True)
                pipeline.pexpire(self._stream, self._window_ms)
                await pipeline.execute()
            self._learn(name)
            if self._lost.pop(name, None) is None:
                await self._redis.delete(self._prefix + name)

    async def give_up(self, name: str) -> bool:
        """Stop waiting for a retry. Return whether there was none."""
        return await self._redis.getdel(self._prefix + name) is not None

    async def _read(self) -> None:
        answer = await self._redis.xread({self._stream: self._cursor}, READ_MAX, BLOCK_MS)
        for _, entries in cast(list[Any], answer):
            for entry_id, fields in entries:
                self._cursor = entry_id.decode()
                self._learn(fields[b"f"].decode())
            if len(entries) == READ_MAX:
                return  # there may be more
        self._read_at = time.monotonic()

    def _learn(self, name: str) -> None:
        self._announced.pop(name, None)
        self._announced[name] = time.monotonic()
        for old, since in tuple(itertools.islice(self._announced.items(), 2)):
            if time.monotonic() - since > self._window_ms / 1000:
                del self._announced[old]
