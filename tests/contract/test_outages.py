"""Lost answers, lost scripts, workers under ``kill -9``, and a wiped Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from tests.contract.doomed_worker import MODEL
from tests.contract.making import entry, fill, finished, ids, settle_all
from tests.contract.proxy import lossy_proxy
from tests.servers import queue_server
from workers.contract.queue import Completion, Queue
from workers.contract.redis import connect
from workers.contract.streams import Outcomes

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
"""Timeout of a test that waits for something that must happen."""


async def test_every_operation_can_be_repeated_after_its_answer_was_lost(
    server_url: str, client: Redis, namespace: str
) -> None:
    async with lossy_proxy(server_url) as (proxy, url):
        remote = connect(url)
        queue = Queue(remote, "m", namespace=namespace)
        await queue.load()

        proxy.lose = 1
        with pytest.raises(ConnectionError):
            await fill(queue, entry("j1"))
        assert [answer.status for answer in await fill(queue, entry("j1"))] == ["duplicate"]

        proxy.lose = 1
        with pytest.raises(ConnectionError):
            await queue.lease("w", 1, nonce="n")
        leases = await queue.lease("w", 1, nonce="n")
        assert ids(leases) == ["j1"]

        proxy.lose = 1
        with pytest.raises(ConnectionError):
            await queue.complete(finished(leases))
        assert await queue.complete(finished(leases)) == ["already"]
        await remote.aclose()

    outcomes = Outcomes(client, ["m"], namespace=namespace)
    assert [d.request_id for d in await settle_all(outcomes)] == ["j1"]


async def test_script_is_loaded_again_after_the_server_forgot_it(
    client: Redis, queue: Queue
) -> None:
    await client.script_flush()
    await fill(queue, entry("j0"))

    await client.script_flush()
    answers = await fill(queue, *(entry(f"j{n}") for n in range(200)))

    assert [answer.status for answer in answers] == ["duplicate", *["ok"] * 199]


async def test_finished_work_is_saved_once_after_the_queue_was_wiped(
    client: Redis, queue: Queue, namespace: str
) -> None:
    names = ("done", "stopped", "failed")
    await fill(queue, *(entry(name) for name in names))
    leases = {lease.id: lease.token for lease in await queue.lease("w", 3)}
    await client.delete(*await client.keys(f"{namespace}:*"))

    beat = await queue.heartbeat(list(leases.items()))
    ends = [
        Completion("done", leases["done"], "ok", b"result"),
        Completion("stopped", leases["stopped"], "cancelled", b"partly"),
        Completion("failed", leases["failed"], "failed", b"sorry"),
    ]
    results = await queue.complete(ends)
    again = await queue.complete(ends)
    refilled = await fill(queue, *(entry(name) for name in names))

    assert beat.lost == ()  # the worker may have to finish them
    assert results == ["unknown"] * 3
    assert again == ["already", "already", "unknown"]
    assert [answer.status for answer in refilled] == ["duplicate", "duplicate", "ok"]
    deliveries = await settle_all(Outcomes(client, [queue.model], namespace=namespace))
    assert [(d.request_id, d.status, d.outcome) for d in deliveries] == [
        ("done", "ok", b"result"),
        ("stopped", "cancelled", b"partly"),
    ]


async def test_refilled_queue_fences_earlier_leases(
    client: Redis, queue: Queue, namespace: str
) -> None:
    await fill(queue, entry("j1"))
    [before] = await queue.lease("w1", 1)
    await client.delete(*await client.keys(f"{namespace}:*"))
    await fill(queue, entry("j1"))
    [after] = await queue.lease("w2", 1)

    beat = await queue.heartbeat([("j1", before.token)])
    results = await queue.complete([*finished([before]), *finished([after])])

    assert before.attempt == after.attempt
    assert beat.lost == ("j1",)
    assert results == ["fenced", "done"]


# --- Kill tests -----------------------------------------------------------------------------------


class Doomed:
    """Worker processes; each is replaced when it is killed."""

    def __init__(self, url: str, namespace: str) -> None:
        self._arguments = (url, namespace)
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        name = f"worker-{secrets.token_hex(4)}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.contract.doomed_worker", *self._arguments, name),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        self._running[name] = process
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"

    async def kill(self) -> str:
        """Kill one with signal 9 and start another; return the killed one's name."""
        name = random.choice(list(self._running))
        await self._end(name)
        await self.start()
        return name

    async def end(self) -> None:
        for name in list(self._running):
            await self._end(name)

    async def _end(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        await process.communicate()


class Settling:
    """The gateway's part: knows the accepted jobs and refills the queue with them."""

    def __init__(self, client: Redis, queue: Queue, namespace: str) -> None:
        self.accepted: list[str] = []
        self.settled: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self._queue = queue
        self._outcomes = Outcomes(client, [queue.model], namespace=namespace)

    async def accept(self, count: int) -> None:
        for n in range(count):
            self.accepted.append(f"j{n}")
            await fill(self._queue, entry(f"j{n}", f"account{n % 5}", cost=0.02))
            if n % 10 == 0:
                await asyncio.sleep(0.05)

    async def sweep(self) -> None:
        open_ids = [id for id in self.accepted if not self.settled[id]]
        missing = await self._queue.missing(open_ids)
        await fill(self._queue, *(entry(id, cost=0.02) for id in missing))

    async def until_all_have_ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.settled) < len(self.accepted):
                for delivery in (deliveries := await self._outcomes.read("s", block_ms=200)):
                    self.settled[delivery.request_id] += 1
                    self.statuses[delivery.status] += 1
                await self._outcomes.acknowledge(deliveries)


