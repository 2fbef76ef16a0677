"""The clients that wait for requests in this process, and the events received for them.

Events arrive in the mailbox of the process. The end of a request is announced by the settler, after
the charge was committed. A waiter registers before its request is queued, so that it misses
nothing. Knows neither HTTP nor money.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from redis.asyncio import Redis

from gateway.ledger.closed import ClosedRequest
from gateway.sql.outages import QUEUE_OUTAGE
from gateway.supervision import Beat, no_beat
from gateway.time_limit import TimeLimit
from workers.contract.jobs import RequestId, SentEvent, Settled, decode_frame
from workers.contract.streams import Mailbox

log = logging.getLogger(__name__)

BUFFER_MAX: Final = 4096
"""Maximum number of events buffered for a slow reader. Beyond it the buffer is cleared, and the
reader gets the rest from the final output."""


class Waiter:
    """One reader of one request. ``next`` returns events until the request is settled."""

    def __init__(self) -> None:
        self.events: list[SentEvent] = []
        """Events that ``next`` returns. While there are any, later ones are not taken."""
        self._woken = False
        self._waiting: asyncio.Future[None] | None = None
        self.take: Callable[[SentEvent], bool] | None = None
        """Takes an event as soon as it arrives, or declines it, so that ``next`` returns it."""
        self.took = False
        """Whether any event was taken; reset by the reader."""
        self.settled = False
        self.closed: ClosedRequest | None = None
        """The closed request, if it was settled in this process."""

    def push(self, event: SentEvent) -> None:
        """Let ``next`` return an event that was not taken."""
        if len(self.events) >= BUFFER_MAX:
            self.events.clear()
        self.events.append(event)
        self.wake()

    def settle(self, closed: ClosedRequest | None) -> None:
        self.settled = True
        self.closed = closed
        self.take = None
        self.wake()

    def wake(self) -> None:
        """Make ``next`` return without an event."""
        self._woken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self, limit: TimeLimit) -> list[SentEvent]:
        """Wait for events; return an empty list if the request is settled or the time is up."""
        if not self._woken and not self.settled:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await limit.apply(self._waiting)
            except TimeoutError:
                return []
        self._woken = False
        events, self.events = self.events, []
        return events


class Waiters:
    """The waiters of this process, which receive events from its mailbox and its settler."""

    def __init__(self) -> None:
        self._waiters: defaultdict[RequestId, list[Waiter]] = defaultdict(list)
        self.on_step_event: Callable[[SentEvent], None] | None = None
        """Called with the events of workflow steps."""

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiters

    @contextlib.contextmanager
    def watch(self, request_id: RequestId) -> Iterator[Waiter]:
        waiter = self.add(request_id)
        try:
            yield waiter
        finally:
            self.remove(request_id, waiter)

    def add(self, request_id: RequestId) -> Waiter:
        """Let a new waiter receive the events of a request, until it is removed."""
        waiter = Waiter()
        self._waiters[request_id].append(waiter)
        return waiter

    def remove(self, request_id: RequestId, waiter: Waiter) -> None:
        """Remove a waiter, if it was not removed before."""
        others = self._waiters.get(request_id, [])
        if waiter in others:
            others.remove(waiter)
            if not others:
                del self._waiters[request_id]

    def deliver(self, events: tuple[SentEvent, ...]) -> None:
        for event in events:
            if isinstance(event.event, Settled):
                self.settle(event.request_id)
                continue
            if "." in event.request_id and self.on_step_event is not None:
                self.on_step_event(event)
            for waiter in self._waiters.get(event.request_id, ()):
                take = waiter.take
                if take is not None and not waiter.events and take(event):
                    waiter.took = True
                else:
                    waiter.push(event)

    def settle(self, request_id: RequestId, closed: ClosedRequest | None = None) -> bool:
        """Wake the waiters of a settled request; return whether there were any."""
        waiters = self._waiters.get(request_id, ())
        for waiter in waiters:
            waiter.settle(closed)
        return bool(waiters)


async def read_mailbox(
    redis: Redis, mailbox: Mailbox, waiters: Waiters, beat: Beat = no_beat
) -> None:
    """Deliver the events in this process's mailbox, until cancelled."""
    while True:
        try:
            for frame in filter(None, await mailbox.read(block_ms=1000)):
                try:
                    waiters.deliver(decode_frame(frame))
                except msgspec.DecodeError:
                    log.warning("dropped a mailbox frame that could not be decoded")
        except QUEUE_OUTAGE as error:
            log.warning("could not read the mailbox, retrying: %s", type(error).__name__)
            await asyncio.sleep(0.5)
        beat()
