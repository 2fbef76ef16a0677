"""Starts and stops Tollgate as a user would, and measures what its processes consume."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway.up.queue_server import socket_path

READY_S = 60.0

CATALOG = """\
version: 1
models:
  - name: echo
    task: text-generation
    engine: echo
    limits: {context_tokens: 4096, output_tokens: 64, choices: 1}
    price:
      - {unit: input_token, amount: "0.0000001"}
      - {unit: output_token, amount: "0.0000001"}
  - name: paced
    task: text-generation
    engine: echo
    options: {slots: 8, tokens_per_step: 1, step_us: 10000}
    limits: {context_tokens: 4096, output_tokens: 64, choices: 1}
    price:
      - {unit: input_token, amount: "0.0000001"}
      - {unit: output_token, amount: "0.0000001"}
  - name: streamed
    task: text-generation
    engine: echo
    options: {slots: 64, tokens_per_step: 1, step_us: 20000}
    limits: {context_tokens: 4096, output_tokens: 256, choices: 1}
    price:
      - {unit: input_token, amount: "0.0000001"}
      - {unit: output_token, amount: "0.0000001"}
"""
UPSTREAM = """\
  - name: upstream
    task: text-generation
    upstream: {{url: "http://127.0.0.1:{port}/v1", model: fake, concurrency: 256}}
    limits: {{context_tokens: 4096, output_tokens: 64, choices: 1}}
    price:
      - {{unit: input_token, amount: "0.0000001"}}
      - {{unit: output_token, amount: "0.0000001"}}
"""


VOLUNTARY = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


@dataclass
class Product:
    process: subprocess.Popen[bytes]
    port: int
    key: str
    home: Path

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)


def start_product(
    home: Path,
    database_url: str | None,
    *,
    upstream_port: int = 0,
    models: str = "",
    tree: Path | None = None,
) -> Product:
    """Run ``tollgate up`` in ``home``, with an account that has sufficient credit.

    ``models`` are further entries of its catalog; ``tree`` is another checkout to run.
    """
    catalog = home / "catalog.yaml"
    upstream = UPSTREAM.format(port=upstream_port) if upstream_port else ""
    catalog.write_text(CATALOG + models + upstream)
    port = free_port()
    environment = {
        **os.environ,
        "TOLLGATE_HOME": str(home),
        "TOLLGATE_PORT": str(port),
        "TOLLGATE_CATALOG": str(catalog),
    }
    if database_url is not None:
        environment["DATABASE_URL"] = database_url
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "up"],
        env=environment,
        cwd=tree,
        stdout=subprocess.DEVNULL,
    )
    wait_until_up(f"http://127.0.0.1:{port}/health/ready", process)
    name = f"bench {time.time_ns()}"
    for command in (
        ("account", "create", name),
        ("credit", "add", name, "1000000", "--reason", "bench"),
    ):
        subprocess.run(
            [sys.executable, "-m", "gateway", *command],
            env=environment,
            cwd=tree,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    key = subprocess.run(
        [sys.executable, "-m", "gateway", "key", "create", name],
        env=environment,
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    wanted = "upstream" if upstream_port else "echo"
    deadline = time.monotonic() + READY_S
    headers = {"Authorization": f"Bearer {key}"}
    while time.monotonic() < deadline:
        entry = httpx.get(f"http://127.0.0.1:{port}/v1/catalog/{wanted}", headers=headers).json()
        if entry.get("available"):
            return Product(process, port, key, home)
        time.sleep(0.1)
    raise RuntimeError(f"no worker serves {wanted}")


def wait_until_up(url: str, process: subprocess.Popen[bytes], *, seconds: float = READY_S) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the process exited with status {process.returncode} before {url} was up"
            )
        try:
            if httpx.get(url, timeout=2).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} was not up within {seconds:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


ROLES = {
    "workers.runtime.process": "engine",
    "workers.engine_process": "engine",
    "workers": "agent",
    "gateway": "gateway",
}


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        for task in Path(f"/proc/{pid}/task").iterdir():
            waiting += [int(child) for child in (task / "children").read_text().split()]


def queue_url(product: Product) -> str:
    """Return the address of the product's queue server."""
    return f"unix://{socket_path(product.home)}"


def roles(product: Product) -> dict[int, str]:
    """Return the processes that serve: gateway, console, agent, engine and queue server."""
    found: dict[int, str] = {}
    for pid in process_tree(product.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        role = next((ROLES[word] for word in words if word in ROLES), None)
        if "redis" in words[0] or "valkey" in words[0]:
            found[pid] = "queue"
        elif role == "gateway" and "--console" in words:
            found[pid] = "console"
        elif role is not None and (role != "gateway" or "serve" in words):
            found[pid] = role
    return found


@dataclass(frozen=True)
class Consumption:
    """What processes have consumed, or have consumed between two readings, by role."""

    cpu_ms: dict[str, float]
    """Processor time, user and system."""
    wakeups: dict[str, float]
    """Voluntary context switches of all threads: how often one slept and was woken."""

    def since(self, earlier: Consumption, count: float) -> Consumption:
        """Return the consumption since an earlier reading, divided by ``count``."""
        return Consumption(
            {role: (ms - earlier.cpu_ms[role]) / count for role, ms in self.cpu_ms.items()},
            {role: (n - earlier.wakeups[role]) / count for role, n in self.wakeups.items()},
        )


def consumption(processes: dict[int, str]) -> Consumption:
    """Read what processes, given with their roles, have consumed so far."""
    cpu_ms: defaultdict[str, float] = defaultdict(float)
    wakeups: defaultdict[str, float] = defaultdict(float)
    for pid, role in processes.items():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_ms[role] += (int(fields[11]) + int(fields[12])) * TICK_MS
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread can end between the listing and the reading.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found = VOLUNTARY.search((task / "status").read_text())
                wakeups[role] += int(found[1]) if found else 0
    return Consumption(dict(cpu_ms), dict(wakeups))
