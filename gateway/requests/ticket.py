"""A client's interest in one request: waits for it, streams it, and detects a disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Protocol, Self

from litestar import Request

from gateway.dispatch.waiters import Waiters
from gateway.errors import NotFound, RequestFailed, TooManyRequests, Unavailable
from gateway.ledger.closed import ClosedRequest
from gateway.pricing import format_usd
from gateway.requests.admit import Admitted
from gateway.requests.cancellation import Cancellation
from gateway.requests.incremental_holds import CostSoFar, HoldExtender
from gateway.requests.lookup import Lookup
from gateway.requests.reconnect import Reconnects
from gateway.sql.outages import OUTAGE, SQL_OUTAGE, outage_name
from gateway.tasks.submission import OpenRequest, Submission
from gateway.time_limit import TimeLimit
from workers.contract.jobs import RequestId, SentEvent

log = logging.getLogger(__name__)

TICK_S = 2.0
"""Interval at which a waiting client is sent a keep-alive or found to have disconnected."""
CONNECTION: Final = "connection"
"""Key of a scope for its ``ClientConnection``."""
POLL_S = 10.0
"""Time without events after which a request is looked up, because its wake-up can be lost."""
POLL_REPLAYED_S = 2.0
"""The same for a replayed request, whose wake-up may go to another gateway."""
LOOK_AGAIN_S = 0.5
"""Pause after a lookup that failed."""
EXTEND_S = 2.0
"""Maximum time for which a stream waits while its hold is extended."""
EXTEND_AGAIN_S = 5.0
"""Pause after a database outage, during which the stream continues."""


class ClientConnection(Protocol):
    """The client's connection, as the server knows it."""

    gone: asyncio.Future[None]
    """Done once the client has disconnected."""

    @property
    def takes_chunks(self) -> bool:
        """Whether a part of a streamed response can be written now."""

    def write_chunk(self, data: bytes) -> None:
        """Write a part of a streamed response without waiting."""


def connection_of(request: Request[Any, Any, Any]) -> ClientConnection:
    found: ClientConnection = request.scope[CONNECTION]  # type: ignore[typeddict-item]
    return found


@dataclass(frozen=True, slots=True)
class TicketServices:
    waiters: Waiters
    reconnects: Reconnects
    lookup: Lookup
    extender: HoldExtender
    cancellation: Cancellation
    tick: TimeLimit = field(default_factory=lambda: TimeLimit(TICK_S))


