"""``tollgate up`` as a newcomer runs it: ready, one per home, and no child left at its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.up.queue_server import die_with_parent
from tests.cli.here import run_here
from tests.stack import CATALOG, alive, free_port, wait_for


class Up:
    """A running ``tollgate up``; its output is in the file ``said``."""

    def __init__(
        self, home: Path, *, output: int | None = None, price: str = "0.40", **environment: str
    ) -> None:
        home.parent.mkdir(parents=True, exist_ok=True)
        catalog = home.parent / "catalog.yaml"
        catalog.write_text(CATALOG.format(veo=price))
        self.home = home
        self.port = free_port()
        # No queue server on PATH and no URL of one, so that the packaged server is used.
        kept = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "DATABASE_URL")}
        self.environment = {
            **kept,
            "PATH": str(Path(sys.executable).parent),
            "TOLLGATE_HOME": str(home),
            "TOLLGATE_PORT": str(self.port),
            "TOLLGATE_CATALOG": str(catalog),
            **environment,
        }
        self.said = home.parent / "said.txt"
        with open(self.said, "w") as file:
            out = file if output is None else output
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gateway", "up"],
                env=self.environment,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,
            )

    def wait(self) -> None:
        wait_for(
            lambda: "\ncurl " in self.said.read_text() or self.process.poll() is not None,
            "ready",
            patience_s=100,
        )
        assert self.process.poll() is None, self.said.read_text()

    def descendants(self) -> list[int]:
        found = []
        waiting = [self.process.pid]
        while waiting:
            pid = waiting.pop()
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                children = [int(child) for child in task.read_text().split()]
                found += children
                waiting += children
        return found


@contextlib.contextmanager
def ready(home: Path) -> Iterator[Up]:
    started = Up(home)
    started.wait()
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGINT)
    started.process.wait(timeout=60)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """For tests that change nothing."""
    with ready(tmp_path_factory.mktemp("up") / "home") as started:
        yield started


@pytest.fixture
def ending(home: Path) -> Iterator[Up]:
    """For a test that ends it."""
    with ready(home) as started:
        yield started


def keys(home: Path) -> dict[str, str]:
    lines = (home / "first-keys.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_ready_line_and_working_curl_command_are_printed(up: Up) -> None:
    said = up.said.read_text()

    assert f"\nready http://127.0.0.1:{up.port}\n" in said
    curl = said[said.index("\ncurl ") + 1 :].strip().replace("pocket-chat", "echo")
    header = re.search(r'-H ("Authorization: .*?") -H', curl)
    assert header is not None
    # Expanded by a shell, because the printed command reads the key from a file.
    shell = subprocess.run(["/bin/sh", "-c", f"echo {header[1]}"], capture_output=True, text=True)
    name, _, value = shell.stdout.strip().partition(": ")
    chat = httpx.post(
        f"http://127.0.0.1:{up.port}/v1/chat/completions",
        headers={name: value},
        json={"model": "echo", "messages": [{"role": "user", "content": "hi"}]},
    )
    assert chat.json()["choices"][0]["message"]["content"] == "hi"


def test_each_part_is_reported_when_it_is_ready(up: Up) -> None:
    said = up.said.read_text()

    assert said.startswith("starting queue server, gateway and worker; logs are in ")
    assert re.search(r"^ +\d+\.\d s  gateway$", said, re.M)
    assert re.search(r"^ +\d+\.\d s  .*\becho\b", said, re.M)
    wait_for(lambda: "models are loaded" in up.said.read_text(), "every model")
    assert not re.search(r"could not be loaded", up.said.read_text())
    examined = run_here(("doctor", "--json"), up.environment)
    found = {one["part"]: one for one in json.loads(examined.stdout)}
    assert found["gateway"]["level"] == found["worker"]["level"] == found["queue"]["level"] == "ok"
    assert "a commit takes" in found["database"]["found"]


def test_gateway_that_cannot_start_is_reported_with_its_reason(home: Path) -> None:
    started = Up(home, price="nothing")

    assert started.process.wait(timeout=60) == 1

    said = started.said.read_text()
    assert "is not a valid amount" in said
    assert "Traceback" not in said
    assert "\nready" not in said


def test_first_keys_are_written_to_a_file_only_the_owner_can_read(up: Up) -> None:
    path = up.home / "first-keys.env"

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(keys(up.home)) == {"TOLLGATE_API_KEY", "TOLLGATE_ADMIN_KEY"}
    grants = httpx.get(
        f"http://127.0.0.1:{up.port}/v1/ledger?kind=grant",
        headers={"Authorization": f"Bearer {keys(up.home)['TOLLGATE_API_KEY']}"},
    ).json()["data"]
    assert [each["amount"] for each in grants] == ["5"]


def test_second_up_on_the_same_home_is_refused_in_one_line(up: Up) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "gateway", "up"],
        env={**up.environment, "TOLLGATE_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"already running on {up.home}" in second.stderr


def test_interrupt_ends_every_child(ending: Up) -> None:
    children = ending.descendants()
    assert len(children) >= 4

    ending.process.send_signal(signal.SIGINT)

    assert ending.process.wait(timeout=60) == 0
    wait_for(lambda: not any(alive(pid) for pid in children), "every child to end")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can end a child with its parent")
def test_killing_up_ends_every_child(ending: Up) -> None:
    children = ending.descendants()

    ending.process.kill()

    ending.process.wait()
    wait_for(lambda: not any(alive(pid) for pid in children), "every child to end")


def test_port_in_use_is_reported_in_one_line(up: Up, tmp_path: Path) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "gateway", "up"],
        env={**up.environment, "TOLLGATE_HOME": str(tmp_path / "other")},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert second.returncode == 1
    assert f"port {up.port}" in second.stderr
    assert second.stderr.count("\n") == 1
