"""A request sent to an upstream is followed to its end, and never sent twice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gateway.sql.database import Database
from gateway.tables.core import holds
from tests.databases import Databases
from tests.stack import Caller, Stack, ended, running, wait_for
from tests.workers import fake_gmi as fake
from tests.workers.conftest import gateway as gateway  # a fixture
from tests.workers.conftest import redis_url as redis_url  # a fixture
from tests.workers.fake_gmi import KEY, FakeGmi, Fault, fake_gmi
from tests.workers.running import PATIENCE_S, Gateway, expire_leases
from workers.contract.blobs import Blobs
from workers.contract.jobs import Cancelled, Completed, Failed, Job, RequestId, Usage, decode_job
from workers.contract.redis import connect

MODEL = "seedream-5.0-lite"
ID = RequestId(f"req_{1:032x}")
CREDENTIAL = {"GMI_API_KEY": KEY}


@contextlib.asynccontextmanager
async def ordered(gateway: Gateway) -> AsyncIterator[tuple[FakeGmi, dict[str, Any]]]:
    """A request that is queued, a service whose orders go on, and the entry of its model."""
    gateway.models = (MODEL,)
    async with fake_gmi() as service:
        service.states = ["processing"]
        entry = {
            "name": MODEL,
            "task": "text-to-image",
            "upstream": {"dialect": "gmi", "url": service.url, "credential": "GMI_API_KEY"},
            "options": {"poll_min_s": 0.01, "poll_max_s": 0.05},
        }
        gateway.jobs[ID] = Job(
            ID,
            "acc",
            MODEL,
            "text-to-image",
            {"prompt": "a teal wall", "images": 1},
            limits=Usage(requests=1, images=1),
        )
        await gateway.enqueue(ID)
        yield service, entry


async def is_delivered(gateway: Gateway, service: FakeGmi) -> None:
    """Check that the only upstream request has ended, and that its image is the outcome."""
    service.order.states = ["success"]
    outcome = await gateway.outcome(ID)
    assert isinstance(outcome, Completed), outcome
    assert await Blobs(gateway.blob_url).get(outcome.blobs[0]) == fake.picture()
    assert service.count("POST /requests") == 1
    assert service.deleted == []


async def kept(gateway: Gateway, service: FakeGmi) -> None:
    """Wait until the number of the order is with its job."""
    await service.until(lambda: service.orders)
    await noted(gateway, lambda note: service.order.id in note)


async def noted(gateway: Gateway, is_wanted: Callable[[str], bool]) -> str:
    """Wait for a note of the job in the queue, and return it."""
    key = f"{gateway.namespace}:{{{MODEL}}}:job:{ID}"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            note = await gateway.redis.hget(key, "note")
            if note is not None and is_wanted(note.decode()):
                return str(note.decode())
            await asyncio.sleep(0.02)


async def test_upstream_request_of_a_killed_worker_is_followed_by_the_next(
    gateway: Gateway,
) -> None:
    async with ordered(gateway) as (service, entry):
        async with gateway.worker(entry, environ=CREDENTIAL) as worker:
            await kept(gateway, service)
            worker.signal(signal.SIGKILL)
            await worker.ends()
        await expire_leases(gateway, MODEL)
        async with gateway.worker(entry, environ=CREDENTIAL):
            await is_delivered(gateway, service)


async def test_drained_worker_leaves_its_upstream_request_to_the_next(gateway: Gateway) -> None:
    async with ordered(gateway) as (service, entry):
        async with gateway.worker(entry, environ=CREDENTIAL, drain_s=0.1) as worker:
            await kept(gateway, service)
            worker.signal(signal.SIGTERM)
            assert await worker.ends() == 0
        assert service.deleted == []
        async with gateway.worker(entry, environ=CREDENTIAL):
            await is_delivered(gateway, service)


async def test_drain_waits_for_the_id_of_an_upstream_request_being_sent(
    gateway: Gateway,
) -> None:
    async with ordered(gateway) as (service, entry):
        answered = asyncio.Event()
        service.faults.append(Fault("POST", "/requests", waits=answered))
        async with gateway.worker(entry, environ=CREDENTIAL, drain_s=0.1) as worker:
            await service.until(lambda: not service.faults)
            worker.signal(signal.SIGTERM)
            await asyncio.sleep(0.8)
            answered.set()
            assert await worker.ends() == 0
        async with gateway.worker(entry, environ=CREDENTIAL):
            await is_delivered(gateway, service)


async def test_worker_that_lost_its_lease_leaves_the_upstream_request_alone(
    gateway: Gateway,
) -> None:
    async with ordered(gateway) as (service, entry):
        async with gateway.worker(entry, environ=CREDENTIAL) as first:
            await kept(gateway, service)
            first.signal(signal.SIGSTOP)
            await expire_leases(gateway, MODEL)
            async with gateway.worker(entry, environ=CREDENTIAL):
                await service.until(lambda: service.order.polls)
                first.signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
                await is_delivered(gateway, service)
        assert len(gateway.deliveries[ID]) == 1


async def test_upstream_request_is_followed_after_a_simultaneous_wipe_and_crash(
    gateway: Gateway,
) -> None:
    """The gateway has the note by the stream of outcomes, and queues the job again with it."""
    async with ordered(gateway) as (service, entry):
        async with gateway.worker(entry, environ=CREDENTIAL) as worker:
            await kept(gateway, service)
            note = await noted(gateway, bool)
            worker.signal(signal.SIGKILL)
            await worker.ends()
        await gateway.redis.flushall()
        job = gateway.jobs[ID]
        gateway.jobs[ID] = Job(ID, "acc", MODEL, job.task, job.input, limits=job.limits, note=note)
        await gateway.enqueue(ID)
        async with gateway.worker(entry, environ=CREDENTIAL):
            await is_delivered(gateway, service)


async def test_upstream_request_of_unknown_id_is_not_sent_again(gateway: Gateway) -> None:
    async with ordered(gateway) as (service, entry):
        answered = asyncio.Event()
        service.faults.append(Fault("POST", "/requests", waits=answered))
        async with gateway.worker(entry, environ=CREDENTIAL) as worker:
            await service.until(lambda: not service.faults)
            worker.signal(signal.SIGKILL)
            await worker.ends()
        await expire_leases(gateway, MODEL)
        async with gateway.worker(entry, environ=CREDENTIAL):
            outcome = await gateway.outcome(ID)
        answered.set()
        await service.until(lambda: service.orders)
        await asyncio.sleep(0.1)  # for the service to notice that nobody reads its answer

    assert isinstance(outcome, Failed), outcome
    assert outcome.code == "upstream_error"
    assert "not sent again" in outcome.message
    assert service.count("POST /requests") == 1


async def test_refused_upstream_request_is_sent_by_the_next_worker(
    gateway: Gateway,
) -> None:
    """What the upstream did not take is no reason to fail."""
    async with ordered(gateway) as (service, entry):
        busy = Fault("POST", "/requests", 429, headers={"Retry-After": "30"})
        service.faults.append(busy)
        async with gateway.worker(entry, environ=CREDENTIAL) as worker:
            await service.until(lambda: not service.faults)
            await noted(gateway, lambda note: not note)
            worker.signal(signal.SIGKILL)
            await worker.ends()
        await expire_leases(gateway, MODEL)
        async with gateway.worker(entry, environ=CREDENTIAL):
            await service.until(lambda: service.orders)
            service.order.states = ["success"]
            assert isinstance(await gateway.outcome(ID), Completed)
    assert len(service.orders) == 1


async def test_cancelled_request_is_cancelled_upstream_by_the_next_worker(
    gateway: Gateway,
) -> None:
    async with ordered(gateway) as (service, entry):
        async with gateway.worker(entry, environ=CREDENTIAL) as worker:
            await kept(gateway, service)
            worker.signal(signal.SIGKILL)
            await worker.ends()
        await expire_leases(gateway, MODEL)
        async with gateway.worker(entry, environ=CREDENTIAL):
            polls = service.order.polls
            await service.until(lambda: service.order.polls > polls)
            await gateway.queue(MODEL).cancel(ID)
            assert isinstance(await gateway.outcome(ID), Cancelled)
            await service.until(lambda: service.deleted)
    assert service.deleted == [service.order.id]


# --- With a gateway ------------------------------------------------------------------------------

MORE = """\
  - name: {model}
    task: text-to-image
    upstream: {{dialect: gmi, url: "{url}", credential: FAKE_GMI_KEY}}
    options: {{poll_min_s: 0.01, poll_max_s: 0.1}}
    limits: {{timeout_s: 60}}
    price: [{{unit: request, amount: "0.04"}}]
