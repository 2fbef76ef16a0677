"""The whole product as processes, as an operator runs it: gateway, worker, queue, database."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from gateway.accounts.accounts import create_account, find_account
from gateway.accounts.keys import create_key
from gateway.ledger.reconcile import Finding, reconcile
from gateway.ledger.transfers import add_credit
from gateway.pricing import parse_usd
from gateway.sql.database import Database
from tests.forked import Forked, started

PEPPER = "a pepper for tests, long enough"
PATIENCE_S = 40.0
FILE_BYTES_MAX = 6 * 1024 * 1024
CATALOG = """\
version: 1
models:
  - name: echo
    task: text-generation
    engine: echo
    options: {{unsafe_test_hooks: true, step_limit_s: 4}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4}}
    price: &price
      - {{unit: input_token, amount: "0.02", per: 1000000}}
      - {{unit: output_token, amount: "0.08", per: 1000000}}
  - name: slow
    task: text-generation
    engine: echo
    options: {{unsafe_test_hooks: true, tokens_per_step: 1, step_us: 50000}}
    slo: {{ttft_ms: 10000, tpot_ms: 1}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4}}
    price: *price
  - name: brief
    task: text-generation
    engine: echo
    options: {{tokens_per_step: 1, step_us: 200000}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4, timeout_s: 2}}
    batch: false
    price: *price
  - name: Veo3
    task: text-to-video
    upstream: {{dialect: gmi, url: "https://console.gmicloud.ai", credential: GMI_API_KEY}}
    price: [{{unit: request, amount: "{veo}"}}]
