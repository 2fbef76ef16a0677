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
from redis.exceptions import RedisError
from sqlalchemy.exc import DBAPIError

from gateway.errors import RequestFailed
from gateway.ledger.closed import Closed
from gateway.requests.admit import Admitted
from gateway.requests.order import Order
from gateway.requests.slices import Slices
from gateway.requests.wait import Waiter
from workers.contract.jobs import RequestId, SentEvent

if TYPE_CHECKING:
    from gateway.requests.lifecycle import Requests

log = logging.getLogger(__name__)

POLL_S = 2.0
"""How often a waiting client's request is looked up in SQL, should its wake-up have been lost."""


class Ticket:
    """One client's interest in one request, from before it is queued until it is closed.

    Leaving the context while the request is still open means that the client has gone.
    """

    def __init__(
        self, requests: Requests, account_id: int, order: Order, request_id: RequestId
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
        self._slices: Slices | None = None
        self._closed: Closed | None = None
        self._gone: asyncio.Task[None] | None = None
        self._cost_nanos: int | None = None

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

    @property
    def result(self) -> Closed:
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
        self._gone.add_done_callback(lambda _: self._waiter.nudge())
        try:
            yield
        finally:
            self._gone.cancel()
            self._gone = None

    async def closed(self, request: Request[Any, Any, Any]) -> Closed:
        """Wait for the end, or until the client disconnects (then raise ``RequestFailed``)."""
        with self.attended(request):
            return await self.ended()

    async def logged(self, after: tuple[int, int] | None) -> Sequence[SentEvent]:
        """What was said after an attempt's event of this number, as far as it is kept."""
        return await self._requests.logged(self.request_id, after)

    async def ended(self) -> Closed:
        """Wait for the end, however long it takes."""
        async for _ in self._news(POLL_S):
            pass
        return self.result

    async def events(self, keep_alive_s: float) -> AsyncIterator[SentEvent | None]:
        """Give events as they come, None when nothing did for a while; end when closed."""
        spoke = time.monotonic()
        async for events in self._news(POLL_S):
            await self._hold_more(events)
            for event in events:
                yield event
            now = time.monotonic()
            if events:
                spoke = now
            elif now - spoke >= keep_alive_s:
                spoke = now
                yield None

    async def _news(self, poll_s: float) -> AsyncIterator[list[SentEvent]]:
        """Give batches of events, empty ones at intervals; end once the request is closed.

        The wake-up of a request that another process settled may be lost, so SQL is asked now and
        then; a replayed order is asked for at once, since it may have been closed long ago.
        """
        if self.replayed:
            await self._look()
        while self._closed is None:
            events = await self._waiter.next(poll_s)
            if self._gone is not None and self._gone.done() and self._waiter.closed is None:
                raise RequestFailed(
                    "client_closed_request",
                    "The client went away before the answer.",
                    request_id=self.request_id,
                )
            if self._waiter.closed is not None:
                self._closed = self._waiter.closed
            elif self._waiter.settled or not events:
                await self._look()
            yield events

    async def _hold_more(self, events: Sequence[SentEvent]) -> None:
        """Keep what is held ahead of what is produced. Should that fail for now, the stream goes
        on: it can be charged no more than was held."""
        slices = self._slices
        if slices is None:
            return
        for event in events:
            slices.count(event)
        extension = slices.next(self.request_id)
        try:
            if extension is not None:
                await self._requests.hold_more(slices, extension)
            if slices.used_up:
                self._slices = None
                await self._requests.cut(self.model, self.request_id, slices.shortage or "")
        except (DBAPIError, RedisError, OSError) as error:
            log.warning("%s was not held for further: %s", self.request_id, type(error).__name__)

    async def _look(self) -> None:
        found = await self._requests.find(self.account_id, self.request_id)
        if isinstance(found, Closed):
            self._closed = found

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


def raise_unless_succeeded(closed: Closed) -> None:
    """Turn an unsuccessful end into the error that the client sees."""
    if closed.status == "succeeded":
        return
    raise RequestFailed(
        closed.error.code if closed.error else closed.status,
        closed.error.message
        if closed.error
        else f"The request ended as {closed.status} ({closed.reason}).",
        param=closed.error.param if closed.error else None,
        request_id=closed.request_id,
    )
