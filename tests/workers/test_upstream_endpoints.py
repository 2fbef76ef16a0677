"""Several endpoints for one model: the least busy one that is up, or the fallback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.workers.hosting import running
from tests.workers.running import PATIENCE_S
from tests.workers.upstreams import Exchange, Upstream, refuse_busily, upstream
from workers.contract.jobs import Choice, Completed, Failed, Job, RequestId, ToolCall
from workers.contract.models import EndpointSpec, ModelSpec, UpstreamSpec
from workers.protocol.ipc import JobHandoff
from workers.upstreams import endpoints
from workers.upstreams.dialects import obstacle
from workers.upstreams.host import UpstreamHost


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PROBE_MIN_S", 0.05)


class Agent:
    """Replaces the agent, for one model at several endpoints."""

    def __init__(self, spec: UpstreamSpec, environ: dict[str, str] | None = None) -> None:
        self.outcomes: dict[str, Any] = {}
        self.events: list[Any] = []
        self.host = UpstreamHost(
            [ModelSpec("ours", "text-generation", upstream=spec)],
            worker="w1",
            environ=environ or {},
            report=self._hear,
        )

    def _hear(self, events: Any, outcomes: Any) -> None:
        self.events += [event for _, event in events]
        self.outcomes.update(outcomes)

    def submit(self, number: int = 1, **chat: Any) -> RequestId:
        id = RequestId(f"req_{number:032x}")
        message = {"role": "user", "content": "one two"}
        value = {"messages": [message], "max_tokens": 64} | chat
        job = Job(id, "1", "ours", "text-generation", value, stream=True)
        self.host.submit([JobHandoff(job, queue_us=1, leased_us=time.monotonic_ns() // 1000)])
        return id

    async def ask(self, number: int = 1, **chat: Any) -> Any:
        id = self.submit(number, **chat)
        await until(lambda: id in self.outcomes)
        return self.outcomes.pop(id)


async def until(condition: Any) -> None:
    for _ in range(round(PATIENCE_S * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")


@contextlib.asynccontextmanager
async def agent(*services: Upstream, **changes: Any) -> AsyncIterator[Agent]:
    """The first service has tier 0, the others have those of ``tiers``."""
    tiers = changes.pop("tiers", (0,) * len(services))
    weights = changes.pop("weights", (None,) * len(services))
    places = tuple(
        EndpointSpec(service.url, model=f"model-{number}", tier=tier, weight=weight)
        for number, (service, tier, weight) in enumerate(zip(services, tiers, weights, strict=True))
    )
    made = Agent(UpstreamSpec(endpoints=places, **changes))
    async with running(made):
        yield made


async def test_work_goes_to_the_least_busy() -> None:
    free = asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        await free.wait()
        await exchange.begin()
        await exchange.delta("x", finish_reason="stop")
        await exchange.usage(1, 1)
        await exchange.end()

    async with upstream() as first, upstream() as second, agent(first, second) as made:
        first.answer = second.answer = hold
        ids = [made.submit(number) for number in range(1, 7)]
        await until(lambda: len(first.requests) + len(second.requests) == 6)
        free.set()
        await until(lambda: len(made.outcomes) == len(ids))

    assert (len(first.requests), len(second.requests)) == (3, 3)
    served = {outcome.output["served_by"] for outcome in made.outcomes.values()}
    assert served == {"model-0", "model-1"}


async def test_weights_share_the_calls_and_a_job_runs_at_the_same_endpoint_again() -> None:
    async with (
        upstream() as first,
        upstream() as second,
        agent(first, second, weights=(3, 1)) as made,
    ):
        served = []
        for number in [*range(1, 61), *range(1, 61)]:
            outcome = await made.ask(number)
            served.append(outcome.details.served_by)
            assert outcome.output["served_by"] == outcome.details.served_by

    # Which endpoint a job gets depends on its port as well: 20 jobs were once shared 10 to 10.
    assert served[:60] == served[60:]
    assert served[:60].count("model-0") > served[:60].count("model-1") > 0


async def test_weighted_endpoint_that_refuses_is_replaced_by_the_other() -> None:
    async with upstream() as first, upstream() as second:
        first.answer = refuse_busily
        async with agent(first, second, weights=(10_000, 1)) as made:
            outcome = await made.ask()

    assert outcome.details.served_by == "model-1"


async def test_fallback_answers_and_is_named_when_the_first_tier_fails() -> None:
    async with upstream() as first, upstream() as second:
        first.answer = refuse_busily
        async with agent(first, second, tiers=(0, 1)) as made:
            outcome = await made.ask()

    assert isinstance(outcome, Completed)
    assert outcome.output["served_by"] == "model-1"
    assert second.requests[0].body["model"] == "model-1"
    assert len(first.requests) == 1, "not asked again while another can"


async def test_endpoint_that_fails_repeatedly_gets_no_calls_until_it_is_up() -> None:
    async with upstream() as first, upstream() as second:
        first.answer, first.is_well = refuse_busily, False
        async with agent(first, second, tiers=(0, 1)) as made:
            for number in range(1, 6):
                assert isinstance(await made.ask(number), Completed)
            assert len(first.requests) == endpoints.FAILURES_MAX
            assert made.host.down == set()
            down, other = made.host.endpoints

            first.answer, first.is_well = Upstream.answer, True
            seen = len(first.requests)
            for number in range(10, 200):
                outcome = await made.ask(number)
                if len(first.requests) > seen:
                    break
                await asyncio.sleep(0.02)
            up, _ = made.host.endpoints

    assert first.probes >= 1
    assert (down.model, down.host, down.state) == ("ours", f"127.0.0.1:{first.port}", "down")
    assert down.failures == endpoints.FAILURES_MAX
    assert 0 < down.since_ms <= down.until_ms
    assert (other.tier, other.state, other.calls, other.since_ms) == (1, "up", 5, 0)
    assert other.p95_us > 0
    assert (up.state, up.failures, up.since_ms, up.until_ms) == ("up", 0, 0, 0)
    assert isinstance(outcome, Completed)
    assert outcome.output["served_by"] == "model-0"


async def test_with_all_endpoints_down_calls_fail_immediately_and_the_model_is_unavailable() -> (
    None
):
    async with upstream() as only:
        only.answer, only.is_well = refuse_busily, False
        async with agent(only) as made:
            first = await made.ask(1)
            second = await made.ask(2)
            assert made.host.down == {"ours"}

    assert isinstance(first, Failed)
    assert isinstance(second, Failed)
    assert (first.code, second.code) == ("upstream_unavailable",) * 2
    assert len(only.requests) == 3


async def test_busy_endpoint_is_paused_for_its_retry_after() -> None:
    async def busy(exchange: Exchange) -> None:
        body = {"error": {"message": "slow down"}}
        await exchange.send("429 Too Many Requests", body, Retry_After="5")

    async with upstream() as first, upstream() as second:
        first.answer = busy
        async with agent(first, second) as made:
            for number in range(1, 5):
                assert isinstance(await made.ask(number), Completed)

    assert len(first.requests) <= 1
    assert len(second.requests) == 4


async def test_call_with_a_started_response_does_not_fail_over() -> None:
    async def break_off(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.delta("half")
        exchange.writer.close()
        raise ConnectionError

    async with upstream() as first, upstream() as second:
        first.answer = break_off
        async with agent(first, second, tiers=(0, 1)) as made:
            outcome = await made.ask()

    assert isinstance(outcome, Failed)
    assert outcome.code == "upstream_error"
    assert not second.requests


def test_endpoints_without_their_credential_are_left_out() -> None:
    places = (
        EndpointSpec("http://one/v1", credential="ONE_KEY"),
        EndpointSpec("http://two/v1", credential="TWO_KEY"),
    )
    spec = ModelSpec("m", "text-generation", upstream=UpstreamSpec(endpoints=places))

    assert obstacle(spec, {"TWO_KEY": "x"}) is None
    assert obstacle(spec, {}) == "ONE_KEY, TWO_KEY is not set"


async def test_tools_are_sent_and_tool_calls_assembled() -> None:
    async def call(exchange: Exchange) -> None:
        await exchange.begin()
        for piece in (
            {"index": 0, "id": "call_9", "function": {"name": "f", "arguments": '{"a"'}},
            {"index": 0, "function": {"arguments": ": 1}"}},
        ):
            choice = {"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}
            await exchange.event(json.dumps({"choices": [choice]}))
        await exchange.delta(finish_reason="tool_calls")
        await exchange.usage(5, 4)
        await exchange.end()

    tool = {"name": "f", "description": "", "parameters": {"type": "object"}}
    history = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "name": "g", "arguments": "{}"}],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    async with upstream() as service:
        service.answer = call
        async with agent(service) as made:
            outcome = await made.ask(
                messages=history,
                tools=[tool],
                tool_choice="required",
                tool_name="f",
                parallel_tool_calls=False,
            )

    body = service.requests[0].body
    assert body["tools"][0]["function"]["name"] == "f"
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["parallel_tool_calls"] is False
    assert body["messages"][0]["tool_calls"][0]["function"] == {"name": "g", "arguments": "{}"}
    assert body["messages"][1]["tool_call_id"] == "1"
    assert isinstance(outcome, Completed)
    made_call = ToolCall("call_9", "f", '{"a": 1}')
    assert outcome.output["choices"] == [Choice(0, "", "tool_calls", None, (made_call,))]
    assert [event.tool_calls for event in made.events if event.tool_calls] == [(made_call,)]


async def test_texts_are_continued_by_the_completions_dialect() -> None:
    async def complete(exchange: Exchange) -> None:
        await exchange.begin()
        for index, text in enumerate(("one", "two")):
            logprobs = {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [{text: -0.5}]}
            choice = {"index": index, "text": text, "finish_reason": "stop", "logprobs": logprobs}
            await exchange.event(json.dumps({"choices": [choice]}))
        await exchange.usage(5, 2)
        await exchange.end()

    async with upstream() as service:
        service.answer = complete
        async with agent(service) as made:
            outcome = await made.ask(messages=[], prompts=["a", "b"], logprobs=True, top_logprobs=1)

    assert service.requests[0].head.startswith("POST /v1/completions ")
    assert service.requests[0].body["prompt"] == ["a", "b"]
    assert service.requests[0].body["logprobs"] == 1
    assert isinstance(outcome, Completed)
    first, second = outcome.output["choices"]
    assert (first.text, second.text) == ("one", "two")
    assert first.logprobs[0].top == (("one", -0.5),)
