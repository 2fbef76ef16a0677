"""Cancels requests: on demand, and in the background if their client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gateway.dispatch.enqueue import CancelledBy, Dispatch
from gateway.dispatch.waiters import Waiters
from gateway.errors import NotFound
from gateway.ledger.closed import ClosedRequest
from gateway.requests.lookup import Lookup
from gateway.requests.reconnect import Reconnects
from gateway.requests.settle import Settler
from gateway.sql.outages import OUTAGE
from workers.contract.jobs import RequestId

log = logging.getLogger(__name__)

STOP_S = 2.0
"""Maximum time for which a stopping gateway still records disconnects."""


class Cancellation:
    def __init__(
        self,
        *,
        dispatch: Dispatch,
        settler: Settler,
        lookup: Lookup,
        waiters: Waiters,
        reconnects: Reconnects,
        grace_s: float,
    ) -> None:
        """``grace_s`` is the time in which a client can reconnect to an unstreamed request."""
        self._dispatch = dispatch
        self._settler = settler
        self._lookup = lookup
        self._waiters = waiters
        self._reconnects = reconnects
        self._grace_s = grace_s
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    async def cancel(self, model: str, request_id: RequestId, by: CancelledBy = "client") -> None:
        """Cancel a request, which may have ended already."""
        answer = await self._dispatch.cancel(model, request_id, by)
        if answer == "unknown":
            # Nothing runs that the queue does not know, so the hold is released here.
            await self._settler.give_up(request_id, status="cancelled", reason=by)

    async def take_back(self, model: str, request_id: RequestId) -> None:
        """Cancel a request that was refused although it may have been accepted, without a charge.

        The hold is released before the queue is asked, which can be unreachable or wiped by then:
        without a hold, no sweeper runs the request.
        """
        await self._settler.release(request_id, status="cancelled", reason="client")
        await self._dispatch.cancel(model, request_id)

    def leave(
        self, account_id: int, request_id: RequestId, queue: str, fingerprint: str | None
    ) -> None:
        """Cancel a request in the background if no client waits for it any more, unless one
        reconnects within the grace period."""
        if request_id in self._waiters:
            return
        if fingerprint is not None:
            self._reconnects.lose(fingerprint, request_id)
        task = asyncio.create_task(self._leave(account_id, request_id, queue, fingerprint))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def stop(self) -> None:
        """End the grace periods; other gateways can be reconnected to."""
        self._stopping.set()
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=STOP_S)

    async def _leave(
        self, account_id: int, request_id: RequestId, queue: str, fingerprint: str | None
    ) -> None:
        try:
            if fingerprint is None or await self._is_given_up(account_id, request_id, fingerprint):
                await self.cancel(queue, request_id)
        except OUTAGE as error:
            log.warning("could not cancel %s: %s", request_id, type(error).__name__)

    async def _is_given_up(self, account_id: int, request_id: RequestId, fingerprint: str) -> bool:
        """Wait for the client to reconnect. If the request or this process ends meanwhile, the
        answer is kept for a client that reconnects later."""
        await self._reconnects.announce(fingerprint)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._stopping.wait()
        if self._stopping.is_set():
            return False
        try:
            found = await self._lookup.find(account_id, request_id, whole=False)
        except NotFound:
            return True  # A crash of the database lost its hold, so no retry can join it.
        if isinstance(found, ClosedRequest):
            return False
        return await self._reconnects.give_up(fingerprint)
