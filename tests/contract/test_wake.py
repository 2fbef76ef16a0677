"""The wake marker: no worker sleeps while there is work to lease."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from tests.contract.making import entry, fill, finished, ids
from workers.contract.queue import Queue, wait_for_work


async def woken(client: Redis, queue: Queue, namespace: str) -> bool:
    return await wait_for_work(client, [queue.model], 0.02, namespace=namespace) == queue.model


async def test_a_waiting_worker_is_woken_by_a_job(
    client: Redis, queue: Queue, namespace: str
) -> None:
    waiting = asyncio.create_task(
        wait_for_work(client, ["other", queue.model], 2.0, namespace=namespace)
    )
    await asyncio.sleep(0.02)

    await fill(queue, entry("j1"))

    assert await waiting == queue.model


async def test_marker_wakes_one_worker_after_another(
    client: Redis, queue: Queue, namespace: str
) -> None:
    await fill(queue, *(entry(f"j{n}") for n in range(3)))

    chain = []
    for worker in ("w1", "w2", "w3"):
        chain.append(await woken(client, queue, namespace))
        assert not await woken(client, queue, namespace)
        await queue.lease(worker, 1)

    assert chain == [True, True, True]
    assert not await woken(client, queue, namespace)


async def test_marker_taken_by_a_dead_worker_is_restored(
    client: Redis, queue: Queue, namespace: str
) -> None:
    await fill(queue, entry("j1"))
    assert await woken(client, queue, namespace)

    await queue.reclaim()

    assert await woken(client, queue, namespace)


async def test_workers_are_woken_by_requeued_jobs(
    client: Redis, queue: Queue, namespace: str
) -> None:
    await fill(queue, entry("j1"))
    await queue.lease("w1", 1)
    await woken(client, queue, namespace)

    await queue.release_worker("w1", crashed=True)

    assert await woken(client, queue, namespace)


async def test_a_busy_model_does_not_hide_the_others(client: Redis, namespace: str) -> None:
    queues = {name: Queue(client, name, namespace=namespace) for name in ("busy", "calm")}
    seen = set()

    for n in range(40):
        for name, queue in queues.items():
            await fill(queue, entry(f"{name}{n}"))
        seen.add(await wait_for_work(client, list(queues), 0.5, namespace=namespace))

    assert seen == {"busy", "calm"}


async def test_many_workers_lease_every_job_exactly_once(
    client: Redis, queue: Queue, namespace: str
) -> None:
    taken: list[str] = []

    async def work(name: str) -> None:
        while len(taken) < 200:
            await wait_for_work(client, [queue.model], 0.5, namespace=namespace)
            leases = await queue.lease(name, 3)
            taken.extend(ids(leases))
            await queue.complete(finished(leases))

    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(work(f"w{n}"))
        for start in range(0, 200, 20):
            await fill(queue, *(entry(f"j{n}", f"a{n % 3}") for n in range(start, start + 20)))

    assert len(taken) == 200
    assert len(set(taken)) == 200
