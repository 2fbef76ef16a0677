"""What operators wish of a running worker, and what it announces of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.workers.running import PATIENCE_S, Gateway, echo
from workers.agent.lineup import UNLOADED
from workers.contract.announcements import Announcement, Workers
from workers.contract.jobs import Completed

SLOW = {"tokens_per_step": 1, "step_us": 5_000}


async def announced(gateway: Gateway, condition: Callable[[Announcement], bool]) -> Announcement:
    """Return the first announcement of the only worker that meets a condition."""
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (found,) = await workers.list()
            if condition(found):
                return found
            await asyncio.sleep(0.02)


async def test_worker_that_drains_ends_its_jobs_and_takes_none_until_it_resumes(
    gateway: Gateway,
) -> None:
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with gateway.worker(echo(**SLOW)) as worker:
        running = await gateway.submit("word " * 300, stream=True)
        await gateway.until(lambda: len(gateway.events_of(running)) > 3)

        await workers.wish_drain(worker.name, True)
        draining = await announced(gateway, lambda now: now.draining)
        waiting = await gateway.submit("one two three")
        ended = await gateway.outcome(running)
        idle = await announced(gateway, lambda now: now.running == 0)
        state = await gateway.queue().state(waiting)
        await workers.wish_drain(worker.name, False)
        outcome = await gateway.outcome(waiting)
        resumed = await announced(gateway, lambda now: not now.draining)

    assert isinstance(ended, Completed)
    assert ended.usage.output_tokens == 300
    assert draining.models == ("echo",)
    assert not draining.ending
    assert idle.draining
    assert state is not None
    assert (state.state, state.attempt) == ("queued", 0)
    assert isinstance(outcome, Completed)
    assert resumed.models == ("echo",)


async def test_model_is_unloaded_after_its_jobs_have_ended_and_loaded_again(
    gateway: Gateway,
) -> None:
    gateway.models = ("echo", "other")
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with gateway.worker(echo(**SLOW), echo("other")) as worker:
        running = await gateway.submit("word " * 200, stream=True)
        await gateway.until(lambda: len(gateway.events_of(running)) > 3)

        await workers.wish_loaded(worker.name, "echo", False)
        leaving = await announced(gateway, lambda now: "echo" in now.unavailable)
        waiting = await gateway.submit("one two three")
        ended = await gateway.outcome(running)
        gone = await announced(gateway, lambda now: "echo" not in now.loaded)
        undisturbed = await gateway.outcome(await gateway.submit("hello", model="other"))
        unstarted = waiting not in gateway.deliveries
        await workers.wish_loaded(worker.name, "echo", True)
        outcome = await gateway.outcome(waiting)
        back = await announced(gateway, lambda now: "echo" in now.models)

    assert leaving.unavailable == gone.unavailable == {"echo": UNLOADED}
    assert isinstance(ended, Completed)
    assert ended.usage.output_tokens == 200
    assert isinstance(undisturbed, Completed)
    assert unstarted
    assert isinstance(outcome, Completed)
    assert back.unavailable == {}
    assert set(back.loaded) == {"echo", "other"}


async def test_model_is_loaded_before_its_first_job_if_that_is_wished(gateway: Gateway) -> None:
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with gateway.worker(echo(), environ={"TOLLGATE_PRELOAD": "false"}) as worker:
        before = await announced(gateway, lambda now: True)
        await workers.wish_loaded(worker.name, "echo", True)
        after = await announced(gateway, lambda now: bool(now.loaded))

    assert before.loaded == ()
    assert after.loaded == ("echo",)


async def test_worker_announces_its_work_memory_and_capacity(gateway: Gateway) -> None:
    async with gateway.worker(echo(concurrency=5, **SLOW)):
        await gateway.submit("word " * 5_000)
        busy = await announced(gateway, lambda now: now.work.steps > 0)

    assert busy.states["echo"].running == 1
    assert busy.states["echo"].capacity == 5
    assert 0 < busy.bytes_used < busy.bytes_total
    assert busy.work.busy_us >= busy.work.models["echo"] > 0
    assert busy.earlier.busy_us <= busy.work.busy_us
    assert busy.started_ms < busy.work.at_ms
    assert busy.version


async def test_killed_worker_is_listed_as_silent_and_one_that_ended_is_not(
    gateway: Gateway,
) -> None:
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with gateway.worker(name="killed") as killed, gateway.worker(name="ended") as ended:
        killed.process.kill()
        await killed.process.wait()
        ended.process.terminate()
        await ended.ends()
        # Its announcement expires 15 s after it was sent.
        await gateway.redis.delete(f"{gateway.namespace}:{{workers}}:{killed.name}")

        live, silent = await workers.list(), await workers.silent()

    assert live == ()
    assert [each.last.worker for each in silent] == [killed.name]
    assert silent[0].last.models == ("echo",)
    assert silent[0].heard_ms >= silent[0].last.started_ms