@pytest.fixture(params=["valkey", "redis"])
def own_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server used by this test only, so that it can be wiped."""
    with queue_server(request.param) as url:
        yield url


@contextlib.asynccontextmanager
async def struggle(url: str) -> AsyncIterator[tuple[Redis, Queue, Settling, Doomed]]:
    client, namespace = connect(url), "kill"
    queue = Queue(client, MODEL, namespace=namespace)
    doomed = Doomed(url, namespace)
    try:
        await asyncio.gather(*(doomed.start() for _ in range(3)))
        yield client, queue, Settling(client, queue, namespace), doomed
    finally:
        await doomed.end()
        await client.aclose()


async def test_killed_workers_lose_no_job_and_none_ends_twice(own_url: str) -> None:
    async with struggle(own_url) as (client, queue, settling, doomed):
        accepting = asyncio.create_task(settling.accept(300))
        for kill in range(4):
            await asyncio.sleep(0.1)
            name = await doomed.kill()
            if kill % 2:  # otherwise the crash is not reported, and its leases expire
                await queue.release_worker(name, crashed=True)
        await accepting
        await settling.until_all_have_ended()

        assert settling.settled == Counter(settling.accepted)
        assert set(settling.statuses) <= {"ok", "dead"}
        load = await queue.load()
        assert (load.depth, load.cost, load.running, load.delayed, load.live) == (0, 0.0, 0, 0, 0)
        keys = cast(list[bytes], await client.keys("kill:*"))
        left = [key.decode().rpartition(":")[2] for key in keys]
        assert {"leases", "running", "accounts", "capped", "live"}.isdisjoint(left)


async def test_a_wiped_server_is_filled_again_and_every_job_ends(own_url: str) -> None:
    async with struggle(own_url) as (client, queue, settling, doomed):
        accepting = asyncio.create_task(settling.accept(300))
        for _ in range(2):
            await asyncio.sleep(0.3)
            await client.flushall()
            await doomed.kill()
            await settling.sweep()
        await accepting
        ending = asyncio.create_task(settling.until_all_have_ended())
        while not ending.done():
            await asyncio.sleep(0.2)
            await settling.sweep()
        await ending

        assert set(settling.settled) == set(settling.accepted)
        load = await queue.load()
        assert (load.depth, load.cost, load.running) == (0, 0.0, 0)
