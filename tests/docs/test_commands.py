"""Every command of the documentation runs, on a real installation started by ``tollgate up``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.docs.conftest import Sandbox
from tests.docs.pages import PAGES, ROOT, blocks, commands, name

NOT_RUN: Final = {
    "make up": "the fixture starts `tollgate up`, which this target runs",
    "TOLLGATE_CATALOG=mine.yaml make up": "the same, with the entries of that page in its catalog",
    ".venv/bin/pip install torch ": "downloads another build of torch",
    "pip install openapi-python-client": "downloads; the tests' dependencies have it",
    "openapi-python-client generate ": "tests/trust/test_openapi_is_true.py runs it",
    "docker compose up ": "needs a container runtime",
    "docker compose --profile gpu up ": "the same",
    "tollgate archive 2026-03": "needs a month that has ended; tests/archive has one",
    "tollgate archive verify ": "the same",
    "tollgate archive restore ": "the same",
    "tollgate notices add acme --email ": "needs a mail server",
    "tollgate-worker --catalog catalog.yaml --device cuda:0 ": "needs a GPU",
    "tollgate-worker --device cuda:0,cuda:1": "two GPUs; tests/workers/test_devices.py",
    "tollgate model add /models/": "needs that checkpoint; tests/cli/test_add_model.py runs it",
    "tollgate catalog check --deep": "loads torch; tests/cli/test_deep_check.py runs it",
    "tollgate worker show gpu-1": "needs a worker of that name; tests/workers has one",
    "tollgate worker drain gpu-1 ": "the same",
    "tollgate worker resume gpu-1": "the same",
    "tollgate worker unload gpu-1 ": "the same",
    "tollgate worker load gpu-1 ": "the same",
    "tollgate queue cancel req_… ": "needs an open request; tests/cli/test_audit.py has one",
    "BENCH_OLD=20000 ": "takes minutes on a PostgreSQL; test_benchmark_of_the_page_runs",
    "tollgate try pocket-chat ": "loads a model several times; tests/cli/test_try.py runs it",
}
"""Commands, or their beginnings, that are not run here, each with the reason."""

PRELUDE: Final = """\
set -euo pipefail
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
curl() { command curl --fail-with-body --max-time 60 "$@"; }
. .tollgate/first-keys.env
"""


def _is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def test_every_exception_is_a_command_of_a_page() -> None:
    every = [command for page in PAGES for command in commands(page)]

    assert [start for start in NOT_RUN if not any(c.startswith(start) for c in every)] == []


@pytest.mark.timeout(900)
def test_commands_run(sandbox: Sandbox) -> None:
    # The first steps come first: other pages use their account and their files.
    ordered = sorted(PAGES, key=lambda page: page.parent.name != "start")
    for page in ordered:
        found = [command for command in commands(page) if _is_run(command)]
        if found:
            sandbox.run(["bash"], PRELUDE + "\n".join(found) + "\n", name(page))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("receipts", "holds"), [(500, 50), (20000, 2000)])
def test_benchmark_of_the_page_runs(receipts: int, holds: int, postgres: str) -> None:
    sizes = {"BENCH_OLD": str(receipts), "BENCH_HOLDS": str(holds), "BENCH_POSTGRES": postgres}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "old"],
        cwd=ROOT, env={**os.environ, **sizes}, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "| its return, s |" in done.stdout


@pytest.mark.timeout(300)
def test_python_of_the_quickstart_runs(sandbox: Sandbox) -> None:
    secret = sandbox.keys["TOLLGATE_API_KEY"]
    page = ROOT / "docs" / "start" / "quickstart.md"
    text = "\n".join(block.text for block in blocks(page, "python")).replace("tg_…", secret)

    sandbox.run(
        [sys.executable, "-"],
        text + "\nassert request['status'] == 'succeeded', request\n",
        name(page),
    )