"""


@dataclass
class Caller:
    """An account with a key, and a client that uses it."""

    account_id: int
    key_id: int
    secret: str
    http: httpx.Client


@dataclass
class Stack:
    """Processes that belong together; ``kill`` is ``kill -9``."""

    directory: Path
    database_url: str
    redis_url: str
    namespace: str
    catalog: Path
    port: int = 0
    forked: bool = True
    processes: dict[str, Forked | subprocess.Popen[bytes]] = field(default_factory=dict)
    clients: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "BLOB_URL": f"file://{self.directory / 'blobs'}",
            "TOLLGATE_HOME": str(self.directory),
            "TOLLGATE_CATALOG": str(self.catalog),
            "TOLLGATE_PORT": str(self.port),
            "TOLLGATE_PEPPER": PEPPER,
            "TOLLGATE_NAMESPACE": self.namespace,
            "TOLLGATE_METRICS": "open",
            "TOLLGATE_GPU_HOUR_USD": "3.6",
            "TOLLGATE_HOLD_SLICE_TOKENS": "16",
            "TOLLGATE_RETRY_GRACE_S": "1.5",
            "TOLLGATE_SWEEP_INTERVAL_S": "0.5",
            "TOLLGATE_FILE_BYTES_MAX": str(FILE_BYTES_MAX),
            "TOLLGATE_BATCH_LINES_MAX": "1000",
            "TOLLGATE_BATCH_IN_FLIGHT": "4",
            "TOLLGATE_BATCH_LEASE_S": "2",
            "TOLLGATE_SHUTDOWN_GRACE_S": "2",
            "TOLLGATE_WEBHOOK_PRIVATE_ADDRESSES": "true",
            "TOLLGATE_CORS_ORIGINS": "https://chat.example.com",
        }

    def start_gateway(
        self,
        name: str = "gateway",
        *,
        failpoint: str | None = None,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        """``wait`` until it is ready; otherwise, until it is alive."""
        if not self.port:
            self.port = free_port()
        more = {**(environment or {})}
        if failpoint:
            more["TOLLGATE_FAILPOINT"] = failpoint
        self._start(name, "gateway", "serve", environment=more)

        with httpx.Client(timeout=2) as client:

            def ready() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    path = "/health/ready" if wait else "/health/live"
                    return client.get(f"{self.url}{path}").is_success
                return False

            wait_for(ready, "the gateway")

    def start_worker(self, name: str = "worker") -> None:
        self._start(name, "workers", "--threads", "1")

    def _start(
        self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.processes[name] = (Forked if self.forked else started)(
            module,
            *arguments,
            environment={**self.environment(), **(environment or {})},
            log=self.directory / f"{name}.log",
        )

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def kill_engine(self) -> int:
        """Kill the engine process of the worker; return its process id."""
        pid = self.engine_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def engine_pid(self) -> int:
        worker = self.processes["worker"].pid
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        return int(children[0])

    def stop(self) -> None:
        self.close_clients()
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def caller(self, *, credit: str = "1", **key: Any) -> Caller:
        """Open an account with credit and a key."""
        database = Database(self.database_url)
        try:
            with database.transaction() as connection:
                account = create_account(connection, f"account {time.time_ns()}")
                secret, info = create_key(connection, account.id, pepper=PEPPER.encode(), **key)
                if parse_usd(credit):
                    add_credit(
                        connection,
                        account.id,
                        parse_usd(credit),
                        kind="topup",
                        key=f"topup:{account.id}",
                        actor="test",
                        reason="test",
                    )
        finally:
            database.dispose()
        headers = {"Authorization": f"Bearer {secret}"}
        http = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)
        self.clients.append(http)
        return Caller(account.id, info.id, secret, http)

    def close_clients(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()

    def wait_for_model(self, name: str = "echo", *, patience_s: float = PATIENCE_S) -> None:
        caller = self.caller(credit="0")

        def available() -> bool:
            answer = caller.http.get(f"/v1/catalog/{name}")
            return bool(answer.is_success and answer.json()["available"])

        wait_for(available, f"a worker for {name}", patience_s=patience_s)

    def findings(self) -> list[Finding]:
        database = Database(self.database_url)
        try:
            with database.transaction() as connection:
                return reconcile(connection, now=datetime.now(UTC))
        finally:
            database.dispose()

    def held(self, caller: Caller) -> int:
        database = Database(self.database_url)
        try:
            with database.transaction() as connection:
                return find_account(connection, caller.account_id).held_nanos
        finally:
            database.dispose()


def chat(model: str, content: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def order(caller: Caller, model: str, content: str) -> str:
    """Submit an asynchronous request; return its id."""
    body = {"model": model, "input": {"messages": [{"role": "user", "content": content}]}}
    answer = caller.http.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def ended(caller: Caller, request_id: str, *, patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """Wait for the end of a request."""
    found: dict[str, Any] = {}

    def closed() -> bool:
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            answer = caller.http.get(f"/v1/requests/{request_id}")
            if answer.is_success:
                found.update(answer.json())
        return found.get("status") not in (None, "queued", "running")

    wait_for(closed, request_id, patience_s=patience_s)
    return found


def wait_for(condition: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def not_started(
    directory: Path, database_url: str, redis_url: str, *, namespace: str, more_models: str = ""
) -> Stack:
    """Everything but processes; the caller stops what it starts."""
    directory.mkdir(parents=True, exist_ok=True)
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40") + more_models)
    return Stack(directory, database_url, redis_url, namespace, catalog)


@contextlib.contextmanager
def running(
    directory: Path,
    database_url: str,
    redis_url: str,
    *,
    namespace: str,
    more_models: str = "",
    patience_s: float = PATIENCE_S,
    forked: bool = True,
) -> Iterator[Stack]:
    """A gateway and a worker with the echo engine, and what else the catalog is to have."""
    stack = not_started(
        directory, database_url, redis_url, namespace=namespace, more_models=more_models
    )
    stack.forked = forked
    try:
        stack.start_worker()
        stack.start_gateway()
        stack.wait_for_model(patience_s=patience_s)
        for name in re.findall(r"- name: (\S+)", more_models):
            stack.wait_for_model(name, patience_s=patience_s)
        yield stack
    finally:
        stack.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (ProcessLookupError, FileNotFoundError):
        return False