class Ticket:
    """A client's interest in one request, from its acceptance until it is closed.

    If the context is left while the request is still open, its client has disconnected.
    """

    def __init__(
        self,
        services: TicketServices,
        account_id: int,
        submission: Submission,
        request_id: RequestId,
        accepted_at: datetime,
        admitted: Admitted | None = None,
        *,
        queue: str | None = None,
    ) -> None:
        """``admitted`` is None for a request that was accepted earlier, and is in ``queue``."""
        self._services = services
        self.account_id = account_id
        self._submission = submission
        self.request_id = request_id
        self.model = submission.model
        self.accepted_at = accepted_at
        self._admitted = None if admitted is None or admitted.replayed else admitted
        self.replayed = self._admitted is None
        self._queue = self._admitted.job.model if self._admitted else queue or submission.model
        self._incremental = self._admitted.incremental if self._admitted else None
        self._extend_at = 0.0
        self._look_first = self.replayed
        self._closed: ClosedRequest | None = None
        self._gone: asyncio.Future[None] | None = None
        self._waiter = services.waiters.add(request_id)
        if submission.fingerprint is not None:
            # A retry finds the request for as long as this client waits.
            services.reconnects.begin(submission.fingerprint, request_id)

    async def placed(self) -> OpenRequest | ClosedRequest:
        """Return the request as it is now. During an outage of the database return it as it was
        accepted, because its client must learn the id of what runs and is charged."""
        try:
            return await self._services.lookup.find(self.account_id, self.request_id)
        except OUTAGE:
            if self._admitted is None:
                raise
            job, model = self._admitted.job, self._admitted.quoted.entry.name
            return OpenRequest(
                self.request_id,
                self.account_id,
                model,
                job.task,
                "queued",
                self._admitted.hold_nanos,
                self._admitted.accepted_at,
                self._admitted.deadline_at,
                metadata=self._submission.metadata or {},
                served_by=job.model if job.model != model else None,
                warnings=job.warnings,
            )

    @property
    def result(self) -> ClosedRequest:
        """The closed request, once ``closed`` or ``events`` has ended."""
        assert self._closed is not None
        return self._closed

    @property
    def hold_nanos(self) -> int | None:
        """The hold of a request that this ticket had accepted."""
        return self._admitted.hold_nanos if self._admitted else None

    @property
    def cost_nanos(self) -> int | None:
        """The charge if the request succeeds, or None if it is not known yet."""
        if self._closed is not None:
            return self._closed.cost_nanos
        return self._admitted.quoted.cost_nanos if self._admitted else None

    def cost_so_far(self) -> CostSoFar | None:
        """Return a counter of what the stream costs; None for a request accepted earlier."""
        if self._admitted is None:
            return None
        quoted = self._admitted.quoted
        return CostSoFar(quoted.price, quoted.prepared.limits)

    @contextlib.contextmanager
    def attended(self, request: Request[Any, Any, Any]) -> Iterator[None]:
        """Make waiting raise ``RequestFailed`` once the client has disconnected."""
        connection: ClientConnection = request.scope[CONNECTION]  # type: ignore[typeddict-item]
        gone = self._gone = connection.gone
        gone.add_done_callback(self._wake)
        try:
            yield
        finally:
            gone.remove_done_callback(self._wake)
            self._gone = None

    async def closed(self, request: Request[Any, Any, Any]) -> ClosedRequest:
        """Wait for the end. Raise ``RequestFailed`` if the client disconnects first."""
        with self.attended(request):
            return await self.ended()

    def _wake(self, _: asyncio.Future[None]) -> None:
        self._waiter.wake()

    def forward(self, take: Callable[[SentEvent], bool]) -> None:
        """Pass events to ``take`` as soon as they arrive, until the end of the request.

        ``next_events`` returns those that it declines. It sees none while a hold must be extended.
        """

        def take_within_hold(sent: SentEvent) -> bool:
            hold = self._incremental
            if hold is None:  # used up
                return take(sent)
            if hold.is_due or not take(sent):
                return False
            hold.count(sent)
            return True

        self._waiter.take = take if self._incremental is None else take_within_hold

    async def logged(self, after: tuple[int, int] | None) -> Sequence[SentEvent]:
        """Return the logged events after an attempt and number."""
        return await self._services.lookup.logged(self.request_id, after)

    async def ended(self) -> ClosedRequest:
        """Wait for the end, without a timeout."""
        while await self.next_events() is not None:
            pass
        assert self._closed is not None
        return self._closed

    async def next_events(self, keep_alive_s: float = math.inf) -> list[SentEvent] | None:
        """Wait for events. Return none at all if a keep-alive is due first, and None after the end.

        The wake-up of a request that another process settled can be lost, so the request is looked
        up after a while without events. A replayed request is looked up first: it may have been
        closed long ago.
        """
        if self._look_first:
            self._look_first = False
            await self._look()
        poll_s = POLL_REPLAYED_S if self.replayed else POLL_S
        since = looked_at = time.monotonic()
        while self._closed is None:
            events = await self._waiter.next(self._services.tick)
            if self._waiter.took:
                self._waiter.took = False
                since = looked_at = time.monotonic()
            if self._gone is not None and self._gone.done() and self._waiter.closed is None:
                raise RequestFailed(
                    "client_closed_request",
                    "The client went away before the answer.",
                    request_id=self.request_id,
                )
            if (closed := self._waiter.closed) is not None:
                # Nearly all outputs are small and came with the outcome.
                is_stored = closed.output is not None and closed.output.stored is not None
                lookup = self._services.lookup
                self._closed = await lookup.with_output(closed) if is_stored else closed
            elif self._waiter.settled or time.monotonic() - looked_at >= poll_s:
                await self._look()
                looked_at = time.monotonic()
            if self._incremental is not None:
                await self._extend(events)
            if events:
                return events
            if time.monotonic() - since >= keep_alive_s:
                return []
        return None

    async def _extend(self, events: Sequence[SentEvent]) -> None:
        """Keep the hold ahead of what is produced. The stream continues if that fails for now: it
        cannot be charged more than its hold."""
        hold, services = self._incremental, self._services
        assert hold is not None
        for event in events:
            hold.count(event)
        if time.monotonic() < self._extend_at:
            return
        extension = hold.next(self.request_id)
        try:
            if extension is not None:
                async with asyncio.timeout(EXTEND_S):
                    await services.extender.extend(hold, extension)
            if hold.used_up:
                self._incremental = None
                await services.extender.cut(self._queue, self.request_id, hold.shortage or "")
        except OUTAGE as error:
            self._extend_at = time.monotonic() + EXTEND_AGAIN_S
            log.warning("could not extend the hold of %s: %s", self.request_id, outage_name(error))

    async def _look(self) -> None:
        """Look the request up. Raise ``Unavailable`` if a crash of the database lost its hold."""
        try:
            self._closed = await self._services.lookup.closed(self.account_id, self.request_id)
        except NotFound as error:
            raise Unavailable(
                "database_unavailable",
                "The database failed and lost this request. Nothing was charged; send it again.",
                retry_after_s=1,
                request_id=self.request_id,
            ) from error
        except SQL_OUTAGE as error:
            # The request still runs, and its end is found when the database is back.
            log.debug("could not look up %s: %s", self.request_id, outage_name(error))
            await asyncio.sleep(LOOK_AGAIN_S)

    def close(self) -> None:
        """Stop waiting."""
        self._services.waiters.remove(self.request_id, self._waiter)
        if self._submission.fingerprint is not None:
            self._services.reconnects.end(self._submission.fingerprint, self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        submission = self._submission
        # With an idempotency key the request goes on, because its client will ask for it again.
        if self._closed is None and submission.waits and submission.idempotency is None:
            self._services.cancellation.leave(
                self.account_id, self.request_id, self._queue, submission.fingerprint
            )


def not_entered(reason: str) -> TooManyRequests:
    """Return the error of a request whose queue was full. Sent again, it is a new attempt."""
    whose = " by this account" if reason == "account_full" else ""
    return TooManyRequests(
        reason, f"Too many requests are queued for this model{whose}.", retry_after_s=5
    )


def raise_unless_succeeded(closed: ClosedRequest) -> None:
    """Raise the error that a client receives for a request that did not succeed."""
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
