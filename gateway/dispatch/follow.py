"""Follows a request from any point: logged events, then live events, then its end.

Every event carries ``<attempt>-<seq>``. A follower that reconnects with the last one it received
continues after it, on any gateway. An event of a newer attempt invalidates those of older attempts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from gateway.dispatch.waiters import Waiter
from gateway.ledger.closed import ClosedRequest
from gateway.sql.outages import QUEUE_OUTAGE
from gateway.time_limit import TimeLimit
from workers.contract.jobs import Progress, SentEvent, Settled, decode_frame
from workers.contract.streams import EventLog

POLL_S: Final = 10.0
"""Time without events after which SQL is checked, because the wake-up can be lost."""
TICK_S: Final = 1.0
TICK_QUIET_S: Final = 4.0
"""Intervals at which the log is read if no live event arrives: normally, and after ``POLL_S``
without any event."""
PROGRESS_ENTRIES: Final = 4
"""Number of the newest log entries that are searched for progress."""
PROGRESS_PATIENCE_S: Final = 1.0
LOG_LAG_S: Final = 0.5
"""Delay between an event and its entry in the log."""

FollowedEvent: TypeAlias = tuple[str | None, str, Mapping[str, Any] | ClosedRequest]
"""Cursor, name and data of an event, or the closed request; an empty name is a keep-alive."""


async def follow(
    waiter: Waiter,
    log: EventLog,
    *,
    request_id: str,
    after: str | None,
    look: Callable[[], Awaitable[ClosedRequest | None]],
    keep_alive_s: float,
) -> AsyncIterator[FollowedEvent]:
    """Yield the events of a request after a cursor, and finally the closed request.

    Live events come from the waiter. The log fills gaps between them, and is the only source if
    another process receives the events.
    """
    seen = _parse_cursor(after)
    emitted = received = looked = time.monotonic()
    live: list[SentEvent] = []
    tick, tick_quiet = TimeLimit(TICK_S), TimeLimit(TICK_QUIET_S)
    while True:
        if not live or _gap(seen, live[0]):
            missed = await logged(log, request_id, seen)
            if live and not missed:
                # Recent events may not be in the log yet.
                await asyncio.sleep(LOG_LAG_S)
                missed = await logged(log, request_id, seen)
            live = missed or live
        for event in live:
            if (event.attempt, event.seq) > seen and not isinstance(event.event, Settled):
                seen = (event.attempt, event.seq)
                emitted = received = time.monotonic()
                yield f"{event.attempt}-{event.seq}", *_named(event)
        if waiter.settled:
            found = waiter.closed or await look()
            if found is not None and found.output and not found.output.is_loaded:
                found = await look()
            if found is not None:
                for event in await logged(log, request_id, seen):
                    if (event.attempt, event.seq) > seen:
                        seen = (event.attempt, event.seq)
                        yield f"{event.attempt}-{event.seq}", *_named(event)
                yield None, found.status, found
                return
        quiet = time.monotonic() - received >= POLL_S
        live = await waiter.next(tick_quiet if quiet else tick)
        if not live and not waiter.settled and time.monotonic() - max(received, looked) >= POLL_S:
            looked = time.monotonic()
            ended = await look()
            if ended is not None:
                waiter.settle(ended)
        if not live and time.monotonic() - emitted >= keep_alive_s:
            emitted = time.monotonic()
            yield None, "", {}


def _parse_cursor(cursor: str | None) -> tuple[int, int]:
    if not cursor:
        return (0, 0)
    attempt, _, seq = cursor.partition("-")
    return (int(attempt), int(seq))


def _gap(seen: tuple[int, int], event: SentEvent) -> bool:
    """Whether events may be missing between the last one seen and this one."""
    attempt, seq = seen
    return (event.attempt, event.seq) > (attempt, seq + 1) and event.seq != 1


async def logged(log: EventLog, request_id: str, seen: tuple[int, int]) -> list[SentEvent]:
    """Return a job's logged events after ``(attempt, seq)``, as far as the log still has them."""
    after = f"{seen[0]}-{seen[1]}" if seen != (0, 0) else None
    events: list[SentEvent] = []
    for entry in await log.replay(request_id, after=after):
        events.extend(decode_frame(entry.data))
    return [event for event in events if (event.attempt, event.seq) > seen]


def _named(event: SentEvent) -> tuple[str, Mapping[str, Any]]:
    data = msgspec.to_builtins(event.event)
    name = data.pop("type")
    return name, {"attempt": event.attempt, **data}


async def logged_soon(log: EventLog, request_id: str, seen: tuple[int, int]) -> Sequence[SentEvent]:
    """Return ``logged``, or nothing if the queue server does not respond in time."""
    try:
        async with asyncio.timeout(PROGRESS_PATIENCE_S):
            return await logged(log, request_id, seen)
    except QUEUE_OUTAGE:
        return ()


async def latest_progress(log: EventLog, request_id: str) -> Progress | None:
    """Return the newest progress of a job; None if there is none, or if the queue server does not
    respond in time."""
    try:
        async with asyncio.timeout(PROGRESS_PATIENCE_S):
            entries = await log.latest(request_id, count=PROGRESS_ENTRIES)
    except QUEUE_OUTAGE:
        return None
    for entry in entries:
        for sent in reversed(decode_frame(entry.data)):
            if isinstance(sent.event, Progress):
                return sent.event
    return None
