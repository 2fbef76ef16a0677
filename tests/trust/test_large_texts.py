"""Inputs and outputs that are too large for the queue and for SQL go through the blob store.

An answer is never lost for its size, and nothing of an input stays once its request has ended.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import func, select

from gateway.sql.database import Database
from gateway.tables.core import holds, outputs
from gateway.tables.files import media
from tests.databases import Databases
from tests.failures.conftest import mended
from tests.servers import queue_server
from tests.stack import Caller, Stack, chat, ended, order, running, wait_for
from tests.workers.llm.checkpoints import make_checkpoint

SECRET = "xyzzy-of-this-test"
LARGE = """\
  - name: agent
    task: text-generation
    engine: echo
    options: {tokens_per_step: 1, step_us: 100000}
    limits: {context_tokens: 1000000, output_tokens: 400000, choices: 8}
    price: *price
  - name: wide
    task: text-generation
    engine: echo
    options: {}
    limits: {context_tokens: 1000000, output_tokens: 400000, choices: 8}
    price: *price
"""
TINY = """\
  - name: tiny
    task: text-generation
    engine: llm
    checkpoint: %s
    options: {slots: 8, threads: 1}
    limits: {context_tokens: 4096, output_tokens: 512, choices: 8}
    price: *price
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("large")
    url = Databases("sqlite", directory, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    with (
        queue_server("valkey") as queue,
        running(directory / "home", url, queue, namespace=name, more_models=LARGE) as made,
    ):
        yield made


@pytest.fixture
def text_stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    """With a language model, which has log probabilities."""
    url = Databases("sqlite", tmp_path, postgres).make()
    more = TINY % make_checkpoint("qwen3", tmp_path / "tiny")
    name = f"t{uuid.uuid4().hex[:8]}"
    with running(
        tmp_path / "home", url, valkey, namespace=name, more_models=more, patience_s=100
    ) as made:
        yield made


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    for made in mended(shared):
        made.wait_for_model("agent")
        yield made


def coding_agent(model: str, **more: Any) -> dict[str, Any]:
    """The first request of a coding agent: 300 KiB of messages and forty tools."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": "Reads a file and says what is in it. " * 20,
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }
        for number in range(40)
    ]
    body = chat(model, " ".join(f"step{number}" for number in range(40)), tools=tools, **more)
    body["messages"].insert(0, {"role": "system", "content": f"{SECRET} " + "context " * 38_000})
    assert 300 * 1024 < len(json.dumps(body)) < 400 * 1024
    return body


def rows(stack: Stack) -> tuple[int, int]:
    """The largest job and the largest output in SQL."""
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            job = connection.execute(select(func.max(func.length(holds.c.job)))).scalar()
            output = connection.execute(select(func.max(func.length(outputs.c.body)))).scalar()
            return job or 0, output or 0
    finally:
        database.engine.dispose()


def answered_for(stack: Stack, request_id: str) -> bool:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            query = select(media.c.request_id).where(media.c.request_id == request_id)
            return connection.execute(query).first() is not None
    finally:
        database.engine.dispose()


def stored(stack: Stack, request_id: str) -> list[Path]:
    # Directories can be deleted meanwhile, which os.walk passes over.
    found = (
        Path(directory, name)
        for directory, _, names in os.walk(stack.directory / "blobs")
        for name in names
    )
    return [file for file in found if request_id in str(file)]


def all_agrees(stack: Stack, caller: Caller) -> None:
    wait_for(lambda: stack.held(caller) == 0, "the hold to go")
    assert stack.findings() == []


def test_first_request_of_a_coding_agent_is_answered(stack: Stack) -> None:
    caller = stack.caller()

    answer = caller.http.post("/v1/chat/completions", json=coding_agent("wide"))

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].endswith("step39")
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: not stored(stack, request_id), "its input to be deleted")
    wait_for(lambda: not answered_for(stack, request_id), "its row to go")
    all_agrees(stack, caller)


def test_large_input_survives_worker_gateway_and_queue(stack: Stack) -> None:
    caller = stack.caller()
    given = coding_agent("agent")
    input = {"messages": given["messages"], "tools": given["tools"]}
    placed = caller.http.post("/v1/requests", json={"model": "agent", "input": input})
    assert placed.status_code == 202, placed.text
    request_id = placed.json()["id"]
    wait_for(
        lambda: caller.http.get(f"/v1/requests/{request_id}").json()["status"] == "running",
        "it to run",
    )
    job, _ = rows(stack)
    assert job < 64 * 1024
    assert [file.name for file in stored(stack, request_id)] == ["0"]

    stack.kill("worker")
    stack.kill("gateway")
    with redis.Redis.from_url(stack.redis_url) as server:
        server.flushall()
    stack.start_worker()
    stack.start_gateway()
    found = ended(caller, request_id)

    assert found["status"] == "succeeded"
    assert found["output"]["choices"][0]["text"].endswith("step39")
    wait_for(lambda: not stored(stack, request_id), "its input to be deleted")
    all_agrees(stack, caller)


def test_nothing_of_a_large_input_is_left_in_clear_text_after_its_request(stack: Stack) -> None:
    caller = stack.caller()
    request_id = caller.http.post("/v1/chat/completions", json=coding_agent("wide")).headers[
        "x-request-id"
    ]
    wait_for(lambda: not stored(stack, request_id), "its input to be deleted")

    blobs = (stack.directory / "blobs").rglob("*")

    assert not any(SECRET.encode() in file.read_bytes() for file in blobs if file.is_file())


def test_refused_large_input_leaves_nothing(stack: Stack) -> None:
    caller = stack.caller(credit="0.000001")

    answer = caller.http.post("/v1/chat/completions", json=coding_agent("agent"))

    assert answer.status_code == 402
    assert not [
        file
        for file in (stack.directory / "blobs" / str(caller.account_id)).rglob("*")
        if file.is_file()
    ]


def test_cancelled_large_input_is_deleted(stack: Stack) -> None:
    caller = stack.caller()
    given = coding_agent("agent")
    placed = {"model": "agent", "input": {"messages": given["messages"]}}
    request_id = caller.http.post("/v1/requests", json=placed).json()["id"]
    assert stored(stack, request_id)

    caller.http.post(f"/v1/requests/{request_id}/cancel")

    assert ended(caller, request_id)["status"] == "cancelled"
    wait_for(lambda: not stored(stack, request_id), "its input to be deleted")


def test_input_beyond_its_bound_is_refused_with_the_bound(stack: Stack) -> None:
    caller = stack.caller()

    answer = caller.http.post("/v1/chat/completions", json=chat("wide", "x" * (9 * 1024 * 1024)))

    assert answer.status_code == 413
    assert str(8 * 1024 * 1024) in answer.json()["error"]["message"]


def test_answer_is_not_lost_for_its_size(stack: Stack) -> None:
    caller = stack.caller()
    words = " ".join(f"word{number}" for number in range(150_000))

    answer = caller.http.post("/v1/chat/completions", json=chat("wide", words))

    assert answer.status_code == 200, answer.text[:500]
    assert answer.json()["choices"][0]["message"]["content"] == words
    request_id = answer.headers["x-request-id"]
    found = ended(caller, request_id)
    assert found["output"]["choices"][0]["text"] == words
    _, largest = rows(stack)
    assert largest < 70 * 1024
    listed = caller.http.get("/v1/requests").json()["data"][0]
    assert listed["output"]["omitted"]
    assert listed["output"]["bytes"] > len(words)
    all_agrees(stack, caller)


def test_large_answer_is_deleted_with_its_request(stack: Stack) -> None:
    caller = stack.caller()
    words = " ".join(f"word{number}" for number in range(20_000))
    body = {"model": "wide", "input": words, "store": False}

    answer = caller.http.post("/v1/responses", json=body)

    assert answer.json()["output"][0]["content"][0]["text"] == words
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: not stored(stack, request_id), "the output to be deleted")


def test_stream_with_all_log_probabilities_is_charged_for_all_of_it(text_stack: Stack) -> None:
    """Its outcome was more than a megabyte, and so failed for nothing."""
    stack = text_stack
    caller = stack.caller()
    body = chat(
        "tiny",
        "Tell me everything about prices.",
        stream=True,
        stream_options={"include_usage": True},
        n=8,
        max_tokens=400,
        logprobs=True,
        top_logprobs=20,
    )
    usage, finishes, error = None, set(), None
    with caller.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                error = chunk.get("error", error)
                usage = chunk.get("usage") or usage
                finishes |= {choice["finish_reason"] for choice in chunk.get("choices", ())}

    assert error is None
    assert finishes - {None} <= {"length", "stop"}
    assert usage is not None
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert (receipt["status"], receipt["outcome"]) == ("succeeded", "charged")
    assert receipt["usage"]["output_tokens"] == usage["completion_tokens"] > 0
    found = ended(caller, request_id)
    assert len(found["output"]["choices"]) == 8
    all_agrees(stack, caller)


def test_more_log_probabilities_than_memory_allows_are_refused_by_name(stack: Stack) -> None:
    caller = stack.caller()
    body = chat("wide", "hello", n=8, max_tokens=300_000, logprobs=True, top_logprobs=20)

    answer = caller.http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "max_tokens"
    most = int(error["message"].split("at most ")[1].split()[0])
    body = chat("wide", "hello", n=8, max_tokens=most, logprobs=True, top_logprobs=20)
    assert caller.http.post("/v1/chat/completions", json=body).status_code == 200


def test_stream_of_a_large_answer_is_complete(stack: Stack) -> None:
    caller = stack.caller()
    words = " ".join(f"word{number}" for number in range(150_000))
    text = ""

    body = chat("wide", words, stream=True)
    with caller.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""

    assert text == words
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert (receipt["outcome"], receipt["usage"]["output_tokens"]) == ("charged", 150_000)
    all_agrees(stack, caller)


def test_small_requests_store_nothing(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "wide", "hello")

    ended(caller, request_id)

    time.sleep(0.2)
    assert not stored(stack, request_id)
    assert not answered_for(stack, request_id)
