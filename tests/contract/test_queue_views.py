"""What operators see of a queue."""

from __future__ import annotations

from redis.asyncio import Redis

from tests.contract.making import entry, fill
from workers.contract.queue import Completion, Queue
from workers.contract.queue_views import leases_of, queue_views


async def test_jobs_are_listed_in_the_order_in_which_they_are_leased(
    client: Redis, queue: Queue, namespace: str
) -> None:
    for number in range(4):
        await fill(queue, entry(f"a{number}", account="a", cost=2.0))
    await fill(queue, *(entry(f"b{number}", account="b", cost=1.0) for number in range(4)))
    await fill(queue, entry("c0", account="c", cost=1.0, weight=2.0, deadline_ms=2**45))

    view = (await queue_views(client, [queue.model, "empty"], namespace=namespace))[queue.model]
    leased = [(await queue.lease("w", 1))[0].id for _ in range(9)]

    assert [job.id for job in view.jobs] == leased
    assert {each.account: (each.queued, each.cost, each.running) for each in view.accounts} == {
        "a": (4, 8.0, 0), "b": (4, 4.0, 0), "c": (1, 1.0, 0),
    }  # fmt: skip
    (bounded,) = [job for job in view.jobs if job.id == "c0"]
    assert (bounded.deadline_ms, bounded.attempt) == (2**45, 0)
    assert bounded.enqueued_ms > 0


async def test_running_and_delayed_jobs_are_listed_with_their_workers(
    client: Redis, queue: Queue, namespace: str
) -> None:
    await fill(queue, entry("j1"), entry("j2"), entry("j3"))
    first, second = await queue.lease("w1", 2)
    await queue.lease("w2", 1)
    await queue.complete([Completion(first.id, first.token, "retry", retry_ms=60_000)])
    await queue.cancel(second.id, "operator")

    view = (await queue_views(client, [queue.model], namespace=namespace))[queue.model]
    own = await leases_of(client, "w1", [queue.model, "empty"], namespace=namespace)

    assert {(each.id, each.worker) for each in view.leases} == {("j2", "w1"), ("j3", "w2")}
    assert all(0 < each.left_ms <= 15_000 for each in view.leases)
    assert [each.id for each in view.delayed] == ["j1"]
    assert 0 < view.delayed[0].left_ms <= 60_000
    assert [(each.id, each.cancel, each.attempt) for each in own[queue.model]] == [
        ("j2", "operator", 1)
    ]
    assert own["empty"] == []
    assert [(each.running, each.queued) for each in view.accounts] == [(2, 0)]


async def test_views_are_bounded(client: Redis, queue: Queue, namespace: str) -> None:
    await fill(queue, *(entry(f"j{number}", account=f"a{number}") for number in range(20)))
    await queue.lease("w", 8)

    view = (await queue_views(client, [queue.model], limit=5, namespace=namespace))[queue.model]

    assert [len(part) for part in (view.accounts, view.jobs, view.leases)] == [10, 5, 5]
