"""The ``tollgate-worker`` command, and modules that its process must not load."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.workers.running import Gateway, echo
from workers.contract.announcements import Workers
from workers.logs import JsonFormatter


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environ},
        check=False,
    )


def test_help_shows_an_example() -> None:
    shown = run("--help")

    assert shown.returncode == 0
    assert "REDIS_URL=redis://localhost:6379 tollgate-worker --catalog catalog.yaml" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--catalog", "nowhere.yaml"], "No such file"),
        (["--model", "no-such-model"], "the catalog has no model called no-such-model"),
        ([], "no queue server configured; use --redis-url or set REDIS_URL"),
        (["--redis-url", "http://localhost"], "Redis URL must specify one of"),
        (["--threads", "0"], "threads: Input should be greater than or equal to 1"),
        (["--log-level", "LOUD"], "log_level: Input should be 'DEBUG', 'INFO'"),
    ],
)
def test_errors_are_printed_on_one_line(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text("models: [{name: echo, task: text-generation, engine: echo}]")
    ended = run(*arguments, TOLLGATE_CATALOG=str(catalog))

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("tollgate-worker: ")
    assert complaint in ended.stderr
    assert ended.stderr.count("\n") == 1


async def test_worker_can_serve_a_part_of_its_catalog(gateway: Gateway) -> None:
    async with gateway.worker(echo("a"), echo("b"), model="b"):
        (announced,) = await Workers(gateway.redis, namespace=gateway.namespace).list()

    assert announced.models == ("b",)
    assert announced.unavailable == {}


def test_neither_the_agent_nor_an_echo_loads_torch() -> None:
    code = (
        "import sys, workers.__main__, workers.runtime.process, workers.engines.echo;"
        "print(sorted({'torch', 'transformers', 'litestar', 'sqlalchemy'} & set(sys.modules)))"
    )

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert shown.stdout.strip() == "[]"


def test_logged_error_contains_its_location_but_no_client_content() -> None:
    def tokenize(prompt: str) -> None:
        raise ValueError(f"cannot tokenize {prompt}")

    try:
        tokenize("my diary")
    except ValueError:
        record = logging.getLogger("workers").makeRecord(
            "workers", logging.ERROR, "f", 1, "admission failed", (), sys.exc_info()
        )
        record.request_id = "req_1"
    line = JsonFormatter().format(record)

    line_object = msgspec.json.decode(line)
    assert line_object["message"] == "admission failed"
    assert line_object["error"] == "ValueError"
    assert line_object["request_id"] == "req_1"
    assert "tokenize" in line_object["at"][-1]
    assert "diary" not in line
