"""A gateway serves or ends: a background loop that fails is restarted, or ends the process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.supervision import EXIT_CODE
from tests.cli.test_up import Up
from tests.databases import Databases
from tests.stack import Stack, chat, ended, not_started, order, wait_for

OTHERS = ("watch", "workflows", "sweeper", "webhooks", "prices", "chores", "retention")
LOOPS = ("mailbox", "settler", "batches", *OTHERS)
QUICK = {"TOLLGATE_LOOP_FAILURES_MAX": "2", "TOLLGATE_SHUTDOWN_GRACE_S": "1"}


def make(directory: Path, postgres: str, valkey: str) -> Stack:
    url = Databases("sqlite", directory, postgres).make()
    return not_started(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}")


@pytest.fixture
def stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    made = make(tmp_path, postgres, valkey)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def with_worker(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    made = make(tmp_path_factory.mktemp("loops"), postgres, valkey)
    made.start_worker()
    yield made
    made.stop()


@pytest.fixture
def at_work(with_worker: Stack) -> Iterator[Stack]:
    """A worker, and no gateway yet."""
    yield with_worker
    with_worker.kill("gateway")
    with_worker.close_clients()


def live(stack: Stack) -> httpx.Response | None:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{stack.url}/health/live", timeout=5)
    return None


def failures(stack: Stack, loop: str) -> float:
    name = f'tollgate_loop_failures_total{{loop="{loop}"}} '
    lines = httpx.get(f"{stack.url}/metrics", timeout=5).text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_failed_loops_run_again(at_work: Stack) -> None:
    at_work.start_gateway(environment={"TOLLGATE_FAILPOINT": f"falter:{','.join(LOOPS)}:1"})
    for loop in LOOPS:
        wait_for(lambda loop=loop: failures(at_work, loop) == 1, f"{loop} to fail")
    caller = at_work.caller()
    at_work.wait_for_model()

    assert ended(caller, order(caller, "echo", "hello"))["status"] == "succeeded"

    answer = live(at_work)
    assert answer is not None
    assert answer.status_code == 200
    log = (at_work.directory / "gateway.log").read_text()
    for loop in LOOPS:
        assert f"a test broke the loop {loop}" in log, "no traceback in the log"


@pytest.mark.parametrize(
    "loop",
    [
        "mailbox",
        "settler",
        "batches",
        *(pytest.param(loop, marks=pytest.mark.long) for loop in OTHERS),
    ],
)
def test_repeatedly_failing_loop_ends_the_process(stack: Stack, loop: str) -> None:
    with contextlib.suppress(AssertionError):
        stack.start_gateway(environment={**QUICK, "TOLLGATE_FAILPOINT": f"falter:{loop}"})

    assert stack.processes["gateway"].wait(timeout=30) == EXIT_CODE
    stack.processes.pop("gateway")


def test_a_loop_that_hangs_makes_the_gateway_not_live_and_then_ends_it(stack: Stack) -> None:
    stack.start_gateway(
        environment={
            **QUICK,
            "TOLLGATE_FAILPOINT": "hang:sweeper",
            "TOLLGATE_LOOP_SILENCE_MAX_S": "6",
        }
    )
    seen: list[httpx.Response] = []

    def not_live() -> bool:
        answer = live(stack)
        if answer is not None and answer.status_code == 503:
            seen.append(answer)
        return bool(seen)

    wait_for(not_live, "the gateway not to be live")

    assert "sweeper" in seen[0].json()["late_loops"]
    assert stack.processes["gateway"].wait(timeout=30) == EXIT_CODE
    stack.processes.pop("gateway")


def test_stopped_gateway_answers_waiting_clients(at_work: Stack) -> None:
    at_work.start_gateway(environment=QUICK)
    at_work.wait_for_model("slow")
    caller = at_work.caller()
    body = chat("slow", " ".join(f"w{number}" for number in range(200)))

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(caller.http.post, "/v1/chat/completions", json=body)
        wait_for(lambda: at_work.held(caller) > 0, "the request to be accepted")
        at_work.processes["gateway"].terminate()
        refused = answer.result(timeout=30)

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "gateway_stopping"
    assert refused.headers["retry-after"] == "1"


def test_up_starts_a_gateway_again_that_ended_itself(tmp_path: Path) -> None:
    up = Up(tmp_path / "home", TOLLGATE_FAILPOINT="falter:prices", **QUICK)
    try:
        wait_for(
            lambda: f"gateway exited with {EXIT_CODE}; restarting it" in up.said.read_text(),
            "the gateway to be started again",
            patience_s=60,
        )
    finally:
        up.process.terminate()
        up.process.wait(timeout=60)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        pytest.param("gateway", b"\0serve\0", marks=pytest.mark.long),
        pytest.param("queue server", b"unixsocket", marks=pytest.mark.long),
    ],
)
def test_up_restarts_a_child_that_does_not_answer(tmp_path: Path, name: str, word: bytes) -> None:
    up = Up(tmp_path / "home")
    try:
        up.wait()
        child = next(
            pid for pid in up.descendants() if word in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(child, 19)  # SIGSTOP: the port is open, and nothing answers
        wait_for(
            lambda: f"{name} does not answer; restarting it" in up.said.read_text(),
            f"the {name} to be given up",
            patience_s=60,
        )

        def is_ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{up.port}/health/ready", timeout=2).is_success
            return False

        wait_for(is_ready, f"another {name}", patience_s=60)
    finally:
        up.process.terminate()
        up.process.wait(timeout=60)
