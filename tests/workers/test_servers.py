"""Servers that a worker starts by a command of its catalog: ready, ended, restarted, never left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.running import Gateway
from tests.workers.test_upstream_endpoints import Agent, until
from workers.contract.announcements import Workers
from workers.contract.jobs import Completed
from workers.contract.models import ModelSpec, UpstreamSpec
from workers.upstreams import servers
from workers.upstreams.host import UpstreamHost

SERVER = Path(__file__).with_name("small_server.py")
COMMAND = f"{sys.executable} {SERVER} {{port}}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PROBE_S", 0.05)
    monkeypatch.setattr(servers, "BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(servers, "WATCH_S", 0.2)


class ServingAgent(Agent):
    def __init__(self, spec: UpstreamSpec, devices: tuple[str, ...], environ: Any) -> None:
        self.outcomes, self.events = {}, []
        self.host = UpstreamHost(
            [ModelSpec("ours", "text-generation", upstream=spec)],
            worker="w1",
            environ={},
            report=self._hear,
            server_environ={"PATH": os.environ["PATH"], **environ},
            server_devices=devices,
        )

    @property
    def problem(self) -> str:
        return self.host.problems.get("ours", "")


@contextlib.asynccontextmanager
async def serving(
    command: str, *, devices: tuple[str, ...] = (), environ: Any = None, **changes: Any
) -> AsyncIterator[ServingAgent]:
    made = ServingAgent(UpstreamSpec(command=command, **changes), devices, environ or {})
    task = asyncio.create_task(made.host.run())
    try:
        yield made
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _told(note: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(note.read_text())
    return told


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_server_takes_jobs_once_it_is_ready_and_ends_with_its_children(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    async with serving(f"{COMMAND} --slow 0.5 --note {note}") as made:
        starting = (made.host.takes("ours"), made.host.starting)
        await until(lambda: made.host.takes("ours"))
        outcome = await made.ask()
        pids = _told(note)["pids"]
        running = [_runs(pid) for pid in pids]

    assert starting == (False, ("ours",))
    assert isinstance(outcome, Completed), outcome
    assert outcome.output["choices"][0].text == "hi"
    assert running == [True, True]
    await until(lambda: not any(map(_runs, pids)))


async def test_server_that_dies_is_started_again(tmp_path: Path) -> None:
    note = tmp_path / "note"
    async with serving(f"{COMMAND} --note {note}") as made:
        await until(lambda: made.host.takes("ours"))
        first = _told(note)["pids"]
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: not made.host.takes("ours"))
        problem = made.problem
        await until(lambda: made.host.takes("ours"))

        assert "(signal 9) after it had been ready" in problem
        assert made.problem == ""
        assert not _runs(first[1])
        assert isinstance(await made.ask(), Completed)


async def test_server_that_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SILENT_MAX", 1)
    monkeypatch.setattr(servers, "STOP_S", 0.1)
    note = tmp_path / "note"
    async with serving(f"{COMMAND} --note {note}") as made:
        await until(lambda: made.host.takes("ours"))
        first = _told(note)["pids"]
        os.kill(first[0], signal.SIGSTOP)
        await until(lambda: "no longer answered GET /health" in made.problem)
        await until(lambda: made.host.takes("ours"))

    assert not any(map(_runs, first))


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        ("no-such-program {port}", {}, "its command was not found; install it"),
        (
            f"{COMMAND} --fail 3",
            {},
            "it ended with status 3 before it was ready; its last lines: "
            "loading weights | no kernel image is available",
        ),
        (
            f"{COMMAND} --slow 600",
            {"ready_timeout_s": 0.3, "ready": "/ready"},
            "it did not answer GET /ready within 0.3 s",
        ),
        (
            COMMAND,
            {"environment": {"MUCH": "x" * 4_000_000}},
            "it could not be started: Argument list too long",
        ),
        (COMMAND, {"gpus": 2}, "it needs 2 GPUs, but of the 1 that this worker keeps"),
    ],
    ids=["not found", "exits", "never ready", "no process", "too few GPUs"],
)
async def test_operator_is_told_why_a_server_does_not_start(
    command: str, changes: dict[str, Any], words: str
) -> None:
    async with serving(command, devices=("cuda:1",), **changes) as made:
        await until(lambda: words in made.problem)

        assert not made.host.takes("ours")


async def test_server_has_its_own_gpus_and_no_credential(tmp_path: Path) -> None:
    note = tmp_path / "note"
    async with serving(
        f"{COMMAND} --note {note}",
        devices=("cuda:1", "cuda:2", "cuda:3"),
        environ={"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
        gpus=2,
        environment={"VLLM_USE_V1": "1"},
    ) as made:
        await until(lambda: made.host.takes("ours"))

    told = _told(note)
    assert told["gpus"] == "5,6"
    assert "VLLM_USE_V1" in told["environment"]
    assert not {"REDIS_URL", "BLOB_URL"} & set(told["environment"])


def _entry(note: Path) -> dict[str, Any]:
    upstream = {"command": f"{COMMAND} --note {note}"}
    return {"name": "echo", "task": "text-generation", "upstream": upstream}


async def test_server_does_not_outlive_a_worker_that_is_killed(
    gateway: Gateway, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    environ = {"TOLLGATE_ALLOW_COMMANDS": "true"}
    async with gateway.worker(_entry(note), environ=environ) as worker:
        request = await gateway.submit("hello")
        outcome = await gateway.outcome(request)
        pids = _told(note)["pids"]
        worker.signal(signal.SIGKILL)
        await worker.ends()
        await until(lambda: not any(map(_runs, pids)))

    assert isinstance(outcome, Completed), outcome


async def test_command_is_not_run_unless_the_worker_allows_it(
    gateway: Gateway, tmp_path: Path
) -> None:
    async with gateway.worker(_entry(tmp_path / "note")):
        (announced,) = await Workers(gateway.redis, namespace=gateway.namespace).list()

    assert "set TOLLGATE_ALLOW_COMMANDS=true" in announced.unavailable["echo"]
    assert not (tmp_path / "note").exists()


@pytest.mark.long
async def test_llama_cpp_is_served_by_a_command(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="the extra 'peers' is not installed")
    from benchmarks.gguf import convert

    pocket = Path(__file__).parents[2] / "workers" / "pocket" / "chat"
    weights = convert(pocket, tmp_path / "model.gguf")
    script = tmp_path / "serve.py"
    script.write_text(
        "import sys, time, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        "params.model.path, params.port = sys.argv[1], int(sys.argv[2])\n"
        "params.n_ctx = 2048\n"
        "server = xllamacpp.Server(params)\n"
        "time.sleep(3600)\n"
    )
    async with serving(f"{sys.executable} {script} {weights} {{port}}") as made:
        await until(lambda: made.host.takes("ours"))
        outcome = await made.ask(
            messages=[{"role": "user", "content": "What is a hold?"}], max_tokens=40
        )

    assert isinstance(outcome, Completed), outcome
    assert "hold" in outcome.output["choices"][0].text