"""


async def test_simultaneous_kill_and_wipe_send_and_charge_once(
    tmp_path: Path, postgres: str, valkey: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the order is kept in SQL, with the job that the sweeper queues again."""
    monkeypatch.setenv("FAKE_GMI_KEY", KEY)
    url = Databases("sqlite", tmp_path, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    async with fake_gmi() as service:
        service.states = ["processing"]
        more = MORE.format(model=MODEL, url=service.url)
        with contextlib.ExitStack() as closing:
            stack = await asyncio.to_thread(
                closing.enter_context,
                running(tmp_path / "home", url, valkey, namespace=name, more_models=more),
            )
            caller = stack.caller()
            placed = await asyncio.to_thread(place, stack, caller)
            await service.until(lambda: service.orders)
            await asyncio.to_thread(
                wait_for, lambda: service.order.id in note_in_sql(stack, placed), "the note in SQL"
            )

            stack.kill("worker")
            redis = connect(valkey)
            for key in await redis.keys(f"{name}:*"):
                await redis.delete(key)
            await redis.aclose()
            service.order.states = ["success"]
            stack.start_worker()
            done = await asyncio.to_thread(ended, caller, placed)

            assert done["status"] == "succeeded", done
            assert done["cost"] == "0.04"
            assert len(done["output"]["media"]) == 1
            assert service.count("POST /requests") == 1
            assert service.deleted == []
            balance = (await asyncio.to_thread(caller.http.get, "/v1/balance")).json()
            assert balance["posted"] == "0.96"
            assert stack.findings() == []
            await asyncio.to_thread(stack.stop)


def place(stack: Stack, caller: Caller) -> str:
    body = {"model": MODEL, "input": {"prompt": "a teal wall"}}
    answer = caller.http.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def note_in_sql(stack: Stack, request_id: str) -> str:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            job = connection.scalar(select(holds.c.job).where(holds.c.request_id == request_id))
    finally:
        database.engine.dispose()
    return decode_job(job).note if job is not None else ""
