"""Helpers of the queue tests: create entries, read answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.contract.queue import Completion, Enqueued, Lease, Queue, QueueEntry
from workers.contract.streams import Delivery, Outcomes


def entry(id: str, account: str = "a", **rest: Any) -> QueueEntry:
    return QueueEntry(
        id=id, account=account, payload=b"payload of " + id.encode(), **{"cost": 1.0, **rest}
    )


async def fill(queue: Queue, *entries: QueueEntry) -> list[Enqueued]:
    return await queue.enqueue(entries, queue_max=100_000, account_max=100_000)


def ids(leases: Sequence[Lease]) -> list[str]:
    return [lease.id for lease in leases]


def finished(leases: Sequence[Lease]) -> list[Completion]:
    return [Completion(lease.id, lease.token, "ok", b"outcome") for lease in leases]


async def settle_all(outcomes: Outcomes) -> list[Delivery]:
    """Read and acknowledge all outcomes."""
    settled: list[Delivery] = []
    while deliveries := await outcomes.read("settler", block_ms=20):
        settled += deliveries
        await outcomes.acknowledge(deliveries)
    return settled
