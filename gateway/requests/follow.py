"""Follows a request from anywhere in its life: what was logged, then what happens, then the end.

Every event carries ``<attempt>-<seq>``; a follower that comes back with the last one it saw goes on
after it, on any gateway. An event of a newer attempt makes everything of the older ones void.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from gateway.ledger.closed import Closed
from gateway.requests.order import Open
from gateway.requests.wait import Waiter
from workers.contract.jobs import SentEvent, Settled, decode_frame
from workers.contract.streams import EventLog

POLL_S: Final = 1.0
LOG_LAG_S: Final = 0.5
"""Workers write what they say into the log a little later than they say it."""

Followed: TypeAlias = tuple[str | None, str, Mapping[str, Any] | Closed]
"""Cursor, name and data of one event, at last the closed request; no name is a sign of life."""


async def follow(
    waiter: Waiter,
    log: EventLog,
    *,
    request_id: str,
    after: str | None,
    look: Callable[[], Awaitable[Open | Closed]],
    keep_alive_s: float,
) -> AsyncIterator[Followed]:
    """Yield the events of a request after a cursor, and last the closed request itself.

    Live events come through the waiter; the log fills whatever gap it leaves, and is asked alone
    where another process receives them.
    """
    seen = _place(after)
    spoke = time.monotonic()
    live: list[SentEvent] = []
    while True:
        if not live or _gap(seen, live[0]):
            missed = await logged(log, request_id, seen)
            if live and not missed:
                # What was said a moment ago is still on its way to the log.
                await asyncio.sleep(LOG_LAG_S)
                missed = await logged(log, request_id, seen)
            live = missed or live
        for event in live:
            if (event.attempt, event.seq) > seen and not isinstance(event.event, Settled):
                seen = (event.attempt, event.seq)
                spoke = time.monotonic()
                yield f"{event.attempt}-{event.seq}", *_named(event)
        if waiter.settled:
            found = waiter.closed or await look()
            if isinstance(found, Closed):
                for event in await logged(log, request_id, seen):
                    if (event.attempt, event.seq) > seen:
                        seen = (event.attempt, event.seq)
                        yield f"{event.attempt}-{event.seq}", *_named(event)
                yield None, found.status, found
                return
        live = await waiter.next(POLL_S)
        if not live and not waiter.settled and isinstance(await look(), Closed):
            waiter.settle(None)
        if not live and time.monotonic() - spoke >= keep_alive_s:
            spoke = time.monotonic()
            yield None, "", {}


def _place(cursor: str | None) -> tuple[int, int]:
    if not cursor:
        return (0, 0)
    attempt, _, seq = cursor.partition("-")
    return (int(attempt), int(seq))


def _gap(seen: tuple[int, int], event: SentEvent) -> bool:
    """Whether events may be missing between what was seen and this one."""
    attempt, seq = seen
    return (event.attempt, event.seq) > (attempt, seq + 1) and event.seq != 1


async def logged(log: EventLog, request_id: str, seen: tuple[int, int]) -> list[SentEvent]:
    """What a job has said after an event, by attempt and number, as far as it is kept."""
    after = f"{seen[0]}-{seen[1]}" if seen != (0, 0) else None
    events: list[SentEvent] = []
    for entry in await log.replay(request_id, after=after):
        events.extend(decode_frame(entry.data))
    return [event for event in events if (event.attempt, event.seq) > seen]


def _named(event: SentEvent) -> tuple[str, Mapping[str, Any]]:
    data = msgspec.to_builtins(event.event)
    name = data.pop("type")
    return name, {"attempt": event.attempt, **data}
