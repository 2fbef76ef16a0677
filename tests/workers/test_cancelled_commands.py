"""A task that sends commands to the queue server ends when it is cancelled."""

from __future__ import annotations

import asyncio

from workers.contract.redis import connect


async def test_a_task_that_is_cancelled_between_commands_ends(redis_url: str) -> None:
    client = connect(redis_url)

    async def write_for_ever() -> None:
        while True:
            await client.set("t:cancelled", b"again")

    await client.ping()
    ended = []
    for steps in range(40):  # of the event loop; one of them hits the race
        task = asyncio.create_task(write_for_ever())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.5)
        ended.append(bool(done))
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
    await client.aclose()

    assert all(ended)
