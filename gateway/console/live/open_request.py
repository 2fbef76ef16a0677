"""The topic of an open request: its place in the queue, its progress, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from gateway.api.http.request import Services
from gateway.console.live.topics import Latest, LiveSubject, Message, Topic
from gateway.console.views.open_requests import open_texts
from gateway.console.visitors import Visitor
from gateway.ledger.closed import ClosedRequest
from gateway.tasks.submission import OpenRequest

CLOSED: Final = "closed"
OPEN: Final = "open"


async def texts_of(services: Services, found: OpenRequest, *, sees_worker: bool) -> dict[str, str]:
    """Return what is known of an open request."""
    lookup = services.requests.lookup
    state = await lookup.state(found)
    progress = await lookup.progress(found.request_id) if found.status == "running" else None
    return open_texts(found, state, progress, datetime.now(UTC), sees_worker=sees_worker)


async def _find(services: Services, visitor: Visitor, rest: str) -> LiveSubject:
    found = await services.requests.lookup.find(None, rest, whole=False)
    sees_worker = visitor.role is not None

    async def read() -> Message:
        now = await services.requests.lookup.find(None, rest, whole=False)
        if isinstance(now, ClosedRequest):
            return {"version": CLOSED}
        return {
            "version": OPEN,
            "texts": await texts_of(services, now, sees_worker=sees_worker),
        }

    return LiveSubject(
        ("request", rest, sees_worker), "requests.read", found.account_id, lambda: Latest(read)
    )


TOPICS: Final[Sequence[Topic]] = (Topic("request", _find),)
