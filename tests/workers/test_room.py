"""A worker leases what it can begin soon: the rest stays in the queue, for all to see and take."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest

from tests.workers.running import Gateway, echo
from workers.agent.room import ServedModel
from workers.contract.jobs import Completed
from workers.contract.streams import Workers

LONG = {"slots": 2, "tokens_per_step": 1, "step_us": 50_000}


def _served(slots: int, *, leases_ahead: bool = True) -> ServedModel:
    nothing = cast(Any, None)
    return ServedModel("m", nothing, nothing, slots, leases_ahead=leases_ahead)


@pytest.mark.parametrize(
    ("job_s", "capacity"), [(0.0, 8), (300.0, 8), (17.0, 8), (8.0, 10), (1.0, 16), (0.01, 16)]
)
def test_work_is_leased_ahead_for_two_seconds_at_most(job_s: float, capacity: int) -> None:
    served = _served(8)
    if job_s:
        served.record_duration(job_s)

    assert served.capacity == capacity


def test_what_an_operator_says_is_kept_to() -> None:
    served = _served(5, leases_ahead=False)
    served.record_duration(0.01)

    assert served.capacity == 5


def test_a_few_slow_jobs_shorten_what_is_leased_ahead() -> None:
    served = _served(8)
    served.record_duration(0.1)
    assert served.capacity == 16

    for _ in range(20):
        served.record_duration(60.0)

    assert served.capacity == 8


def test_nothing_is_asked_for_without_room_but_an_answer_that_was_lost() -> None:
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


async def test_what_has_not_begun_goes_back_when_a_worker_drains(gateway: Gateway) -> None:
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
