"""A silent database or queue server: 503 soon, and nothing is left over.

A dead server refuses connections; a stopped one, or a network in between, accepts them and says
nothing. Clients are answered within ten seconds all the same, streams that run go on, and when it
is over nothing was accepted whose client had gone, and the books agree.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from sqlalchemy.engine import make_url

from tests.blackhole import BlackHole, black_hole
from tests.databases import own_postgres
from tests.failures.test_crashes import all_is_well
from tests.servers import queue_server
from tests.stack import Caller, Stack, chat, ended, order, running, wait_for

SOON_S = 10.0
STREAM = " ".join(f"w{number}" for number in range(300))
"""Fifteen seconds of speech of the model ``slow``."""


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[tuple[Stack, BlackHole]]:
    """A stack whose database is behind a network that can go silent."""
    with own_postgres() as (_, url):
        parsed = make_url(url)
        with (
            black_hole(f"{parsed.query['host']}/.s.PGSQL.5432") as hole,
            queue_server("valkey") as queue,
        ):
            proxied = f"postgresql://postgres@127.0.0.1:{hole.port}/postgres"
            with running(tmp_path / "home", proxied, queue, namespace="away") as stack:
                try:
                    yield stack, hole
                finally:
                    hole.mend()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "lossy", [pytest.param(False, marks=pytest.mark.long), True], ids=["stopped", "cut"]
)
def test_silent_database_is_an_outage_of_ten_seconds_at_most(
    behind: tuple[Stack, BlackHole], lossy: bool
) -> None:
    stack, hole = behind
    caller, other = stack.caller(), stack.caller()
    order_of = {"model": "echo", "input": {"messages": [{"role": "user", "content": "hello"}]}}
    # What is remembered of a key lets an order come as far as its hold.
    assert other.http.post("/v1/chat/completions", json=chat("echo", "hello")).is_success

    def orders() -> list[Callable[[], httpx.Response]]:
        return [
            *[lambda: other.http.post("/v1/chat/completions", json=chat("echo", "hello"))] * 8,
            *[lambda: other.http.post("/v1/requests", json=order_of)] * 4,
            *[lambda: other.http.get("/v1/requests")] * 2,
            lambda: other.http.get("/v1/usage"),
        ]

    with (
        stream(caller) as text,
        concurrent.futures.ThreadPoolExecutor(32) as threads,
    ):
        wait_for(lambda: "w5 " in "".join(text), "the stream to begin")
        # Some transactions are on their way when the network goes silent.
        early = [threads.submit(call) for call in orders()]
        time.sleep(0.05)
        (hole.lose_everything if lossy else hole.go_silent)()
        time.sleep(1.0)
        began, seen = time.monotonic(), len(text)
        answers = [answer.result() for answer in [threads.submit(call) for call in orders()]]
        took = time.monotonic() - began
        assert [answer.status_code for answer in answers] == [503] * len(answers)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert all(answer.json()["error"]["code"] for answer in answers)
        assert took < SOON_S
        assert httpx.get(f"{stack.url}/health/live", timeout=2).is_success
        wait_for(lambda: len(text) > seen, "the stream to go on", patience_s=10)
        hole.mend()
        wait_for(lambda: text[-1] == "[DONE]", "the stream to end", patience_s=60)
    assert "".join(text[:-1]) == STREAM

    ready(stack)
    # Those that were accepted in time have waited for their answer, and have it.
    placed = [answer.result() for answer in early[:12]]
    assert {answer.status_code for answer in placed} <= {200, 202, 503}
    accepted = sum(answer.status_code != 503 for answer in placed)
    wait_for(lambda: not stack.held(other), "everything accepted to end")
    # What was in doubt when the network went silent was taken back, for nothing.
    time.sleep(6.0)
    usage = other.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == accepted + 1
    assert ended(other, order(other, "echo", "hello"))["status"] == "succeeded"
    all_is_well(stack, caller, charged=1, cost=Decimal("0.00003"))


@pytest.mark.timeout(240)
def test_stopped_queue_server_is_an_outage_of_ten_seconds_at_most(stack: Stack) -> None:
    caller, other = stack.caller(), stack.caller()
    client = redis.Redis.from_url(stack.redis_url)
    pid = int(client.info()["process_id"])
    client.close()

    def call() -> httpx.Response:
        return other.http.post("/v1/chat/completions", json=chat("echo", "hello"))

    with stream(caller) as text, concurrent.futures.ThreadPoolExecutor(16) as threads:
        wait_for(lambda: "w5 " in "".join(text), "the stream to begin")
        os.kill(pid, signal.SIGSTOP)
        try:
            # Until the breaker opens, what was held for waits in the sweeper's care.
            time.sleep(4.0)
            began = time.monotonic()
            answers = [answer.result() for answer in [threads.submit(call) for _ in range(16)]]
            took = time.monotonic() - began
            listed = other.http.get("/v1/requests")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [answer.status_code for answer in answers] == [503] * 16
        assert {answer.json()["error"]["code"] for answer in answers} == {"queue_unavailable"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert took < SOON_S
        assert listed.is_success
        wait_for(lambda: text[-1] == "[DONE]", "the stream to end", patience_s=60)
    assert "".join(text[:-1]) == STREAM

    ready(stack)
    assert ended(other, order(other, "echo", "hello"))["status"] == "succeeded"
    usage = other.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == 1
    all_is_well(stack, caller, charged=1, cost=Decimal("0.00003"))


@contextlib.contextmanager
def stream(caller: Caller) -> Iterator[list[str]]:
    """Read a long answer in a thread; the pieces of its text as they come, and ``[DONE]``."""
    text: list[str] = [""]

    def read() -> None:
        body: dict[str, Any] = chat("slow", STREAM, stream=True)
        with caller.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    text.append("[DONE]")
                elif line.startswith("data: {"):
                    choices = httpx.Response(200, text=line[6:]).json()["choices"]
                    text.extend(choice["delta"].get("content") or "" for choice in choices)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        done = thread.submit(read)
        yield text
        done.result(timeout=60)


def ready(stack: Stack) -> None:
    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{stack.url}/health/ready", timeout=5).is_success
        return False

    wait_for(answers, "the gateway to be ready again")
