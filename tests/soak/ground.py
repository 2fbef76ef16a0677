"""The installation under test: its processes, restarted as an orchestrator would restart them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import yaml

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.ledger.transfers import add_credit
from gateway.pricing import parse_usd
from gateway.sql.database import Database, migrate
from gateway.up.queue_server import arguments as queue_arguments
from gateway.up.queue_server import die_with_parent
from tests.blackhole import BlackHole
from tests.databases import Server, own_postgres
from tests.servers import binary
from tests.stack import CATALOG, PEPPER, free_port
from tests.workers.fake_gmi import KEY as GMI_KEY

Kind = Literal["sqlite", "postgresql"]

ROOT: Final = Path(__file__).parents[2]
LIVE_S: Final = 30.0
"""A gateway that is not live for so long is killed, as a liveness probe would have it."""
LIGHT: Final = ("echo", "slow", "Veo3")
"""Models of the workers that may be killed often; the others take a while to load."""
CREDIT: Final = "50"


@dataclass
class Account:
    id: int
    secret: str


@dataclass
class Process:
    """One process of the installation, started again whenever it ends."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    """Held by SIGSTOP."""

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def code(self) -> int | None:
        return None if self.popen is None else self.popen.poll()

    def send(self, number: signal.Signals) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    def children(self) -> list[int]:
        if self.popen is None:
            return []
        with contextlib.suppress(OSError):
            pid = self.popen.pid
            text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            return [int(child) for child in text.split()]
        return []


@dataclass
class Ground:
    directory: Path
    kind: Kind
    database_url: str
    """As the soak itself reaches it, past the network."""
    postgres: Server | None
    queue_socket: Path
    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    queue_network: BlackHole | None = None
    sql_network: BlackHole | None = None
    ends: Counter[str] = field(default_factory=Counter)
    """Processes that ended by themselves, with their exit code."""
    probes: Counter[str] = field(default_factory=Counter)
    wipes: list[datetime] = field(default_factory=list)
    """When the queue server lost its data, or the newest part of it."""
    database_crash: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the database server is down, so that crashes do not overlap."""
    _keeper: asyncio.Task[None] | None = None

    @property
    def gateways(self) -> list[Process]:
        return [each for name, each in self.processes.items() if name.startswith("gateway")]

    @property
    def workers(self) -> list[Process]:
        return [each for name, each in self.processes.items() if name.startswith("worker")]

    @property
    def queue(self) -> Process:
        return self.processes["queue"]

    def url(self, chance: random.Random) -> str:
        """The address of one gateway, as a load balancer would choose it."""
        return f"http://127.0.0.1:{chance.choice(list(self.ports.values()))}"

    def environment(self, gmi_url: str) -> dict[str, str]:
        assert self.queue_network is not None
        database = self.database_url
        if self.sql_network is not None:
            database = f"postgresql://postgres@127.0.0.1:{self.sql_network.port}/postgres"
        catalog = self.directory / "catalog.yaml"
        catalog.write_text(catalog_text(gmi_url))
        return {
            **os.environ,
            "DATABASE_URL": database,
            "REDIS_URL": f"redis://127.0.0.1:{self.queue_network.port}",
            "BLOB_URL": f"file://{self.directory / 'blobs'}",
            "TOLLGATE_HOME": str(self.directory),
            "TOLLGATE_CATALOG": str(catalog),
            "TOLLGATE_PEPPER": PEPPER,
            "TOLLGATE_NAMESPACE": "soak",
            "TOLLGATE_TIMEOUT_S": "60",
            "TOLLGATE_ASYNC_TIMEOUT_S": "90",
            "TOLLGATE_RETRY_GRACE_S": "2",
            "TOLLGATE_SHUTDOWN_GRACE_S": "5",
            "TOLLGATE_HOLD_SLICE_TOKENS": "16",
            "TOLLGATE_WEBHOOK_PRIVATE_ADDRESSES": "true",
            "TOLLGATE_FETCH_PRIVATE_ADDRESSES": "true",
            "TOLLGATE_DRAIN_S": "5",
            "TOLLGATE_PRELOAD": "false",
            "GMI_API_KEY": GMI_KEY,
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *, gmi_url: str, gateways: int) -> None:
        """Start everything, the queue server first."""
        environment = self.environment(gmi_url)
        python = (sys.executable, "-m")
        for number in range(gateways):
            name, port = f"gateway-{number}", free_port()
            self.ports[name] = port
            own = {**environment, "TOLLGATE_PORT": str(port)}
            self._add(name, [*python, "gateway", "serve"], own)
        heavy = [model["name"] for model in yaml.safe_load(catalog_text(""))["models"]]
        heavy = [name for name in heavy if name not in LIGHT and "talking-head" not in name]
        for name, models in (("light-0", LIGHT), ("light-1", LIGHT), ("heavy", heavy)):
            named = [part for model in models for part in ("--model", model)]
            command = [*python, "workers", "--threads", "1", *named]
            self._add(f"worker-{name}", command, environment)
        self._keeper = asyncio.create_task(self._keep())

    def start_queue(self) -> None:
        home = self.directory / "queue"
        home.mkdir(exist_ok=True)
        command = queue_arguments(str(binary("valkey")), home=home, socket=self.queue_socket)
        self._add("queue", command, dict(os.environ))

    def _add(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        made = Process(name, command, environment, self.directory / f"{name}.log")
        self.processes[name] = made
        made.start()

    async def _keep(self) -> None:
        """Restart what has ended, and kill a gateway that has long not been live."""
        dead_since: dict[str, float] = {}
        async with httpx.AsyncClient(timeout=5.0) as http:
            while True:
                for process in list(self.processes.values()):
                    code = process.code
                    if code is not None:
                        if code not in (-signal.SIGKILL, -signal.SIGTERM, 0):
                            self.ends[f"{process.name} ended with {code}"] += 1
                        process.start()
                        dead_since.pop(process.name, None)
                for name, port in self.ports.items():
                    live = False
                    with contextlib.suppress(httpx.HTTPError):
                        answer = await http.get(f"http://127.0.0.1:{port}/health/live")
                        live = answer.is_success
                    if live:
                        dead_since.pop(name, None)
                    elif time.monotonic() - dead_since.setdefault(name, time.monotonic()) > LIVE_S:
                        self.probes[f"{name} was not live for {LIVE_S:.0f} s"] += 1
                        self.processes[name].send(signal.SIGKILL)
                        dead_since.pop(name)
                await asyncio.sleep(0.3)

    def open_account(self) -> Account:
        database = Database(self.database_url)
        try:
            with database.transaction() as connection:
                account = create_account(connection, f"soak {time.time_ns()}")
                secret, _ = create_key(connection, account.id, pepper=PEPPER.encode())
                add_credit(
                    connection,
                    account.id,
                    parse_usd(CREDIT),
                    kind="topup",
                    key=f"topup:{account.id}",
                    actor="soak",
                    reason="soak",
                )
                return Account(account.id, secret)
        finally:
            database.dispose()

    async def mend(self) -> None:
        """Undo every fault that has not undone itself."""
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.stopped = False
        for each in (self.queue_network, self.sql_network):
            if each is not None:
                each.mend()

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        await self.mend()
        for process in self.processes.values():
            process.send(signal.SIGTERM)
        deadline = time.monotonic() + 15
        for process in self.processes.values():
            if process.popen is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(
                        process.popen.wait, max(0.1, deadline - time.monotonic())
                    )
                process.send(signal.SIGKILL)


@contextlib.contextmanager
def ground(directory: Path, kind: Kind) -> Iterator[Ground]:
    """A directory and a migrated database; nothing runs yet."""
    directory.mkdir(parents=True, exist_ok=True)
    # The path of a Unix socket is limited to about a hundred bytes.
    socket = Path(f"/tmp/tg-soak-{os.getpid()}")
    if kind == "sqlite":
        url = f"sqlite:///{directory / 'tollgate.db'}"
        migrate(url)
        yield Ground(directory, kind, url, None, socket)
        return
    with own_postgres() as (server, url):
        yield Ground(directory, kind, url, server, socket)


def catalog_text(gmi_url: str) -> str:
    """The models of the tests' stack beside the ones that are shipped, and one upstream."""
    models: list[dict[str, Any]] = yaml.safe_load(CATALOG.format(veo="0.40"))["models"]
    models = [model for model in models if model["name"] in LIGHT]
    for model in models:
        if "upstream" in model:
            model["upstream"]["url"] = gmi_url
    shipped = yaml.safe_load((ROOT / "catalog.yaml").read_text())["models"]
    for model in shipped:
        if model["name"].startswith("pocket-"):
            if "checkpoint" in model:
                model["checkpoint"] = str(ROOT / model["checkpoint"])
            models.append(model)
    return json.dumps({"version": 1, "models": models})
