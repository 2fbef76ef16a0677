"""One client's interest in one request: waits for it, reads along, and notices when it has gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from litestar import Request

from gateway.dispatch.waiters import Waiter
from gateway.errors import RequestFailed, TooManyRequests
from gateway.ledger.closed import ClosedRequest
from gateway.pricing import format_usd
from gateway.requests.admit import Admitted
from gateway.requests.incremental_holds import IncrementalHold
from gateway.sql.outages import OUTAGE, SQL_OUTAGE, outage_name
from gateway.tasks.submission import OpenRequest, Submission
from workers.contract.jobs import RequestId, SentEvent

if TYPE_CHECKING:
    from gateway.requests.service import Requests

log = logging.getLogger(__name__)

TICK_S = 2.0
"""Interval at which a waiting client is given a sign of life, or found to have gone."""
POLL_S = 10.0
"""Time without any news of a request after which it is looked up: its wake-up may be lost."""
POLL_REPLAYED_S = 2.0
"""The same for an order that was placed before: its wake-up may go to another gateway."""
LOOK_AGAIN_S = 0.5
"""Pause after a lookup that failed."""
HOLD_MORE_S = 2.0
"""Time for which a stream waits while more is held for it."""
HOLD_AGAIN_S = 5.0
"""Pause after a database that was away; the stream goes on meanwhile."""


class Ticket:
    """One client's interest in one request, from before it is queued until it is closed.

    Leaving the context while the request is still open means that the client has gone.
    """

    def __init__(
        self, requests: Requests, account_id: int, order: Submission, request_id: RequestId
    ) -> None:
        self._requests = requests
        self.account_id = account_id
        self._order = order
        self._watching = contextlib.ExitStack()
        self._waiter = self._watch(request_id)
        self.request_id = request_id
        self.model = order.model
        self.accepted_at = datetime.now(UTC)
        self.replayed = False
        self._slices: IncrementalHold | None = None
        self._hold_again = 0.0
        self._closed: ClosedRequest | None = None
        self._gone: asyncio.Task[None] | None = None
        self._cost_nanos: int | None = None
        self._accepted: OpenRequest | None = None

    def _watch(self, request_id: RequestId) -> Waiter:
        return self._watching.enter_context(self._requests.waiters.watch(request_id))

    def attach(self, admitted: Admitted) -> None:
        if admitted.replayed:
            self.join(admitted.request_id, admitted.accepted_at)
        else:
            self._expect()
        self.accepted_at = admitted.accepted_at
        self._slices = None if admitted.replayed else admitted.slices
        self._cost_nanos = None if admitted.replayed else admitted.cost_nanos
        if not admitted.replayed:
            self._accepted = OpenRequest(
                admitted.request_id,
                self.account_id,
                admitted.job.model,
                admitted.job.task,
                "queued",
                admitted.hold_nanos,
                admitted.accepted_at,
                admitted.deadline_at,
                metadata=self._order.metadata or {},
            )

    def join(self, request_id: RequestId, accepted_at: datetime) -> None:
        """Wait for a request that was accepted before."""
        self._watching.close()
        self._waiter = self._watch(request_id)
        self.request_id = request_id
        self.accepted_at = accepted_at
        self.replayed = True
        self._expect()

    def _expect(self) -> None:
        """Be found by a repetition of the order for as long as this waits."""
        name, request_id = self._order.fingerprint, self.request_id
        if name is not None:
            retries = self._requests.retries
            retries.begin(name, request_id)
            self._watching.callback(retries.end, name, request_id)

    async def placed(self) -> OpenRequest | ClosedRequest:
        """What the request is now. If that cannot be read, it is as it was accepted: its client
        must learn its id, for it runs and is charged."""
        try:
            return await self._requests.find(self.account_id, self.request_id)
        except OUTAGE:
            if self._accepted is None:
                raise
            return self._accepted

    @property
    def result(self) -> ClosedRequest:
        """The closed request, once ``closed`` or ``events`` has come to its end."""
        assert self._closed is not None
        return self._closed

    @property
    def cost_nanos(self) -> int | None:
        """What the request costs if it succeeds, as far as that is known by now."""
        return self._cost_nanos if self._closed is None else self._closed.cost_nanos

    @contextlib.contextmanager
    def attended(self, request: Request[Any, Any, Any]) -> Iterator[None]:
        """Within this, whatever waits raises ``RequestFailed`` once the client has disconnected."""
        self._gone = asyncio.create_task(_disconnected(request))
        self._gone.add_done_callback(lambda _: self._waiter.wake())
        try:
            yield
        finally:
            self._gone.cancel()
            self._gone = None

    async def closed(self, request: Request[Any, Any, Any]) -> ClosedRequest:
        """Wait for the end, or until the client disconnects (then raise ``RequestFailed``)."""
        with self.attended(request):
            return await self.ended()

    async def logged(self, after: tuple[int, int] | None) -> Sequence[SentEvent]:
        """What was said after an attempt's event of this number, as far as it is kept."""
        return await self._requests.logged(self.request_id, after)

    async def ended(self) -> ClosedRequest:
        """Wait for the end, however long it takes."""
        async for _ in self._news():
            pass
        return self.result

    async def events(self, keep_alive_s: float) -> AsyncIterator[SentEvent | None]:
        """Give events as they come, None when nothing did for a while; end when closed."""
        spoke = time.monotonic()
        async for events in self._news():
            await self._hold_more(events)
            for event in events:
                yield event
            now = time.monotonic()
            if events:
                spoke = now
            elif now - spoke >= keep_alive_s:
                spoke = now
                yield None

    async def _news(self) -> AsyncIterator[list[SentEvent]]:
        """Give batches of events, empty ones at intervals; end once the request is closed.

        The wake-up of a request that another process settled may be lost, so SQL is asked when
        nothing was heard for a while; a replayed order is asked for immediately, since it may have
        been closed long ago.
        """
        if self.replayed:
            await self._look()
        poll_s = POLL_REPLAYED_S if self.replayed else POLL_S
        heard = time.monotonic()
        while self._closed is None:
            events = await self._waiter.next(TICK_S)
            if self._gone is not None and self._gone.done() and self._waiter.closed is None:
                raise RequestFailed(
                    "client_closed_request",
                    "The client went away before the answer.",
                    request_id=self.request_id,
                )
            if self._waiter.closed is not None:
                self._closed = await self._requests.whole(self._waiter.closed)
            elif self._waiter.settled or time.monotonic() - heard >= poll_s:
                await self._look()
                heard = time.monotonic()
            if events:
                heard = time.monotonic()
            yield events

    async def _hold_more(self, events: Sequence[SentEvent]) -> None:
        """Keep what is held ahead of what is produced. Should that fail for now, the stream goes
        on: it can be charged no more than was held."""
        slices = self._slices
        if slices is None:
            return
        for event in events:
            slices.count(event)
        if time.monotonic() < self._hold_again:
            return
        extension = slices.next(self.request_id)
        try:
            if extension is not None:
                async with asyncio.timeout(HOLD_MORE_S):
                    await self._requests.hold_more(slices, extension)
            if slices.used_up:
                self._slices = None
                await self._requests.cut(self.model, self.request_id, slices.shortage or "")
        except OUTAGE as error:
            # The stream is not stopped again by a database that is away.
            self._hold_again = time.monotonic() + HOLD_AGAIN_S
            log.warning("%s was not held for further: %s", self.request_id, outage_name(error))

    async def _look(self) -> None:
        try:
            self._closed = await self._requests.end_of(self.account_id, self.request_id)
        except SQL_OUTAGE as error:
            # What runs goes on: the end is found when the database is back.
            log.debug("%s was not looked up: %s", self.request_id, outage_name(error))
            await asyncio.sleep(LOOK_AGAIN_S)

    def close(self) -> None:
        self._watching.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        # An order with a name of its own is kept: whoever placed it will come back for it.
        if self._closed is None and self._order.waits and self._order.idempotency is None:
            self._requests.leave(self.account_id, self._order, self.request_id)


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def not_entered(reason: str) -> TooManyRequests:
    """The error of an order that found its queue full; placed again, it is a new attempt."""
    whose = " by this account" if reason == "account_full" else ""
    return TooManyRequests(
        reason, f"Too many requests are queued for this model{whose}.", retry_after_s=5
    )


def raise_unless_succeeded(closed: ClosedRequest) -> None:
    """Turn an unsuccessful end into the error that the client sees."""
    if closed.status == "succeeded":
        return
    if not closed.was_queued:
        raise not_entered(closed.reason)
    raise RequestFailed(
        closed.error.code if closed.error else closed.status,
        closed.error.message
        if closed.error
        else f"The request ended as {closed.status} ({closed.reason}).",
        param=closed.error.param if closed.error else None,
        request_id=closed.request_id,
        details={"cost": format_usd(closed.cost_nanos)} if closed.cost_nanos else None,
    )
