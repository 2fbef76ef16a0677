"""Jobs through a queue, an agent and its engine process, with the echo engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from tests.workers.running import Gateway, echo, expire_leases
from workers.contract.announcements import Workers
from workers.contract.blobs import Blobs
from workers.contract.jobs import (
    Cancelled,
    Completed,
    Failed,
    RequestId,
    Started,
    Tokens,
    decode_frame,
    unpack_value,
)
from workers.contract.queue import QueueEntry
from workers.contract.streams import EventLog
from workers.engines.registry import ENGINES


async def test_job_completes_with_usage_and_timings(gateway: Gateway) -> None:
    async with gateway.worker() as worker:
        request_id = await gateway.submit("one two three")

        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)
    assert outcome.output["choices"][0]["text"] == "one two three"
    assert outcome.usage.output_tokens == 3
    assert outcome.timings.queue_us > 0
    assert outcome.worker == worker.name


async def test_events_precede_the_outcome_in_order_and_can_be_replayed(gateway: Gateway) -> None:
    words = "word " * 50
    async with gateway.worker(echo(tokens_per_step=1)):
        request_id = await gateway.submit(words, stream=True)

        outcome = await gateway.outcome(request_id)
        log = await EventLog(gateway.redis, namespace=gateway.namespace).replay(request_id)

    await gateway.until(lambda: len(gateway.events.get(request_id, [])) == 51)
    sent = gateway.events[request_id]
    assert [event.seq for event in sent] == list(range(1, 52))
    assert isinstance(sent[0].event, Started)
    tokens = [event for event in gateway.events_of(request_id) if isinstance(event, Tokens)]
    assert "".join(event.text for event in tokens) == words
    assert isinstance(outcome, Completed)
    assert [event for entry in log for event in decode_frame(entry.data)] == sent
    assert len(log) < 30


async def test_job_that_is_not_streamed_sends_no_events(gateway: Gateway) -> None:
    async with gateway.worker():
        request_id = await gateway.submit("quiet")
        await gateway.outcome(request_id)

        keys = await gateway.redis.keys(f"{gateway.namespace}:events:*")

    assert request_id not in gateway.events
    assert keys == []


async def test_many_jobs_of_two_models_all_end_once(gateway: Gateway) -> None:
    gateway.models = ("a", "b")
    async with gateway.worker(echo("a"), echo("b")):
        ids = [await gateway.submit(f"job {n}", model="ab"[n % 2]) for n in range(300)]

        await gateway.until(lambda: len(gateway.deliveries) == 300)

    assert {delivery[0].status for delivery in gateway.deliveries.values()} == {"ok"}
    assert all(len(gateway.deliveries[request_id]) == 1 for request_id in ids)


async def test_a_cancelled_stream_ends_with_what_it_delivered(gateway: Gateway) -> None:
    async with gateway.worker(echo(tokens_per_step=1, step_us=2_000)):
        request_id = await gateway.submit("word " * 5_000, stream=True)
        await gateway.until(lambda: len(gateway.events.get(request_id, [])) > 3)

        assert await gateway.queue().cancel(request_id) == "cancelling"
        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Cancelled)
    assert outcome.reason == "client"
    assert outcome.delivered
    assert 3 <= outcome.usage.output_tokens < 5_000


async def test_a_job_past_its_deadline_is_cancelled(gateway: Gateway) -> None:
    async with gateway.worker(echo(tokens_per_step=1, step_us=2_000)):
        deadline_ms = int(time.time() * 1000) + 300
        request_id = await gateway.submit("word " * 5_000, deadline_ms=deadline_ms)

        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Cancelled)
    assert outcome.reason == "deadline"
    assert not outcome.delivered


async def test_malformed_job_fails(gateway: Gateway) -> None:
    async with gateway.worker():
        entry = QueueEntry(id="req_bad", account="acc", payload=b"no job", cost=1.0)
        await gateway.queue().enqueue([entry], queue_max=10, account_max=10)

        await gateway.until(lambda: "req_bad" in gateway.deliveries)
        outcome = await gateway.outcome(RequestId("req_bad"))

    assert isinstance(outcome, Failed)
    assert outcome.code == "invalid_input"


async def test_an_output_that_is_too_large_for_the_queue_is_stored(gateway: Gateway) -> None:
    async with gateway.worker():
        request_id = await gateway.submit("x" * 40_000, n=30)

        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)
    assert outcome.output == {}
    assert outcome.stored is not None
    output = unpack_value(await Blobs(gateway.blob_url).get(outcome.stored))
    assert [choice["text"] for choice in output["choices"]] == ["x" * 40_000] * 30


async def test_worker_announces_served_models_and_reasons_for_the_others(gateway: Gateway) -> None:
    catalog = [
        echo(),
        echo("wrong", concurrency="many"),
        echo("broken", step_us="long"),
        {"name": "strange", "task": "text-generation", "engine": "abacus"},
        {
            "name": "keyless",
            "task": "text-generation",
            "upstream": {"url": "http://localhost:9/v1", "credential": "NO_SUCH_KEY"},
        },
        {
            "name": "foreign",
            "task": "text-to-image",
            "upstream": {"url": "http://localhost:9/v1", "dialect": "smoke-signals"},
        },
    ]
    async with gateway.worker(*catalog) as worker:
        (announced,) = await Workers(gateway.redis, namespace=gateway.namespace).list()

    assert announced.worker == worker.name
    assert announced.models == ("echo",)
    assert announced.loaded == ("echo",)
    assert announced.loading == ()
    assert list(announced.problems) == ["broken"]
    assert "step_us" in announced.problems["broken"]
    assert announced.unavailable == {
        "wrong": "invalid options: Expected `int | null`, got `str` - at `$.concurrency`",
        "broken": "its engine could not be loaded; see the worker's log",
        "strange": f"unknown engine 'abacus'; this worker has {', '.join(ENGINES)}",
        "keyless": "NO_SUCH_KEY is not set",
        "foreign": "unknown dialect 'smoke-signals'; this worker supports openai, gmi",
    }


async def test_a_killed_engine_process_costs_its_jobs_one_attempt(gateway: Gateway) -> None:
    async with gateway.worker(echo(tokens_per_step=1, step_us=5_000)) as worker:
        ids = [await gateway.submit("word " * 100, stream=True) for _ in range(5)]
        await gateway.until(lambda: len(gateway.events) == 5)

        os.kill(worker.engine_pid(), signal.SIGKILL)
        outcomes = [await gateway.outcome(request_id) for request_id in ids]

    assert all(isinstance(outcome, Completed) for outcome in outcomes)
    for request_id in ids:
        assert [delivery.attempt for delivery in gateway.deliveries[request_id]] == [2]
        starts = [event for event in gateway.events_of(request_id) if isinstance(event, Started)]
        assert [start.attempt for start in starts] == [1, 2]


async def test_job_that_crashes_its_process_three_times_is_dead_lettered(gateway: Gateway) -> None:
    async with gateway.worker():
        poison = await gateway.submit("!crash")

        delivery = await gateway.delivery(poison)
        fine = await gateway.submit("fine")

        assert isinstance(await gateway.outcome(fine), Completed)
    assert delivery.status == "dead"
    assert delivery.attempt == 3


async def test_poison_job_does_not_dead_letter_other_jobs(gateway: Gateway) -> None:
    async with gateway.worker(echo(tokens_per_step=1, step_us=20_000)):
        ids = [await gateway.submit("word " * 30) for _ in range(6)]
        ids.insert(3, await gateway.submit("!crash"))

        statuses = [(await gateway.delivery(request_id)).status for request_id in ids]

    assert statuses == ["ok", "ok", "ok", "dead", "ok", "ok", "ok"]


async def test_hanging_process_is_killed_and_its_jobs_continue(gateway: Gateway) -> None:
    async with gateway.worker(echo(step_limit_s=0.5)):
        hanging = await gateway.submit("!hang")

        delivery = await gateway.delivery(hanging)

    assert delivery.status == "dead"


async def test_failing_engine_is_not_a_crash(gateway: Gateway) -> None:
    async with gateway.worker():
        outcome = await gateway.outcome(await gateway.submit("!fail"))

    assert isinstance(outcome, Failed)
    assert outcome.code == "engine_error"


async def test_jobs_of_a_killed_agent_are_taken_over_when_their_leases_expire(
    gateway: Gateway,
) -> None:
    catalog = echo(tokens_per_step=1, step_us=5_000)
    async with gateway.worker(catalog) as first:
        request_id = await gateway.submit("word " * 200, stream=True)
        await gateway.until(lambda: request_id in gateway.events)
        first.signal(signal.SIGKILL)
        await first.ends()

    async with gateway.worker(catalog):
        await expire_leases(gateway)
        outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)
    assert gateway.deliveries[request_id][0].attempt == 2


async def test_worker_that_lost_a_lease_sends_nothing_more(gateway: Gateway) -> None:
    catalog = echo(tokens_per_step=1, step_us=10_000)
    async with gateway.worker(catalog, name="one") as first:
        request_id = await gateway.submit("word " * 300, stream=True)
        await gateway.until(lambda: request_id in gateway.events)
        first.signal(signal.SIGSTOP)
        async with gateway.worker(catalog, name="two"):
            await expire_leases(gateway)
            await gateway.until(lambda: gateway.events[request_id][-1].attempt == 2)
            first.signal(signal.SIGCONT)

            outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)
    assert len(gateway.deliveries[request_id]) == 1
    assert gateway.deliveries[request_id][0].attempt == 2


async def test_draining_worker_finishes_running_jobs_and_leases_no_more(gateway: Gateway) -> None:
    async with gateway.worker(echo(tokens_per_step=1, step_us=5_000)) as worker:
        running = await gateway.submit("word " * 100, stream=True)
        await gateway.until(lambda: running in gateway.events)

        worker.signal(signal.SIGTERM)
        await _until_draining(gateway)
        late = await gateway.submit("too late")
        status = await worker.ends()

    assert status == 0
    assert isinstance(await gateway.outcome(running), Completed)
    assert late not in gateway.deliveries
    assert await Workers(gateway.redis, namespace=gateway.namespace).list() == ()


async def _until_draining(gateway: Gateway) -> None:
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    while any(not announced.draining for announced in await workers.list()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_jobs_that_do_not_end_in_time_are_requeued_without_a_crash(gateway: Gateway) -> None:
    catalog = echo(tokens_per_step=1, step_us=5_000)
    async with gateway.worker(catalog, drain_s=0.2) as worker:
        request_id = await gateway.submit("word " * 2_000, stream=True)
        await gateway.until(lambda: request_id in gateway.events)
        worker.signal(signal.SIGTERM)
        status = await worker.ends()

    state = await gateway.queue().state(request_id)
    crashes = await gateway.redis.hget(f"{gateway.namespace}:{{echo}}:job:{request_id}", "crashes")
    assert status == 0
    assert state is not None
    assert state.state == "queued"
    assert crashes == b"0"
    assert request_id not in gateway.deliveries


async def test_second_signal_stops_a_worker_immediately(gateway: Gateway) -> None:
    catalog = echo(tokens_per_step=1, step_us=5_000)
    async with gateway.worker(catalog, drain_s=3600) as worker:
        request_id = await gateway.submit("word " * 100_000, stream=True)
        await gateway.until(lambda: request_id in gateway.events)

        worker.signal(signal.SIGTERM)
        await _until_draining(gateway)
        worker.signal(signal.SIGTERM)

        assert await worker.ends() == 0
