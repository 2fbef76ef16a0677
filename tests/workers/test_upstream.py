"""Upstream models against a real HTTP server: through the host alone, then through a worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.workers import hosting
from tests.workers.running import PATIENCE_S, Gateway
from tests.workers.upstreams import Exchange, Upstream, refuse_busily, upstream
from workers.contract.jobs import (
    BlobRef,
    Cancelled,
    Choice,
    Completed,
    Job,
    RequestId,
    TokenLogprob,
    Tokens,
    Usage,
)
from workers.contract.models import ModelSpec, UpstreamSpec
from workers.protocol.ipc import JobHandoff
from workers.runtime.step_times import Stopwatch
from workers.upstreams.openai import ChatCall, OpenAI

Answer = Callable[[Exchange], Awaitable[None]]
ID = RequestId(f"req_{1:032x}")


class Caller(hosting.Caller):
    def __init__(self, service: Upstream, options: dict[str, Any], **spec: Any) -> None:
        entry = {"url": service.url, "credential": "SERVICE_KEY", "model": "their-name"} | spec
        super().__init__(
            ModelSpec("ours", "text-generation", options=options, upstream=UpstreamSpec(**entry)),
            {"SERVICE_KEY": "sk-secret"},
        )

    def submit(
        self,
        text: str = "one two three",
        *,
        stream: bool = True,
        deadline_ms: int = 0,
        **chat: Any,
    ) -> None:
        message = {"role": "user", "content": text}
        job = Job(
            ID,
            "acc",
            "ours",
            "text-generation",
            {"messages": [message], "max_tokens": 64} | chat,
            stream=stream,
            deadline_ms=deadline_ms,
        )
        self.host.submit([JobHandoff(job, queue_us=7, leased_us=time.monotonic_ns() // 1000)])


@contextlib.asynccontextmanager
async def calling(
    answer: Answer | None = None, options: dict[str, Any] | None = None, **spec: Any
) -> AsyncIterator[tuple[Caller, Upstream]]:
    async with upstream() as service:
        if answer is not None:
            service.answer = answer
        caller = Caller(service, options or {}, **spec)
        async with hosting.running(caller):
            yield caller, service


async def test_chat_is_streamed_with_usage() -> None:
    async with calling() as (caller, service):
        caller.submit(seed=11, temperature=0.5, stop=["END"])

        outcome = await caller.ends()

    (request,) = service.requests
    assert request.head.startswith("POST /v1/chat/completions ")
    assert "authorization: bearer sk-secret" in request.head.lower()
    assert request.body == {
        "model": "their-name",
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": 64,
        "seed": 11,
        "temperature": 0.5,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert isinstance(outcome, Completed)
    assert outcome.output == {"choices": [Choice(0, "one two three ", "stop")]}
    assert outcome.usage == Usage(
        requests=1, input_tokens=6, cached_input_tokens=4, output_tokens=3
    )
    assert outcome.worker == "w1"
    assert outcome.timings.queue_us == 7
    assert outcome.timings.forward_us > 0
    assert outcome.timings.first_token_us > 7
    assert outcome.timings.tokens == 3
    said = [event for event in caller.events if isinstance(event, Tokens)]
    assert "".join(event.text for event in said) == "one two three "
    assert said[-1].finish_reason == "stop"


async def test_request_that_is_not_streamed_sends_no_events() -> None:
    async with calling() as (caller, _):
        caller.submit(stream=False)

        assert isinstance(await caller.ends(), Completed)

    assert caller.events == []


async def test_entry_can_disable_streaming_and_omit_fields() -> None:
    async def answer(exchange: Exchange) -> None:
        message = {"role": "assistant", "content": "hello there"}
        await exchange.send(
            "200 OK",
            {
                "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 2},
            },
        )

    options = {
        "stream": False,
        "omit": ["seed"],
        "max_tokens_field": "max_completion_tokens",
    }
    async with calling(answer, options) as (caller, service):
        caller.submit()

        outcome = await caller.ends()

    assert service.requests[0].body.keys() == {"model", "messages", "max_completion_tokens"}
    assert isinstance(outcome, Completed)
    assert outcome.output == {"choices": [Choice(0, "hello there", "length")]}
    assert outcome.usage == Usage(requests=1, input_tokens=5, output_tokens=2)
    assert outcome.timings.tokens == 2


async def test_choices_and_their_logprobs_are_kept_apart() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for index in (1, 0):
            token = {
                "token": "ab"[index],
                "logprob": -0.5,
                "top_logprobs": [{"token": "c", "logprob": -1.0}],
            }
            await exchange.delta("ab"[index], index=index, logprobs={"content": [token]})
            await exchange.delta(index=index, finish_reason="tool_calls")
        await exchange.usage(5, 2)
        await exchange.end()

    async with calling(answer) as (caller, service):
        caller.submit(n=2, logprobs=True, top_logprobs=1)

        outcome = await caller.ends()

    assert service.requests[0].body["top_logprobs"] == 1
    assert isinstance(outcome, Completed)
    assert outcome.output == {
        "choices": [
            Choice(index, text, "stop", (TokenLogprob(text, -0.5, (("c", -1.0),)),))
            for index, text in enumerate("ab")
        ]
    }


async def test_connections_are_reused() -> None:
    async with calling() as (caller, service):
        for _ in range(3):
            caller.outcomes.clear()
            caller.submit()
            await caller.ends()

    assert service.connections == 1


async def test_ended_call_is_freed_without_a_garbage_collection() -> None:
    async with calling() as (caller, _):
        gc.collect()  # what earlier tests left
        gc.disable()
        try:
            for _ in range(2):
                caller.outcomes.clear()
                caller.submit()
                await caller.ends()
            await asyncio.sleep(0.05)
            alive = [one for one in gc.get_objects() if type(one) in (ChatCall, Stopwatch)]
        finally:
            gc.enable()

    assert alive == []


async def test_response_that_no_request_asked_for_is_given_to_no_request() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send("200 OK", _whole(f"answer {len(service.requests)}"))
        if len(service.requests) == 1:
            await exchange.send("200 OK", _whole("of another"))

    texts = []
    async with calling(answer, {"stream": False}) as (caller, service):
        for _ in range(2):
            caller.outcomes.clear()
            caller.submit()
            outcome = await caller.ends()
            assert isinstance(outcome, Completed)
            texts.append(outcome.output["choices"][0].text)
            await asyncio.sleep(0.05)

    assert texts == ["answer 1", "answer 2"]


async def test_cancellation_closes_the_connection_and_keeps_delivered_text() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        while True:
            await exchange.delta("word ")
            await asyncio.sleep(0.01)

    async with calling(answer) as (caller, service):
        caller.submit("a message of 24 letters!")
        await caller.until(lambda: len(caller.events) > 3)

        caller.host.cancel(ID, "client")
        outcome = await caller.ends()
        await service.until_hung_up()

    assert isinstance(outcome, Cancelled)
    assert outcome.reason == "client"
    assert outcome.delivered
    assert outcome.usage == Usage(requests=1, input_tokens=6, output_tokens=len(caller.events))
    assert outcome.output["choices"][0].text == "word " * len(caller.events)


async def test_cancellation_before_the_call_is_free() -> None:
    async with calling() as (caller, service):
        caller.submit()
        caller.host.cancel(ID, "client")

        outcome = await caller.ends()

    assert isinstance(outcome, Cancelled)
    assert not outcome.delivered
    assert service.requests == []


async def test_abandoned_call_closes_the_connection_without_a_report() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.delta("word ")
        await asyncio.sleep(PATIENCE_S)

    async with calling(answer) as (caller, service):
        caller.submit()
        await caller.until(lambda: caller.events)
        caller.host.abandon(ID)
        await service.until_hung_up()

    assert caller.outcomes == []


async def test_a_deadline_ends_a_call() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.delta("word ")
        await asyncio.sleep(PATIENCE_S)

    async with calling(answer) as (caller, _):
        caller.submit(deadline_ms=int(time.time() * 1000) + 300)

        outcome = await caller.ends()

    assert isinstance(outcome, Cancelled)
    assert outcome.reason == "deadline"


async def test_busy_upstream_is_retried() -> None:
    async def answer(exchange: Exchange) -> None:
        if len(service.requests) < 3:
            await exchange.send("429 Too Many Requests", {}, Retry_After="0")
        else:
            await exchange.send("200 OK", _whole("at last"))

    async with calling(answer, {"stream": False}) as (caller, service):
        caller.submit()

        assert isinstance(await caller.ends(), Completed)
    assert len(service.requests) == 3


def _whole(text: str) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }


async def test_an_upstream_that_stays_busy_is_unavailable() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.send("503 Service Unavailable", {}, Retry_After="0")

    async with calling(answer) as (caller, service):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == "upstream_unavailable"
    assert len(service.requests) == 3


async def test_interrupted_response_is_not_retried() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.delta("half an ")
        exchange.writer.close()

    async with calling(answer) as (caller, service):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == "upstream_error"
    assert len(service.requests) == 1


async def test_request_that_was_sent_is_never_sent_again() -> None:
    """The upstream may have processed and charged it."""

    async def answer(exchange: Exchange) -> None:
        exchange.writer.close()

    async with calling(answer, {"stream": False}) as (caller, service):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == "upstream_error"
    assert len(service.requests) == 1


async def test_connection_closed_while_idle_fails_no_request() -> None:
    """A request that meets a closed connection is sent on another one."""

    async def answer(exchange: Exchange) -> None:
        if len(service.requests) == 2:
            exchange.writer.close()
        else:
            await exchange.send("200 OK", _whole("fine"))

    async with calling(answer, {"stream": False}) as (caller, service):
        caller.submit()
        assert isinstance(await caller.ends(), Completed)
        caller.outcomes.clear()
        caller.submit()

        assert isinstance(await caller.ends(), Completed)
    assert len(service.requests) == 3


async def test_separate_reasoning_is_passed_on_and_counted() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        for delta in ({"reasoning_content": "Hm, "}, {"reasoning": "six."}, {"content": "6"}):
            await exchange.event(json.dumps({"choices": [{"index": 0, "delta": delta}]}))
        await exchange.delta(finish_reason="stop")
        used = {"prompt_tokens": 3, "completion_tokens": 5}
        details = {"completion_tokens_details": {"reasoning_tokens": 4}}
        await exchange.event(json.dumps({"choices": [], "usage": {**used, **details}}))
        await exchange.end()

    async with calling(answer) as (caller, _):
        caller.submit()
        outcome = await caller.ends()

    assert isinstance(outcome, Completed)
    (choice,) = outcome.output["choices"]
    assert (choice.text, choice.reasoning, choice.reasoning_tokens) == ("6", "Hm, six.", 4)
    tokens = [event for event in caller.events if isinstance(event, Tokens)]
    assert "".join(event.reasoning for event in tokens) == "Hm, six."
    assert sum(event.count for event in tokens) == 3
    assert outcome.usage.output_tokens == 5


async def test_content_filter_is_passed_on_as_finish_reason() -> None:
    async def answer(exchange: Exchange) -> None:
        whole = _whole("I")
        whole["choices"][0]["finish_reason"] = "content_filter"
        await exchange.send("200 OK", whole)

    async with calling(answer, {"stream": False}) as (caller, _):
        caller.submit()
        outcome = await caller.ends()

    assert isinstance(outcome, Completed)
    assert outcome.output["choices"][0].finish_reason == "content_filter"


@pytest.mark.parametrize("prompts", [("eight by",), ((1, 2),)])
async def test_input_of_a_cancelled_completion_is_counted(prompts: tuple[Any, ...]) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(json.dumps({"choices": [{"index": 0, "text": "x"}]}))
        await asyncio.sleep(PATIENCE_S)

    async with calling(answer) as (caller, _):
        caller.submit(messages=(), prompts=prompts)
        await caller.until(lambda: caller.events)
        caller.host.cancel(ID, "client")
        outcome = await caller.ends()

    assert isinstance(outcome, Cancelled)
    assert outcome.usage.input_tokens == 2


async def test_unreachable_upstream_is_unavailable() -> None:
    async with calling(url="http://127.0.0.1:1/v1") as (caller, _):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == "upstream_unavailable"
    assert "127.0.0.1" not in failure.message


@pytest.mark.parametrize("begins", [False, True])
async def test_a_silent_upstream_times_out(begins: bool) -> None:
    async def answer(exchange: Exchange) -> None:
        if begins:
            await exchange.begin()
            await exchange.delta("and then ")
        await asyncio.sleep(PATIENCE_S)

    async with calling(answer, first_byte_timeout_s=0.2, idle_timeout_s=0.2) as (caller, service):
        caller.submit()

        failure = await caller.fails()
        await service.until_hung_up()

    assert failure.code == "upstream_timeout"
    assert len(service.requests) == 1


async def test_refusal_contains_the_reason_without_our_credential() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.refuse("400 Bad Request", "top_k is unknown (key sk-secret)", param="top_k")

    async with calling(answer) as (caller, _):
        caller.submit(top_k=3)

        failure = await caller.fails()

    assert failure.code == "upstream_rejected"
    assert failure.param == "top_k"
    assert "top_k is unknown" in failure.message
    assert "sk-secret" not in failure.message


@pytest.mark.parametrize(
    ("status", "error_code", "code"),
    [
        ("400 Bad Request", "context_length_exceeded", "context_length_exceeded"),
        ("401 Unauthorized", None, "upstream_unavailable"),
        ("404 Not Found", None, "upstream_error"),
        ("500 Internal Server Error", None, "upstream_error"),
        ("307 Temporary Redirect", None, "upstream_error"),
    ],
)
async def test_refusals_have_codes(status: str, error_code: str | None, code: str) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.refuse(status, "no", code=error_code)

    async with calling(answer) as (caller, service):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == code
    assert len(service.requests) == 1


async def test_error_within_a_stream_fails_the_request() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.delta("so far ")
        await exchange.event(json.dumps({"error": {"message": "out of cards", "code": 500}}))
        await exchange.end()

    async with calling(answer) as (caller, _):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == "upstream_error"
    assert "out of cards" in failure.message


@pytest.mark.parametrize(
    "data", [b"data: {broken\n\n", b'data: {"usage": {"prompt_tokens": -1}}\n\n']
)
async def test_malformed_chat_completion_fails_the_request(data: bytes) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.raw(data)
        await exchange.end()

    async with calling(answer) as (caller, _):
        caller.submit()

        assert (await caller.fails()).code == "upstream_error"


async def without_usage(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.delta("one ")
    await exchange.delta("two", finish_reason="stop")
    await exchange.end()


async def test_response_without_usage_fails() -> None:
    async with calling(without_usage) as (caller, _):
        caller.submit()

        failure = await caller.fails()

    assert failure.code == "upstream_error"
    assert "usage" in failure.message


async def test_usage_is_estimated_only_if_the_entry_allows_it() -> None:
    async with calling(without_usage, {"usage": "estimated"}) as (caller, _):
        caller.submit("sixteen letters!")

        outcome = await caller.ends()

    assert isinstance(outcome, Completed)
    assert outcome.usage == Usage(requests=1, input_tokens=4, output_tokens=2)


async def test_picture_that_the_upstream_does_not_count_has_the_tokens_of_the_limit() -> None:
    spec = ModelSpec(
        "ours",
        "text-generation",
        options={"usage": "estimated"},
        limits={"source_tokens": 700},
        upstream=UpstreamSpec("http://localhost"),
    )
    seen: list[Any] = []
    parts = ["sixteen", 0, "letters!!", 1]
    message = {"role": "user", "content": "sixteenletters!!", "parts": parts}
    blobs = tuple(BlobRef(f"{n}", 3, "", "image/png") for n in range(2))
    asked = {"messages": [message], "max_tokens": 64}
    job = Job(ID, "acc", "ours", "text-generation", asked, attachments=blobs)
    client = OpenAI(spec, {})

    call = client.call(job, seen.append, [b"abc", b"def"])

    assert call.partial_result()[0] == Usage(requests=1, input_tokens=4 + 2 * 700)
    content = call._body()["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text", "image_url"]
    assert content[3]["image_url"]["url"] == "data:image/png;base64,ZGVm"
    await client.close()


async def test_pictures_are_sent_again_after_a_refusal_and_then_released() -> None:
    picture = bytes(8_000_000)
    sent: list[str] = []
    go_on = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        (part,) = exchange.body.pop("messages")[0]["content"]
        sent.append(hashlib.sha256(part["image_url"]["url"].encode()).hexdigest())
        del part
        if len(sent) == 1:
            await refuse_busily(exchange)
            return
        await exchange.begin()
        await exchange.delta("a cat")
        await go_on.wait()
        await exchange.delta(finish_reason="stop")
        await exchange.usage(10, 2)
        await exchange.end()

    message = {"role": "user", "content": "", "parts": [0]}
    asked = {"messages": [message], "max_tokens": 64}
    blobs = (BlobRef("1", len(picture), "", "image/png"),)
    job = Job(ID, "acc", "ours", "text-generation", asked, stream=True, attachments=blobs)
    async with calling(answer) as (caller, _):
        tracemalloc.start()
        try:
            caller.host.submit([JobHandoff(job, queue_us=0, leased_us=0, files=(picture,))])
            await caller.until(lambda: caller.events)
            gc.collect()
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        held = [each for each in gc.get_referrers(picture) if isinstance(each, tuple)]
        go_on.set()
        assert isinstance(await caller.ends(), Completed)

    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert held == []
    assert kept_bytes < len(picture) / 2


async def test_endless_response_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.upstreams.openai.RESPONSE_BYTES_MAX", 100_000)

    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        while True:
            await exchange.delta("x" * 10_000)

    async with calling(answer) as (caller, service):
        caller.submit()

        failure = await caller.fails()
        await service.until_hung_up()

    assert failure.code == "output_too_large"


async def test_a_worker_serves_an_upstream_model_and_never_logs_its_key(
    gateway: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway.models = ("theirs",)
    async with upstream() as service:
        entry = {
            "name": "theirs",
            "task": "text-generation",
            "upstream": {"url": service.url, "credential": "SERVICE_KEY"},
        }
        environ = {"SERVICE_KEY": "sk-very-secret"}
        async with gateway.worker(entry, environ=environ, log_level="DEBUG"):
            request_id = await gateway.submit("hello out there", model="theirs", stream=True)
            outcome = await gateway.outcome(request_id)

    assert isinstance(outcome, Completed)
    assert outcome.usage.output_tokens == 3
    said = [event for event in gateway.events_of(request_id) if isinstance(event, Tokens)]
    assert "".join(event.text for event in said) == "hello out there "
    logged = capfd.readouterr().err
    assert "sk-very-secret" not in logged
    assert "out there" not in logged


async def test_cancelled_job_closes_the_connection_to_the_upstream(gateway: Gateway) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.begin()
        while True:
            await exchange.delta("word ")
            await asyncio.sleep(0.01)

    gateway.models = ("theirs",)
    async with upstream() as service:
        service.answer = answer
        entry = {
            "name": "theirs",
            "task": "text-generation",
            "upstream": {"url": service.url},
        }
        async with gateway.worker(entry):
            request_id = await gateway.submit("go on", model="theirs", stream=True)
            await gateway.until(lambda: len(gateway.events.get(request_id, [])) > 3)
            await gateway.queue("theirs").cancel(request_id)
            outcome = await gateway.outcome(request_id)
            await service.until_hung_up()

    assert isinstance(outcome, Cancelled)
    assert outcome.delivered
