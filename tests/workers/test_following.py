"""A running worker whose catalog file changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.workers.hosting import Caller, running
from tests.workers.running import PATIENCE_S, Gateway, Worker, echo
from tests.workers.upstreams import Exchange, echo_words, upstream
from workers.contract.announcements import Announcement, Workers
from workers.contract.jobs import Completed, Job, RequestId
from workers.contract.models import ModelSpec, UpstreamSpec
from workers.protocol.ipc import JobHandoff

SLOW = {"tokens_per_step": 1, "step_us": 5_000}


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    return tmp_path / "followed.yaml"


def write(catalog: Path, *entries: Mapping[str, Any]) -> None:
    draft = catalog.with_suffix(".draft")
    draft.write_text(json.dumps({"models": entries}))
    draft.replace(catalog)


def spoil(catalog: Path) -> None:
    catalog.write_text("models: [{name: echo")


def remove(catalog: Path) -> None:
    catalog.unlink()


async def announced(gateway: Gateway, condition: Callable[[Announcement], bool]) -> Announcement:
    """Return the first announcement of the only worker that meets a condition."""
    workers = Workers(gateway.redis, namespace=gateway.namespace)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (found,) = await workers.list()
            if condition(found):
                return found
            await asyncio.sleep(0.02)


def reload(worker: Worker) -> None:
    worker.signal(signal.SIGHUP)


async def test_worker_serves_what_was_added_to_its_file_without_a_signal(
    gateway: Gateway, catalog: Path
) -> None:
    gateway.models = ("echo", "new")
    write(catalog, echo())
    async with gateway.worker(catalog=catalog) as worker:
        pid = worker.engine_pid()

        write(catalog, echo(), echo("new"))
        found = await announced(gateway, lambda now: "new" in now.models)
        outcome = await gateway.outcome(await gateway.submit("hello", model="new"))

        assert found.models == ("echo", "new")
        assert set(found.loaded) == {"echo", "new"}
        assert isinstance(outcome, Completed)
        assert worker.engine_pid() == pid


async def test_changed_model_ends_its_jobs_first_and_its_queue_waits_for_the_new_entry(
    gateway: Gateway, catalog: Path
) -> None:
    gateway.models = ("echo", "other")
    write(catalog, echo(concurrency=1, **SLOW), echo("other"))
    async with gateway.worker(catalog=catalog) as worker:
        before = await gateway.submit("word " * 300, stream=True)
        await gateway.until(lambda: len(gateway.events_of(before)) > 3)
        queued = await gateway.submit("one two three")

        write(catalog, echo(concurrency=2, tokens_per_step=0), echo("other"), echo("third"))
        reload(worker)
        meanwhile = await announced(gateway, lambda now: "third" in now.models)
        undisturbed = await gateway.outcome(await gateway.submit("hello", model="other"))
        unfinished = before not in gateway.deliveries
        ended = await gateway.outcome(before)
        after = await gateway.outcome(queued)
        again = await gateway.outcome(await gateway.submit("four five"))

    assert unfinished
    assert "echo" in meanwhile.models  # it accepts jobs all the time
    assert isinstance(undisturbed, Completed)
    assert isinstance(ended, Completed)
    assert ended.usage.output_tokens == 300
    assert isinstance(after, Completed)
    assert after.timings.queue_us > 0
    assert isinstance(again, Completed)
    assert gateway.deliveries[queued][0].attempt == 1


async def test_removed_model_is_not_offered_and_goes_when_its_jobs_have_ended(
    gateway: Gateway, catalog: Path
) -> None:
    gateway.models = ("echo", "gone")
    write(catalog, echo(), echo("gone", **SLOW))
    async with gateway.worker(catalog=catalog) as worker:
        running = await gateway.submit("word " * 200, model="gone", stream=True)
        await gateway.until(lambda: len(gateway.events_of(running)) > 3)

        write(catalog, echo())
        reload(worker)
        leaving = await announced(gateway, lambda now: "gone" not in now.models)
        outcome = await gateway.outcome(running)
        left = await announced(gateway, lambda now: not now.unavailable)

    assert leaving.unavailable == {"gone": "the worker's catalog no longer has it"}
    assert isinstance(outcome, Completed)
    assert outcome.usage.output_tokens == 200
    assert left.models == left.loaded == ("echo",)


async def test_wrong_file_changes_nothing_and_is_announced_until_it_is_mended(
    gateway: Gateway, catalog: Path
) -> None:
    write(catalog, echo())
    async with gateway.worker(catalog=catalog) as worker:
        spoil(catalog)
        reload(worker)
        wrong = await announced(gateway, lambda now: bool(now.catalog_problem))
        outcome = await gateway.outcome(await gateway.submit("still here"))
        remove(catalog)
        reload(worker)
        missing = await announced(gateway, lambda now: "No such file" in now.catalog_problem)
        write(catalog, echo())
        reload(worker)
        mended = await announced(gateway, lambda now: not now.catalog_problem)

    assert str(catalog) in wrong.catalog_problem
    assert wrong.models == missing.models == mended.models == ("echo",)
    assert isinstance(outcome, Completed)


async def test_model_that_could_not_be_loaded_is_tried_again_with_its_new_entry(
    gateway: Gateway, catalog: Path
) -> None:
    write(catalog, echo("echo", step_us="long"))
    async with gateway.worker(catalog=catalog) as worker:
        await announced(gateway, lambda now: "echo" in now.problems)

        write(catalog, echo())
        reload(worker)
        found = await announced(gateway, lambda now: now.models == ("echo",))
        outcome = await gateway.outcome(await gateway.submit("mended"))

    assert found.problems == {}
    assert isinstance(outcome, Completed)


async def test_first_model_of_a_worker_starts_its_engine_process_which_starts_again_with_it(
    gateway: Gateway, catalog: Path
) -> None:
    write(catalog)
    async with gateway.worker(catalog=catalog) as worker:
        write(catalog, echo())
        reload(worker)
        first = await gateway.outcome(await gateway.submit("hello"))

        os.kill(worker.engine_pid(), signal.SIGKILL)
        second = await gateway.outcome(await gateway.submit("hello again"))

    assert isinstance(first, Completed)
    assert isinstance(second, Completed)


async def test_call_ends_under_the_upstream_entry_under_which_it_began() -> None:
    ask, answer = asyncio.Event(), asyncio.Event()

    async def hesitate(exchange: Exchange) -> None:
        ask.set()
        await answer.wait()
        await echo_words(exchange)

    async with upstream() as service:
        service.answer = hesitate
        before = entry(service.url)
        caller = Caller(before, {})
        async with running(caller):
            caller.host.submit([JobHandoff(job(), 0, 0)])
            async with asyncio.timeout(PATIENCE_S):
                await ask.wait()

            caller.host.add(entry("http://127.0.0.1:9/v1"))
            caller.host.remove(before.name)
            answer.set()
            outcome = await caller.completes()

    assert outcome.usage.output_tokens == 2


def entry(url: str) -> ModelSpec:
    return ModelSpec("remote", "text-generation", upstream=UpstreamSpec(url, model="m"))


def job() -> Job:
    chat = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 64}
    return Job(RequestId("req_1"), "acc", "remote", "text-generation", chat)
