"""The table of failures: whatever crashes, each accepted request is charged once or released.

Real processes, ``kill -9``, then the same questions each time: did every request end, do the books
agree, is nothing held, is nobody left over.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import tempfile
import time
from decimal import Decimal
from pathlib import Path

import httpx
import pytest
import redis

from gateway.up.queue_server import arguments as queue_arguments
from tests.databases import Databases, own_postgres
from tests.servers import binary
from tests.stack import Caller, Stack, alive, chat, ended, order, running, wait_for

WORDS = "word " * 30
COST = Decimal("0.000003")
"""Thirty words in and thirty out."""


def test_jobs_of_a_crashed_engine_run_again(stack: Stack) -> None:
    caller = stack.caller()
    placed = [order(caller, "slow", WORDS) for _ in range(3)]
    wait_for(lambda: running_now(caller, placed) > 0, "a job to run")

    killed = stack.kill_engine()

    assert [ended(caller, request_id)["status"] for request_id in placed] == ["succeeded"] * 3
    all_is_well(stack, caller, charged=3)
    assert stack.engine_pid() != killed


def test_stream_resumes_where_it_stopped_after_an_engine_crash(stack: Stack) -> None:
    caller = stack.caller()
    words = " ".join(f"w{number}" for number in range(40))
    text = ""
    killed = False

    body = chat("slow", words, stream=True)
    with caller.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in httpx.Response(200, text=line[6:]).json()["choices"]:
                    text += choice["delta"].get("content") or ""
            if not killed and text.count(" ") > 5:
                stack.kill_engine()
                killed = True

    assert killed
    assert text == words
    all_is_well(stack, caller, charged=1, cost=Decimal("0.000004"))


def test_job_that_crashes_three_engines_is_dead_lettered_and_free(stack: Stack) -> None:
    caller = stack.caller()

    found = ended(caller, order(caller, "echo", "!crash"))

    assert found["status"] == "failed"
    assert found["error"]["code"] == "worker_lost"
    all_is_well(stack, caller, charged=0)
    assert ended(caller, order(caller, "echo", "hello"))["status"] == "succeeded"


def test_hanging_engine_is_killed(stack: Stack) -> None:
    caller = stack.caller()

    found = ended(caller, order(caller, "echo", "!hang"))

    assert found["status"] == "failed"
    all_is_well(stack, caller, charged=0)


def test_another_worker_runs_the_jobs_of_a_crashed_one(stack: Stack) -> None:
    caller = stack.caller()
    placed = [order(caller, "slow", WORDS) for _ in range(3)]
    wait_for(lambda: running_now(caller, placed) > 0, "a job to run")
    engine = stack.engine_pid()

    stack.kill("worker")
    stack.start_worker()

    assert [ended(caller, request_id)["status"] for request_id in placed] == ["succeeded"] * 3
    all_is_well(stack, caller, charged=3)
    assert not alive(engine), "the engine process outlived its agent"


def test_stopped_worker_finishes_its_running_jobs(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "slow", WORDS)
    wait_for(lambda: running_now(caller, [request_id]) > 0, "the job to run")

    stack.processes["worker"].terminate()

    assert stack.processes["worker"].wait(timeout=30) == 0
    assert ended(caller, request_id)["status"] == "succeeded"
    all_is_well(stack, caller, charged=1)


def test_requests_survive_a_gateway_crash(stack: Stack) -> None:
    caller = stack.caller()
    placed = [order(caller, "slow", WORDS) for _ in range(3)]
    wait_for(lambda: running_now(caller, placed) > 0, "a job to run")

    stack.kill("gateway")
    time.sleep(2.5)
    stack.start_gateway()

    assert [ended(caller, request_id)["status"] for request_id in placed] == ["succeeded"] * 3
    all_is_well(stack, caller, charged=3)


def test_gateway_crash_during_submissions_charges_each_once(stack: Stack) -> None:
    caller = stack.caller()
    accepted: list[str] = []

    def place(number: int) -> None:
        with contextlib.suppress(httpx.HTTPError):
            body = {"model": "echo", "input": {"messages": [{"role": "user", "content": "a b"}]}}
            answer = caller.http.post(
                "/v1/requests", json=body, headers={"Idempotency-Key": f"order {number}"}
            )
            if answer.status_code == 202:
                accepted.append(answer.json()["id"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        placing = [pool.submit(place, number) for number in range(300)]
        time.sleep(0.4)
        stack.kill("gateway")
        for future in placing:
            future.result()
    stack.start_gateway()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(place, range(300)))

    for request_id in set(accepted):
        assert ended(caller, request_id)["status"] == "succeeded"
    wait_for(lambda: stack.held(caller) == 0, "every hold to end")
    all_is_well(stack, caller, charged=300, cost=Decimal("0.0000002"))


def test_requests_survive_a_wiped_queue(stack: Stack) -> None:
    caller = stack.caller()
    placed = [order(caller, "slow", WORDS) for _ in range(6)]
    wait_for(lambda: running_now(caller, placed) > 0, "a job to run")

    server = redis.Redis.from_url(stack.redis_url)
    server.flushall()
    server.close()

    assert [ended(caller, request_id)["status"] for request_id in placed] == ["succeeded"] * 6
    all_is_well(stack, caller, charged=6)


def test_unresponsive_queue_refuses_requests_before_a_hold(stack: Stack) -> None:
    caller = stack.caller()
    server = redis.Redis.from_url(stack.redis_url)
    server.execute_command("CLIENT", "PAUSE", 8000, "ALL")
    server.close()
    time.sleep(4)

    answer = caller.http.post("/v1/chat/completions", json=chat("echo", "hello"))

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "queue_unavailable"
    assert "retry-after" in answer.headers
    assert stack.held(caller) == 0
    wait_for(
        lambda: caller.http.post("/v1/chat/completions", json=chat("echo", "hi")).is_success,
        "the queue to answer again",
    )
    all_is_well(stack, caller)


def running_now(caller: Caller, placed: list[str]) -> int:
    states = [
        caller.http.get(f"/v1/requests/{request_id}").json()["status"] for request_id in placed
    ]
    return states.count("running")


def all_is_well(
    stack: Stack, caller: Caller, *, charged: int | None = None, cost: Decimal = COST
) -> None:
    """Nothing is held or leased, the books agree, and the bill is right to the last digit."""
    assert stack.held(caller) == 0
    assert stack.findings() == []
    if charged is not None:
        usage = caller.http.get("/v1/usage").json()["total"]
        assert usage["charged_requests"] == charged
        assert Decimal(usage["cost"]) == charged * cost
    server = redis.Redis.from_url(stack.redis_url)
    for model in ("echo", "slow"):
        wait_for(
            lambda name=model: server.zcard(f"{stack.namespace}:{{{name}}}:leases") == 0,
            "the leases to end",
        )
    server.close()


@pytest.mark.parametrize(
    "point",
    [
        "after_hold",
        pytest.param("after_enqueue", marks=pytest.mark.long),
        "before_settle",
        pytest.param("after_settle", marks=pytest.mark.long),
    ],
)
def test_request_survives_a_gateway_crash_at_each_failpoint(point: str, stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(failpoint=point)
    body = {"model": "echo", "input": {"messages": [{"role": "user", "content": WORDS}]}}
    with contextlib.suppress(httpx.HTTPError):
        caller.http.post("/v1/requests", json=body)
    stack.processes.pop("gateway").wait(timeout=20)

    stack.start_gateway()

    def settled() -> bool:
        page = caller.http.get("/v1/requests").json()["data"]
        return [found["status"] for found in page] == ["succeeded"]

    wait_for(settled, "the request to be settled")
    all_is_well(stack, caller, charged=1)


def test_requests_survive_a_restart_of_the_queue_server(tmp_path: Path, postgres: str) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        command = queue_arguments(
            str(binary("valkey")), home=Path(directory), socket=Path(directory) / "s"
        )
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        queue = f"unix://{directory}/s"
        wait_for(lambda: (Path(directory) / "s").exists(), "the queue server")
        try:
            with running(tmp_path / "home", url, queue, namespace="gq") as stack:
                caller = stack.caller()
                placed = [order(caller, "slow", WORDS) for _ in range(6)]
                wait_for(lambda: running_now(caller, placed) > 0, "a job to run")

                server.kill()
                server.wait()
                time.sleep(1)
                server = subprocess.Popen(command, stdout=subprocess.DEVNULL)

                states = [ended(caller, request_id)["status"] for request_id in placed]
                assert states == ["succeeded"] * 6
                all_is_well(stack, caller, charged=6)
        finally:
            server.kill()
            server.wait()


def test_requests_survive_a_restart_of_postgres(tmp_path: Path, valkey: str) -> None:
    with (
        own_postgres() as (server, url),
        running(tmp_path / "home", url, valkey, namespace=f"t{os.getpid()}") as stack,
    ):
        caller = stack.caller()
        placed = [order(caller, "slow", WORDS) for _ in range(3)]
        wait_for(lambda: running_now(caller, placed) > 0, "a job to run")

        server.stop()
        refused = caller.http.post("/v1/requests", json=chat_order("echo", "x"))
        time.sleep(3)
        server.start()

        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "database_unavailable"
        assert [ended(caller, request_id)["status"] for request_id in placed] == ["succeeded"] * 3
        all_is_well(stack, caller, charged=3)


def chat_order(model: str, content: str) -> dict[str, object]:
    return {"model": model, "input": {"messages": [{"role": "user", "content": content}]}}
