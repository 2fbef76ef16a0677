"""``tollgate doctor``: what it reports of machines, catalogs, servers and workers with problems."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.doctor import machine
from gateway.doctor.database import examine_database, time_spent
from gateway.doctor.diagnosis import Diagnosis
from gateway.doctor.models import examine_catalog, read_models
from gateway.doctor.services import (
    QueueState,
    examine_gateway,
    examine_queue,
    examine_workers,
    read_queue,
)
from gateway.performance import ReceiptSample
from gateway.settings import Settings
from gateway.sql.database import Database, migrate
from tests.cli.here import run_here
from workers.contract.announcements import Announcement
from workers.contract.jobs import Timings

GIB = 1024 * 1024


def levels(found: Iterable[Diagnosis]) -> dict[str, str]:
    """The levels by part; everything that is not well says what to do."""
    found = list(found)
    assert all(one.advice for one in found if one.level in ("warning", "problem"))
    return {one.part: one.level for one in found}


def state(**changes: Any) -> QueueState:
    values: dict[str, Any] = {
        "version": "7.2.4",
        "ping_ms": 0.1,
        "policy": "noeviction",
        "used_bytes": 1,
        "max_bytes": 0,
        "skew_s": 0.0,
        "workers": (),
    }
    return QueueState(**(values | changes))


def test_nothing_runs_and_nothing_is_wrong(home: Path) -> None:
    alone = {"TOLLGATE_HOME": str(home), "REDIS_URL": None, "DATABASE_URL": None}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    done = run_here(("doctor", "--json"), {**alone, "TOLLGATE_PORT": str(port)})

    found = json.loads(done.stdout)
    assert done.exit_code == int(any(one["level"] == "problem" for one in found))
    by_part = {one["part"]: one for one in found}
    assert {"memory", "cores", "disk", "catalog", "database", "queue", "gateway"} <= set(by_part)
    assert "does not exist yet" in by_part["database"]["found"]
    assert by_part["gateway"]["level"] == "note"


def test_small_or_busy_machine_is_reported_with_advice() -> None:
    plenty = {"MemTotal": 16 * GIB, "MemAvailable": 12 * GIB}

    assert machine.memory(plenty, None).level == "ok"
    assert machine.memory(plenty, 512 * GIB).level == "problem"
    assert machine.memory({"MemTotal": 8 * GIB, "MemAvailable": GIB // 4}, None).level == "warning"
    assert machine.cores(2, 1.0).level == "ok"
    assert machine.cores(2, 9.0).level == "warning"


def test_idle_gpu_is_reported() -> None:
    line = "NVIDIA H200, 143771, 12, 0\n"

    assert [one.level for one in machine.devices(line, {})] == ["ok"]
    on_cpu = machine.devices(line, {"TOLLGATE_DEVICE": "cpu"})
    assert [one.level for one in on_cpu] == ["ok", "warning"]
    assert [one.level for one in machine.devices(None, {})] == ["note"]


def test_full_disk_is_a_problem(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, disk_reserve_bytes=2**60)

    assert levels(machine.disks(settings)) == {"disk": "problem"}


def test_mistakes_and_missing_checkpoints_of_a_catalog_are_problems(tmp_path: Path) -> None:
    file = tmp_path / "catalog.yaml"
    entry = "models: [{name: a, task: text-generation, engine: llm, checkpoint: nowhere, "
    limits = "limits: {context_tokens: 9, output_tokens: 9}, price: [{unit: request, amount: %s}]}]"

    file.write_text(entry + limits % "'1'")
    assert levels(examine_catalog(file, read_models(file), {})) == {
        "catalog": "ok",
        "model": "problem",
    }
    file.write_text(entry + limits % "cheap")
    assert levels(examine_catalog(file, read_models(file), {})) == {"catalog": "problem"}


def test_database_is_written_to_and_its_commits_are_timed(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)

    assert levels(examine_database(settings, ())) == {"database": "note"}
    Database(settings.sql_url).dispose()
    (tmp_path / "tollgate.db").touch()
    assert levels(examine_database(settings, ())) == {"database": "problem"}
    migrate(settings.sql_url)
    (found,) = examine_database(settings, ("m",))
    assert "a commit takes" in found.found
    (tmp_path / "tollgate.db").write_bytes(b"no database at all" * 100)
    assert levels(examine_database(settings, ())) == {"database": "problem"}


@pytest.mark.parametrize(
    ("changes", "part", "level"),
    [
        ({}, "queue", "ok"),
        ({"version": "5.0.7"}, "queue", "problem"),
        ({"policy": "allkeys-lru"}, "queue", "warning"),
        ({"used_bytes": 95, "max_bytes": 100}, "queue", "warning"),
        ({"ping_ms": 40.0}, "queue", "warning"),
        ({"skew_s": -90.0}, "clock", "problem"),
    ],
)
def test_queue_server_is_judged(changes: dict[str, Any], part: str, level: str) -> None:
    found = examine_queue(Settings(), "redis://:secret@far:6379", state(**changes))

    assert levels(found)[part] == level


def test_queue_server_is_asked(valkey: str) -> None:
    found = asyncio.run(read_queue(valkey, namespace="doctor"))

    assert (found.policy, found.workers) == ("noeviction", ())
    silent = examine_queue(Settings(redis_url="redis://h"), "redis://h", ConnectionError("refused"))
    assert levels(silent) == {"queue": "problem"}


def test_port_of_another_program_is_a_problem() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        # Bound without listening: connections are refused, as on a free port.
        assert levels(examine_gateway(Settings(port=port))) == {"gateway": "note"}
        other.listen()
        hang_up = threading.Thread(target=lambda: other.accept()[0].close())
        hang_up.start()
        assert levels(examine_gateway(Settings(port=port))) == {"gateway": "problem"}
        hang_up.join()


def test_each_model_that_is_not_served_has_a_reason() -> None:
    worker = Announcement(
        worker="w1",
        models=("fine",),
        loading=("later",),
        problems={"broken": "ValueError: no tokenizer"},
        unavailable={"bare": "the engine llm needs torch, which is not installed"},
    )

    found = list(
        examine_workers(state(workers=(worker,)), ("fine", "later", "broken", "bare", "added"))
    )

    problems = [one.found for one in found if one.level == "problem"]
    assert problems == [
        "broken could not be loaded: ValueError: no tokenizer",
        "bare is not served: the engine llm needs torch, which is not installed",
        "added is not served: no worker has this entry in its catalog",
    ]
    assert levels(examine_workers(state(), ("fine",))) == {"workers": "problem"}


def test_time_in_the_queue_and_loading_is_explained() -> None:
    def samples(**us: int) -> list[ReceiptSample]:
        timings = Timings(**({"total_us": 3_000_000} | us))
        return [ReceiptSample("succeeded", "", timings, datetime.now(UTC))] * 5

    assert list(time_spent("m", samples(forward_us=2_900_000))) == []
    assert "in the queue" in next(time_spent("m", samples(queue_us=2_000_000))).found
    assert "load its weights" in next(time_spent("m", samples(load_us=2_000_000))).found
