"""A worker whose queue server is unreachable, restarts or has lost its data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from redis.exceptions import RedisError

from tests.servers import binary
from tests.workers.conftest import listening
from tests.workers.running import PATIENCE_S, Gateway, echo
from workers.contract.jobs import Completed, Started, Tokens
from workers.contract.redis import connect


class Server:
    """A queue server that keeps its data after ``kill -9``, like that of ``tollgate up``."""

    def __init__(self, home: Path) -> None:
        self.socket = home / "s"
        self.url = f"unix://{self.socket}"
        self._command = (
            *(str(binary("valkey")), "--port", "0", "--unixsocket", str(self.socket)),
            *("--dir", str(home), "--save", "", "--appendonly", "yes", "--loglevel", "warning"),
        )
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command)
        async with asyncio.timeout(PATIENCE_S):
            while not await self._answers():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def _answers(self) -> bool:
        client = connect(self.url)
        try:
            return bool(await client.ping())
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()


@contextlib.asynccontextmanager
async def own_server(home: Path) -> AsyncIterator[tuple[Server, Gateway]]:
    server = Server(home)
    await server.start()
    try:
        async with listening(server.url, f"t{uuid.uuid4().hex}", home) as gateway:
            yield server, gateway
    finally:
        await server.kill()


async def test_work_continues_while_the_queue_server_is_unreachable(tmp_path: Path) -> None:
    async with (
        own_server(tmp_path) as (server, gateway),
        gateway.worker(echo(tokens_per_step=1, step_us=2_000)),
    ):
        ids = [await gateway.submit("word " * 300, stream=n % 2 == 0) for n in range(6)]
        await gateway.until(lambda: len(gateway.events) == 3)

        await server.kill()
        await asyncio.sleep(1.5)  # the jobs end meanwhile
        await server.start()
        outcomes = [await gateway.outcome(request_id) for request_id in ids]
        later = await gateway.outcome(await gateway.submit("and on it goes"))

    assert all(isinstance(outcome, Completed) for outcome in outcomes)
    assert [gateway.deliveries[request_id][0].attempt for request_id in ids] == [1] * 6
    assert isinstance(later, Completed)


async def test_wiped_queue_loses_no_work_and_repeats_no_running_job(tmp_path: Path) -> None:
    async with (
        own_server(tmp_path) as (_, gateway),
        gateway.worker(echo(tokens_per_step=1, step_us=5_000)),
    ):
        quiet = await gateway.submit("word " * 300)
        read = await gateway.submit("word " * 300, stream=True)
        await gateway.until(lambda: len(gateway.events.get(read, [])) > 5)

        await gateway.redis.flushall()
        await gateway.enqueue(quiet, read)
        outcomes = [await gateway.outcome(request_id) for request_id in (quiet, read)]
        later = await gateway.outcome(await gateway.submit("and on it goes"))

    assert all(isinstance(outcome, Completed) for outcome in (*outcomes, later))
    assert all(len(found) == 1 for found in gateway.deliveries.values())
    starts = [event for event in gateway.events_of(read) if isinstance(event, Started)]
    assert len(starts) == 1


async def test_finished_work_is_saved_when_the_queue_forgot_the_job(tmp_path: Path) -> None:
    async with (
        own_server(tmp_path) as (_, gateway),
        gateway.worker(echo(tokens_per_step=1, step_us=5_000)),
    ):
        request_id = await gateway.submit("word " * 100, stream=True)
        await gateway.until(lambda: request_id in gateway.events)

        await gateway.redis.flushall()
        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)


async def test_stream_leased_again_as_another_attempt_restarts(tmp_path: Path) -> None:
    async with (
        own_server(tmp_path) as (_, gateway),
        gateway.worker(echo(tokens_per_step=1, step_us=5_000)),
    ):
        request_id = await gateway.submit("word " * 200, stream=True)
        await gateway.until(lambda: len(gateway.events.get(request_id, [])) > 5)

        leases = f"{gateway.namespace}:{{echo}}:leases"
        await gateway.redis.zadd(leases, {request_id: 1})
        outcome = await gateway.outcome(request_id)
        await gateway.until(lambda: gateway.events[request_id][-1].seq == 201)

    second = [sent for sent in gateway.events[request_id] if sent.attempt == 2]
    assert isinstance(outcome, Completed)
    assert [sent.seq for sent in second] == list(range(1, 202))
    assert isinstance(second[0].event, Started)
    assert sum(isinstance(sent.event, Tokens) for sent in second) == 200


async def test_worker_stops_in_time_while_the_queue_server_is_unreachable(tmp_path: Path) -> None:
    async with (
        own_server(tmp_path) as (server, gateway),
        gateway.worker(drain_s=0.1) as worker,
    ):
        await server.kill()
        os.kill(worker.engine_pid(), signal.SIGKILL)
        worker.signal(signal.SIGTERM)
        status = await worker.ends()
        await server.start()

    assert status == 0
