"""A worker process that the tests kill. Arguments: server, namespace, name.

It acts like an agent (wait, lease, renew, reclaim, complete), but sleeps instead of working.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from workers.contract.queue import Completion, Lease, Queue, wait_for_work
from workers.contract.redis import connect

MODEL = "m"
LEASE_MS = 600


async def main(url: str, namespace: str, name: str) -> None:
    client = connect(url)
    queue = Queue(client, MODEL, namespace=namespace)
    leased: dict[str, str] = {}

    async def run(lease: Lease) -> None:
        leased[lease.id] = lease.token
        await asyncio.sleep(random.uniform(0.005, 0.04))
        await queue.complete([Completion(lease.id, lease.token, "ok", name.encode())])
        leased.pop(lease.id, None)

    async def take() -> None:
        await wait_for_work(client, [MODEL], 0.2, namespace=namespace)
        await asyncio.gather(*map(run, await queue.lease(name, 4, lease_ms=LEASE_MS)))

    async def keep() -> None:
        await queue.heartbeat(list(leased.items()), lease_ms=LEASE_MS)
        await queue.reclaim()
        await asyncio.sleep(LEASE_MS / 3000)

    async def for_ever(step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
            except (RedisError, OSError):
                await asyncio.sleep(0.05)

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(for_ever(take), for_ever(keep))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
