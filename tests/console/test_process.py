"""The console's process: started by the first visit, passed what the gateway receives, replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.console.test_running import enter
from tests.console.visiting import Browser
from tests.databases import Databases
from tests.stack import Stack, alive, not_started, wait_for

COUNT = """
from gateway import metrics

metrics.ACCEPTED.labels("echo").inc(2)
metrics.ACCEPTED.labels("other").inc()
metrics.TTFT_SECONDS.labels("echo").observe(0.3)
metrics.WAITING.set(5)
"""
ADD = """
import sys
from gateway import metrics

metrics.ACCEPTED.labels("echo").inc()
metrics.TTFT_SECONDS.labels("echo").observe(0.1)
metrics.WAITING.set(1)
metrics.add_from(sys.argv[1])
print(metrics.exposition().decode())
"""


@pytest.fixture
def stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    """A gateway without a worker."""
    url = Databases("sqlite", tmp_path, postgres).make()
    home = tmp_path / "home"
    home.mkdir()
    made = not_started(home, url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}")
    made.start_gateway()
    try:
        yield made
    finally:
        made.stop()


def consoles(stack: Stack) -> list[int]:
    """The processes of the console."""
    gateway = stack.processes["gateway"].pid
    lists = Path(f"/proc/{gateway}/task").glob("*/children")
    children = [int(pid) for each in lists for pid in each.read_text().split()]
    return [
        pid
        for pid in children
        if b"--console" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def sockets(pid: int) -> int:
    return sum(
        os.readlink(each).startswith("socket:")
        for each in Path(f"/proc/{pid}/fd").iterdir()
        if each.is_symlink()
    )


@contextmanager
def following(stack: Stack, browser: Browser) -> Iterator[None]:
    """Follow the overview, from the begin of its stream on."""
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    with httpx.stream(
        "GET",
        f"{stack.url}/console/live",
        params={"topics": ["now/UTC"]},
        headers={"Cookie": cookie},
        timeout=30,
    ) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_text()).startswith("retry: 3000")
        yield


def test_first_visit_starts_a_process_that_serves_all_visits(stack: Stack) -> None:
    key = stack.caller()
    assert key.http.get("/v1/models").is_success
    assert consoles(stack) == []

    operator = enter(stack, "operator")
    (console,) = consoles(stack)
    assert os.getpriority(os.PRIO_PROCESS, console) > os.getpriority(
        os.PRIO_PROCESS, stack.processes["gateway"].pid
    )
    page = operator.get("/console/requests?tag=a%3Db%20%2F", **{"Accept-Encoding": "gzip"})
    assert page.status_code == 200
    assert "a=b /" in page.text
    assert operator.send("DELETE", "/console/requests", {}).headers["allow"] == "GET, OPTIONS"
    assert "date" in page.headers
    assert consoles(stack) == [console]


def test_console_sees_the_connection_that_the_gateway_accepted(stack: Stack) -> None:
    operator = enter(stack, "operator")
    forged = '{"scheme": "https", "client": ["203.0.113.9", 1], "server": null}'
    shown = operator.get("/console/sessions", **{"Tollgate-Origin": forged})

    assert shown.status_code == 200
    assert "127.0.0.0/24" in shown.text
    assert "203.0.113" not in shown.text


def test_large_file_goes_through(stack: Stack) -> None:
    caller = stack.caller()
    owner = enter(stack, "owner", account=str(caller.account_id))
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
    content = line * 20_000

    sent = owner.post(
        "/console/files", {"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
    )

    assert sent.status_code == 303, sent.text
    (file,) = caller.http.get("/v1/files").json()["data"]
    assert file["bytes"] == len(content)


def test_stream_ends_with_its_reader(stack: Stack) -> None:
    operator = enter(stack, "operator")
    operator.get("/console")
    (console,) = consoles(stack)

    def follow() -> None:
        with following(stack, operator):
            pass

    follow()
    settled = sockets(console)
    for _ in range(5):
        follow()
    wait_for(lambda: sockets(console) <= settled, "the streams' connections to close")


def test_killed_process_is_replaced_and_the_api_does_not_notice(stack: Stack) -> None:
    operator = enter(stack, "operator")
    caller = stack.caller()
    (console,) = consoles(stack)
    os.kill(console, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        # On the connection to the process that the visits before have used.
        waiting = pool.submit(operator.get, "/console")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        assert caller.http.get("/v1/models").is_success
        os.kill(console, signal.SIGKILL)
        answer = waiting.result(timeout=10)
    assert answer.status_code == 503
    assert "Look at what has changed before you repeat" in answer.text
    assert answer.headers["retry-after"] == "2"

    wait_for(lambda: not alive(console), "the process to end")
    assert caller.http.get("/v1/models").is_success
    wait_for(lambda: operator.get("/console").status_code == 200, "a new process")
    assert consoles(stack) not in ([], [console])


def test_gateway_ends_with_its_console_while_somebody_follows(stack: Stack) -> None:
    operator = enter(stack, "operator")
    (console,) = consoles(stack)
    with following(stack, operator):
        gateway = stack.processes["gateway"]
        gateway.terminate()
        gateway.wait(timeout=20)
    assert not alive(console)
    assert "ERROR" not in (stack.directory / "gateway.log").read_text()


def test_killed_gateway_takes_its_console_along(stack: Stack) -> None:
    enter(stack, "operator")
    (console,) = consoles(stack)
    stack.kill("gateway")
    wait_for(lambda: not alive(console), "the console's process to end")


def test_counters_of_both_processes_are_added(tmp_path: Path) -> None:
    shared = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COUNT], env=shared, check=True)

    found = subprocess.run(
        [sys.executable, "-c", ADD, str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout.splitlines()

    assert 'tollgate_requests_accepted_total{model="echo"} 3.0' in found
    assert 'tollgate_requests_accepted_total{model="other"} 1.0' in found
    assert 'tollgate_ttft_seconds_count{model="echo"} 2.0' in found
    assert 'tollgate_ttft_seconds_bucket{le="0.1",model="echo"} 1.0' in found
    assert 'tollgate_ttft_seconds_bucket{le="0.5",model="echo"} 2.0' in found
    assert [each for each in found if each.startswith("tollgate_clients_waiting")] == [
        "tollgate_clients_waiting 1.0"
    ]
    assert sum(each.startswith("# TYPE tollgate_requests_accepted_total") for each in found) == 1
