"""Topics about the installation: its workers and its queue.

Both send a version that changes with what their pages show. A page then reads its parts again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.api.http.request import Services
from gateway.console.live.topics import Message, Topic, installation_topic

INTERVAL_S: Final = 2.0


async def read_workers(services: Services) -> Message:
    health = services.requests.health
    return {"version": version_of([health.healthy, list(health.announcements)])}


async def read_queue(services: Services) -> Message:
    health = services.requests.health
    loads = [(model, load.depth, load.running) for model, load in sorted(health.loads.items())]
    return {"version": version_of([health.healthy, loads])}


def version_of(state: Any) -> str:
    """Return a short text that changes with a state that msgspec can encode."""
    return hashlib.sha256(msgspec.json.encode(state)).hexdigest()[:12]


TOPICS: Final[Sequence[Topic]] = (
    installation_topic("workers", read_workers, interval_s=INTERVAL_S),
    installation_topic("queue", read_queue, interval_s=INTERVAL_S),
)
