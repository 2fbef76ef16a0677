"""``GET /console/live``: the stream of what a browser's pages follow, as server-sent events.

The session is checked when a stream begins and every few seconds after that. A stream does not
count as use of the session. It ends after ten minutes, and the browser opens the next one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeAlias

from litestar import get
from litestar.response import Stream

from gateway.api.http.answers import KEEP_ALIVE, KEEP_ALIVE_S, event_data, event_stream
from gateway.api.http.request import ApiRequest
from gateway.console.guards import current_visitors, needs, no_page
from gateway.console.live.registry import TOPICS
from gateway.console.live.together import Together
from gateway.console.live.topics import LiveSubject, find_subject
from gateway.console.live.updates import LiveUpdates
from gateway.console.visitors import CurrentVisitor, Visitor
from gateway.errors import InvalidRequest, NotFound, TollgateError
from gateway.sql.outages import SQL_OUTAGE

LENGTH_S: Final = 600.0
CHECK_S: Final = 4.0
"""Interval at which a stream's session is checked."""
TOGETHER_S: Final = 0.5
"""Time within which the checks of several streams become one."""
PACE_S: Final = 0.25
"""Minimum interval between two writes to a browser."""
SPREAD_S: Final = 0.2
"""Time over which the writes of one instant to all viewers are spread: the gateway passes them on
between the tokens of its streams."""
FOLLOWED_MAX: Final = 30
RETRY: Final = b"retry: 3000\n\n"

Subjects: TypeAlias = Mapping[str, LiveSubject]
Checks: TypeAlias = Together[ApiRequest, Visitor | None]


def session_checks() -> Checks:
    return Together(current_visitors, within_s=TOGETHER_S)


@get("/live", guards=[needs("own.write")], opt={"unattended": True})
async def live(request: ApiRequest, visitor: CurrentVisitor) -> Stream:
    names = list(dict.fromkeys(request.query_params.getall("topics", [])))
    if not 1 <= len(names) <= FOLLOWED_MAX:
        raise InvalidRequest(
            "invalid_value", f"Name 1 to {FOLLOWED_MAX} topics to follow.", param="topics"
        )
    subjects: dict[str, LiveSubject] = {}
    for name in names:
        try:
            subjects[name] = await find_subject(TOPICS, request.services, visitor, name)
        except NotFound:
            continue
    if not subjects:
        raise no_page()
    updates: LiveUpdates = request.app.state.live_updates
    updates.check_room()
    refused = [name for name in names if name not in subjects]
    return event_stream(
        _events(request, updates, subjects, refused), headers={"Cache-Control": "no-store"}
    )


async def _events(
    request: ApiRequest,
    updates: LiveUpdates,
    subjects: Subjects,
    refused: list[str],
) -> AsyncIterator[bytes]:
    """Yield the messages of a viewer until its stream ends."""
    viewer = updates.join(subjects)
    began = checked = written = time.monotonic()
    turn_s = random.uniform(0, SPREAD_S)
    check: asyncio.Task[bool] | None = None
    try:
        yield RETRY + event_data({"topics": list(subjects), "refused": refused}, name="begin")
        while not viewer.ended and (now := time.monotonic()) < began + LENGTH_S:
            # Beside the messages, because it waits for the checks of other streams.
            if check is None and now >= checked + CHECK_S:
                checks: Checks = request.app.state.session_checks
                check = asyncio.create_task(_may_go_on(checks, request, subjects))
                check.add_done_callback(lambda _: viewer.wake())
            elif check is not None and check.done():
                if not check.result():
                    yield event_data({}, name="end")
                    return
                checked, check = now, None
            if messages := viewer.take():
                yield b"".join(event_data({"topic": name, **body}) for name, body in messages)
                written = time.monotonic()
                await asyncio.sleep(PACE_S)
            elif now >= written + KEEP_ALIVE_S:
                yield KEEP_ALIVE
                written = now
            due = min(written + KEEP_ALIVE_S, began + LENGTH_S)
            if check is None:
                due = min(due, checked + CHECK_S)
            await viewer.wait(max(due - time.monotonic(), 0))
            await asyncio.sleep(turn_s)
    finally:
        if check is not None:
            check.cancel()
        updates.leave(viewer)


async def _may_go_on(checks: Checks, request: ApiRequest, subjects: Subjects) -> bool:
    """Whether the visitor still has a session, and may still see all that it follows."""
    try:
        visitor = await checks.ask(request)
    except (TollgateError, *SQL_OUTAGE):
        return True  # nothing new is shown until the database is back
    return visitor is not None and all(each.is_open_to(visitor) for each in subjects.values())


HANDLERS: Final[list[Any]] = [live]
