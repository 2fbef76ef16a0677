"""The engine process under its supervisor, with the echo engine and without a queue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from workers.agent.engine_supervisor import EngineSupervisor
from workers.contract.jobs import (
    Cancelled,
    Completed,
    Event,
    Failed,
    Job,
    Outcome,
    RequestId,
    Tokens,
    Usage,
)
from workers.contract.models import ModelSpec
from workers.engines import registry
from workers.protocol.ipc import JobHandoff


class Owner:
    """Replaces the agent: records all reports of its host."""

    def __init__(
        self, *specs: ModelSpec, preload: bool = True, budget_bytes: int | None = None
    ) -> None:
        self.events: dict[RequestId, list[Event]] = {}
        self.outcomes: dict[RequestId, Outcome] = {}
        self.crashes: list[Collection[RequestId]] = []
        self.changed = asyncio.Event()
        self.host = EngineSupervisor(
            specs,
            worker="w1",
            preload=preload,
            threads=1,
            budget_bytes=budget_bytes,
            report=self.on_report,
            crashed=self.crash,
            changed=self.changed.set,
        )

    def on_report(
        self,
        events: Sequence[tuple[RequestId, Event]],
        outcomes: Sequence[tuple[RequestId, Outcome]],
    ) -> None:
        for request_id, event in events:
            self.events.setdefault(request_id, []).append(event)
        for request_id, outcome in outcomes:
            assert request_id not in self.outcomes
            self.outcomes[request_id] = outcome
        self.changed.set()

    async def crash(self, unharmed: Collection[RequestId]) -> None:
        self.crashes.append(tuple(unharmed))
        self.changed.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ends(self, request_id: RequestId) -> Outcome:
        await self.until(lambda: request_id in self.outcomes)
        return self.outcomes[request_id]


@contextlib.asynccontextmanager
async def hosted(
    *specs: ModelSpec, preload: bool = True, loaded: bool = True
) -> AsyncIterator[Owner]:
    """Run specs; ``loaded``: until all of them are loaded."""
    async with running_owner(Owner(*specs, preload=preload), loaded=loaded) as owner:
        yield owner


@contextlib.asynccontextmanager
async def running_owner(owner: Owner, *, loaded: bool = True) -> AsyncIterator[Owner]:
    task = asyncio.create_task(owner.host.run())
    try:
        await owner.until(lambda: owner.host.ready and not (loaded and owner.host.loading))
        yield owner
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def echo(name: str = "echo", **options: Any) -> ModelSpec:
    return ModelSpec(
        name, "text-generation", engine="echo", options={"unsafe_test_hooks": True, **options}
    )


def handoff(
    number: int, text: str, *, model: str = "echo", stream: bool = False, attempt: int = 1
) -> JobHandoff:
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1000}
    job = Job(RequestId(f"req_{number:032x}"), "acc", model, "text-generation", chat, stream=stream)
    return JobHandoff(job, queue_us=5, leased_us=time.monotonic_ns() // 1000, attempt=attempt)


def used(words: int) -> Usage:
    """Usage that the engine ``echo`` reports with its first tokens, if there are no others."""
    return Usage(requests=1, input_tokens=words, output_tokens=words)


async def test_job_ends_with_usage_and_timings() -> None:
    async with hosted(echo()) as owner:
        job = handoff(1, "one two three", stream=True)
        owner.host.submit([job])

        outcome = await owner.ends(job.job.request_id)

    assert isinstance(outcome, Completed)
    assert outcome.output["choices"][0]["text"] == "one two three"
    assert outcome.usage.input_tokens == outcome.usage.output_tokens == 3
    assert outcome.usage.gpu_us == outcome.timings.preprocess_us + outcome.timings.forward_us
    assert outcome.timings.queue_us == 5
    assert outcome.timings.first_token_us > 5
    assert outcome.timings.tokens == 3
    assert outcome.worker == "w1"
    assert owner.events[job.job.request_id] == [
        Tokens(0, "one two three", 3, finish_reason="stop", usage=used(3))
    ]


async def test_a_cancelled_stream_ends_with_what_it_delivered() -> None:
    async with hosted(echo(tokens_per_step=1, step_us=1000)) as owner:
        job = handoff(1, "word " * 900, stream=True)
        owner.host.submit([job])
        await owner.until(lambda: owner.events)
        owner.host.cancel(job.job.request_id, "client")

        outcome = await owner.ends(job.job.request_id)

    assert isinstance(outcome, Cancelled)
    assert outcome.delivered
    events = owner.events[job.job.request_id]
    assert outcome.usage.output_tokens == len(events) < 900


async def test_a_killed_process_is_reported_once_and_replaced() -> None:
    async with hosted(echo()) as owner:
        owner.host.submit([handoff(1, "!crash")])
        await owner.until(lambda: owner.crashes and owner.host.ready)
        again = handoff(1, "fine now")
        owner.host.submit([again])

        outcome = await owner.ends(again.job.request_id)

    assert owner.crashes == [()]
    assert isinstance(outcome, Completed)


async def test_job_submitted_while_the_process_ends_is_unharmed() -> None:
    async with hosted(echo()) as owner:
        assert owner.host._transport is not None
        owner.host._transport.close()
        job = handoff(1, "hello")

        owner.host.submit([job])
        await owner.until(lambda: owner.crashes)

    assert owner.crashes == [(job.job.request_id,)]


async def test_busy_time_of_a_model_counts_on_after_a_crash() -> None:
    async with hosted(echo(step_us=10_000)) as owner:
        job = handoff(1, "a few words to repeat")
        owner.host.submit([job])
        await owner.ends(job.job.request_id)
        await _measured(owner)
        before = owner.host.work

        owner.host.submit([handoff(2, "!crash")])
        await owner.until(lambda: owner.crashes and owner.host.ready)
        at_once = owner.host.work
        await _measured(owner)
        after = owner.host.work

    assert before.models["echo"] > 0
    assert before.models["echo"] <= at_once.models["echo"] <= after.models["echo"]


async def _measured(owner: Owner) -> None:
    # A question that a process does not live to answer is asked again.
    while not owner.host.measured.models:
        owner.host.measure()
        await asyncio.sleep(0.05)


async def test_first_model_takes_jobs_before_the_last_one_is_loaded() -> None:
    last = echo("last", load_us=60_000_000)
    # The job must come before the last load, which lets nothing run.
    async with hosted(echo(), echo("next", load_us=3_000_000), last, loaded=False) as owner:
        await owner.until(lambda: owner.host.takes("echo"))
        assert (owner.host.takes("last"), owner.host.obstacle("last")) == (
            False,
            "it is still loading",
        )
        job = handoff(1, "early")
        owner.host.submit([job])

        outcome = await owner.ends(job.job.request_id)

        assert isinstance(outcome, Completed)
        assert "last" in owner.host.loading


async def test_job_of_a_model_that_waits_to_be_loaded_loads_it_first() -> None:
    last = echo("last", load_us=60_000_000)
    async with hosted(echo(load_us=100_000), last, echo("third"), loaded=False) as owner:
        job = handoff(1, "now", model="third")
        owner.host.submit([job])

        assert isinstance(await owner.ends(job.job.request_id), Completed)
        assert "last" in owner.host.loading


async def test_hanging_process_is_killed() -> None:
    async with hosted(echo(step_limit_s=0.5)) as owner:
        owner.host.submit([handoff(1, "!hang")])

        await owner.until(lambda: owner.crashes)


async def test_long_step_with_keep_alives_is_not_killed() -> None:
    async with hosted(echo(step_limit_s=2)) as owner:
        job = handoff(1, "!long")
        owner.host.submit([job])

        outcome = await owner.ends(job.job.request_id)

    assert isinstance(outcome, Completed)
    assert outcome.usage.gpu_us > 4_000_000
    assert not owner.crashes


def test_time_limit_without_progress_depends_on_the_engine() -> None:
    drawing = ModelSpec("p", "text-to-image", engine="diffusion", checkpoint="x")
    assert registry.step_limit_s(drawing) > registry.step_limit_s(echo())
    assert registry.step_limit_s(echo(step_limit_s=7)) == 7


def _environment_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode()


async def test_engine_process_inherits_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1"}
    secret = {
        "DATABASE_URL": "postgresql://u:p@h/d",
        "REDIS_URL": "redis://:p@h",
        "BLOB_URL": "s3://bucket",
        "STRIPE_API_KEY": "sk_1",
        "GMI_API_KEY": "gmi_1",
        "AWS_SECRET_ACCESS_KEY": "aws_1",
        "HF_TOKEN": "hf_1",
        "TOLLGATE_PEPPER": "pepper_1",
        "EXAMPLE_KEY": "of an upstream",
        "PGPASSWORD": "pg_1",
    }
    for name, value in (needed | secret).items():
        monkeypatch.setenv(name, value)
    async with hosted(echo()) as owner:
        found = _environment_of(owner.host.pid)
        job = handoff(1, "hello")
        owner.host.submit([job])
        await owner.ends(job.job.request_id)

    pairs = dict(pair.split("=", 1) for pair in found.split("\0") if pair)
    assert {name: pairs[name] for name in needed} == needed
    assert pairs["OMP_NUM_THREADS"] == "1"
    assert not secret.keys() & pairs.keys()
    assert not [value for value in secret.values() if value in found]


async def test_slow_load_is_not_killed() -> None:
    async with hosted(echo(step_limit_s=0.2, load_us=1_000_000), preload=False) as owner:
        job = handoff(1, "hello")
        owner.host.submit([job])

        outcome = await owner.ends(job.job.request_id)

    assert outcome.timings.load_us >= 1_000_000
    assert not owner.crashes


async def test_engine_that_cannot_be_created_affects_only_its_model() -> None:
    async with hosted(echo("bad", step_us="much"), echo()) as owner:
        job = handoff(1, "hello")
        owner.host.submit([job])

        outcome = await owner.ends(job.job.request_id)

    assert isinstance(outcome, Completed)
    assert owner.host.problems.keys() == {"bad"}


async def test_job_of_an_engine_that_could_not_be_created_fails_alone() -> None:
    async with hosted(echo("bad", step_us="much"), echo()) as owner:
        lost, fine = handoff(1, "hello", model="bad"), handoff(2, "hello")
        owner.host.submit([lost, fine])

        outcome = await owner.ends(lost.job.request_id)
        assert isinstance(await owner.ends(fine.job.request_id), Completed)

    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.worker) == ("model_load_failed", "w1")
    assert not owner.crashes


async def test_failing_engine_fails_its_requests_and_continues() -> None:
    async with hosted(echo()) as owner:
        failing, fine = handoff(1, "!fail"), handoff(2, "fine")
        owner.host.submit([failing])
        outcome = await owner.ends(failing.job.request_id)
        owner.host.submit([fine])

        assert isinstance(await owner.ends(fine.job.request_id), Completed)

    assert isinstance(outcome, Failed)
    assert outcome.code == "engine_error"
    assert "asked" not in outcome.message
    assert not owner.crashes


async def test_abandoned_job_is_not_reported_until_it_is_submitted_again() -> None:
    async with hosted(echo(tokens_per_step=1, step_us=1000)) as owner:
        first, second = handoff(1, "old " * 900, stream=True), handoff(1, "new", stream=True)
        owner.host.submit([first])
        await owner.until(lambda: owner.events)
        owner.events.clear()
        owner.host.abandon(first.job.request_id)
        owner.host.submit([second])

        outcome = await owner.ends(second.job.request_id)

    assert isinstance(outcome, Completed)
    assert outcome.output["choices"][0]["text"] == "new"
    assert owner.events[second.job.request_id] == [
        Tokens(0, "new", 1, finish_reason="stop", usage=used(1))
    ]


async def test_process_runs_one_job_on_its_last_attempt_at_a_time() -> None:
    async with hosted(echo()) as owner:
        poison, suspect = handoff(1, "!crash", attempt=3), handoff(2, "fine", attempt=3)
        newcomer = handoff(3, "fine too")
        owner.host.submit([poison, suspect, newcomer])

        await owner.until(lambda: owner.crashes and owner.host.ready)
        owner.host.submit([suspect, handoff(4, "and me", attempt=3)])
        await owner.until(lambda: len(owner.outcomes) == 2)

    assert owner.crashes == [(suspect.job.request_id,)]


async def test_many_jobs_share_the_process(tmp_path: Path) -> None:
    async with hosted(echo("a"), echo("b")) as owner:
        jobs = [handoff(n, f"text {n}", model="ab"[n % 2]) for n in range(500)]
        owner.host.submit(jobs)

        await owner.until(lambda: len(owner.outcomes) == 500)

    gpu_us = sum(outcome.usage.gpu_us for outcome in owner.outcomes.values())
    assert gpu_us == owner.host.busy_us


def test_engine_process_ends_with_its_agent(tmp_path: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert agent.stdout is not None
    engine_pid = int(agent.stdout.readline())

    agent.kill()
    agent.wait()
    agent.stdout.close()

    deadline = time.monotonic() + 30
    while is_alive(engine_pid):
        assert time.monotonic() < deadline, "the engine process outlived its agent"
        time.sleep(0.02)


_AGENT = """
import asyncio
from tests.workers.test_engine_supervisor import echo, handoff, hosted

async def main():
    async with hosted(echo()) as owner:
        process = owner.host.pid
        owner.host.submit([handoff(1, "!hang")])
        print(process, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().split()[2] != "Z"
