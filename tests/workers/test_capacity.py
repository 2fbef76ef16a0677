"""A worker leases only what it can start soon; the rest stays in the queue for other workers."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest

from tests.workers.running import Gateway, echo
from workers.agent.capacity import ServedModel
from workers.contract.announcements import Workers
from workers.contract.jobs import Completed

LONG = {"slots": 2, "tokens_per_step": 1, "step_us": 50_000}


def _served(slots: int, *, leases_ahead: bool = True) -> ServedModel:
    nothing = cast(Any, None)
    return ServedModel("m", nothing, nothing, slots, leases_ahead=leases_ahead)


@pytest.mark.parametrize(
    ("job_s", "capacity"), [(0.0, 8), (300.0, 8), (17.0, 8), (8.0, 10), (1.0, 16), (0.01, 16)]
)
def test_at_most_two_seconds_of_work_are_leased_ahead(job_s: float, capacity: int) -> None:
    served = _served(8)
    if job_s:
        served.record_duration(job_s)

    assert served.capacity == capacity


def test_configured_concurrency_is_a_hard_limit() -> None:
    served = _served(5, leases_ahead=False)
    served.record_duration(0.01)

    assert served.capacity == 5


def test_slow_jobs_reduce_leasing_ahead() -> None:
    served = _served(8)
    served.record_duration(0.1)
    assert served.capacity == 16

    for _ in range(20):
        served.record_duration(60.0)

    assert served.capacity == 8


def test_without_room_only_a_lost_answer_is_requested_again() -> None:
    served = _served(8)
    served.record_duration(0.1)
    served.running = 16
    served.job_s = 60.0

    assert served.wanted == 0
    served.nonce = "lost"
    assert served.wanted == 1


async def test_long_jobs_are_shared_by_two_workers(gateway: Gateway) -> None:
    async with gateway.worker(echo(**LONG)):
        for _ in range(6):
            await gateway.submit("word " * 5_000, stream=True)
        await gateway.until(lambda: len(gateway.events) == 2)
        await asyncio.sleep(0.3)

        load = await gateway.queue().load()
        assert (load.running, load.depth) == (2, 4), "the queue says what waits"
        async with gateway.worker(echo(**LONG)):
            await gateway.until(lambda: len(gateway.events) == 4)
            assert not gateway.deliveries


async def test_draining_worker_requeues_jobs_that_have_not_started(gateway: Gateway) -> None:
    catalog = echo(concurrency=6, **LONG)
    async with gateway.worker(catalog, drain_s=3600) as worker:
        ids = [await gateway.submit("word " * 400, stream=True) for _ in range(6)]
        await gateway.until(lambda: len(gateway.events) == 2)
        while (await gateway.queue().load()).depth:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

        worker.signal(signal.SIGTERM)
        while (await gateway.queue().load()).depth < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

        assert not gateway.deliveries, "what runs goes on"
        assert await worker.ends() == 0
    assert len(gateway.deliveries) == 2
    assert await Workers(gateway.redis, namespace=gateway.namespace).list() == ()
    async with gateway.worker(echo()):
        for request_id in ids:
            assert isinstance(await gateway.outcome(request_id), Completed)
    for request_id in ids:
        (delivery,) = gateway.deliveries[request_id]
        crashes = await gateway.redis.hget(
            f"{gateway.namespace}:{{echo}}:job:{request_id}", "crashes"
        )
        assert delivery.attempt <= 2
        assert crashes in (b"0", None)
