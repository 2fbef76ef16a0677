"""A gateway of several processes that share one port, and one process for the console."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cli.test_up import Up, keys
from tests.databases import migrated_file
from tests.stack import alive, free_port, wait_for

REQUESTS = 40


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("processes") / "home"
    started = Up(home, TOLLGATE_PROCESSES="2")
    started.wait()
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGINT)
    started.process.wait(timeout=60)


def chat(up: Up) -> tuple[int, str]:
    response = httpx.post(
        f"http://127.0.0.1:{up.port}/v1/chat/completions",
        headers={"Authorization": f"Bearer {keys(up.home)['TOLLGATE_API_KEY']}"},
        json={"model": "echo", "messages": [{"role": "user", "content": "hi"}]},
        timeout=30,
    )
    return response.status_code, response.json().get("error", "")


def get(up: Up, path: str, key: str) -> httpx.Response:
    return httpx.get(
        f"http://127.0.0.1:{up.port}{path}",
        headers={"Authorization": f"Bearer {keys(up.home)[f'TOLLGATE_{key}_KEY']}"},
        timeout=30,
    )


def metric(up: Up, name: str) -> float:
    text = get(up, "/metrics", "ADMIN").text
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    return sum(float(value) for value in values)


def serving(up: Up, *, console: bool = False) -> list[int]:
    """The processes that serve the API, or those of the console, without their supervisor."""
    found = []
    for pid in up.descendants():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--descriptor" in command and (b"--console" in command) == console:
            found.append(pid)
    return found


def test_every_process_serves_and_metrics_are_summed(up: Up) -> None:
    processes = serving(up)
    assert len(processes) == 2

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: chat(up), range(REQUESTS))) == [(200, "")] * REQUESTS

    for _ in range(8):  # each scrape may reach another process
        assert metric(up, "tollgate_requests_accepted_total") == REQUESTS
        assert metric(up, "tollgate_workers") == 1


def test_processes_share_one_console(up: Up) -> None:
    assert serving(up, console=True) == []

    with ThreadPoolExecutor(8) as pool:
        url = f"http://127.0.0.1:{up.port}/console/enter"
        answers = pool.map(lambda _: httpx.get(url, timeout=60).status_code, range(16))
        assert set(answers) == {200}

    assert len(serving(up, console=True)) == 1


def test_a_killed_process_is_replaced_while_the_others_serve(up: Up) -> None:
    killed, kept = serving(up)
    before = metric(up, "tollgate_requests_accepted_total")
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: not alive(killed), "the process to end")

    assert [chat(up) for _ in range(5)] == [(200, "")] * 5

    wait_for(lambda: len(serving(up)) == 2, "a new process")
    assert kept in serving(up)
    wait_for(
        lambda: metric(up, "tollgate_requests_accepted_total") == before + 5,
        "counters of the killed process to remain",
    )


def test_sighup_reloads_the_catalog_in_every_process(up: Up) -> None:
    catalog = Path(up.environment["TOLLGATE_CATALOG"])
    text = catalog.read_text()
    (supervisor,) = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in serving(up)}

    def prices() -> set[bool]:
        answers = (get(up, "/v1/catalog", "API").text for _ in range(8))
        return {'"0.55"' in answer for answer in answers}

    assert prices() == {False}

    catalog.write_text(text.replace('"0.40"', '"0.55"'))
    os.kill(supervisor, signal.SIGHUP)

    wait_for(lambda: prices() == {True}, "the new price from every process")


def test_sigterm_ends_every_process(home: Path) -> None:
    up = Up(home, TOLLGATE_PROCESSES="2")
    up.wait()
    children = up.descendants()

    up.process.send_signal(signal.SIGTERM)

    assert up.process.wait(timeout=60) == 0
    wait_for(lambda: not any(alive(pid) for pid in children), "every child to end")


def serve(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--processes", "2"],
        env={
            **os.environ,
            "TOLLGATE_HOME": str(home),
            "DATABASE_URL": f"sqlite:///{home}/tollgate.db",
            "REDIS_URL": f"unix://{home}/absent",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def migrated(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    migrated_file(home / "tollgate.db")
    return home


def test_a_port_in_use_is_one_line(up: Up, migrated: Path) -> None:
    refused = serve(migrated, TOLLGATE_PORT=str(up.port))

    assert refused.returncode == 1
    assert "Address already in use" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.long
def test_a_gateway_whose_processes_keep_failing_exits(migrated: Path) -> None:
    ended = serve(
        migrated, TOLLGATE_PORT=str(free_port()), TOLLGATE_CATALOG=str(migrated / "absent.yaml")
    )

    assert ended.returncode == 70
    assert "one of its processes keeps failing" in ended.stderr
