"""The queue's moves one by one, on both servers."""

from __future__ import annotations

from typing import Any

from workers.contract.queue import Completion, Entry, Lease, Queue

BOUNDS = {"queue_max": 1000, "account_max": 1000}


def entry(id: str, account: str = "a", **rest: Any) -> Entry:
    return Entry(
        id=id, account=account, payload=b"payload of " + id.encode(), **{"cost": 1.0, **rest}
    )


def ids(leases: list[Lease]) -> list[str]:
    return [lease.id for lease in leases]


async def test_a_job_is_enqueued_leased_and_completed_once(queue: Queue) -> None:
    answers = await queue.enqueue([entry("j1", reply="box", cost=2.5)], **BOUNDS)
    [lease] = await queue.lease("w", 4)
    results = await queue.complete([Completion(lease.id, lease.token, "ok", b"outcome")])
    again = await queue.complete([Completion(lease.id, lease.token, "ok", b"outcome")])

    assert [(a.status, a.depth, a.cost) for a in answers] == [("ok", 1, 2.5)]
    assert (lease.id, lease.attempt, lease.account, lease.reply) == ("j1", 1, "a", "box")
    assert lease.payload == b"payload of j1"
    assert lease.queued_us > 0
    assert (results, again) == (["done"], ["already"])
    assert await queue.lease("w", 4) == []
    state = await queue.state("j1")
    assert state is not None
    assert state.state == "ok"
    load = await queue.load()
    assert (load.depth, load.cost, load.running, load.live) == (0, 0.0, 0, 0)
    assert load.pace > 0
