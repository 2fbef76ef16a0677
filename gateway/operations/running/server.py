"""The queue server, as operations reach it."""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from gateway.checks.moments import moment_of, timestamp
from workers.contract.announcements import Workers


@dataclass(frozen=True, slots=True)
class QueueServer:
    redis: Redis
    namespace: str

    @property
    def workers(self) -> Workers:
        return Workers(self.redis, namespace=self.namespace)


def moment(unix_ms: int) -> str | None:
    """Return a moment as the API writes it; None for 0, which means that there is none."""
    return timestamp(moment_of(unix_ms * 1000)) if unix_ms else None
