"""Every command of the documentation runs, on a real installation started by ``tollgate up``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import yaml

from gateway.up.queue_server import die_with_parent
from tests.docs.pages import PAGES, ROOT, blocks, commands, name
from tests.stack import free_port, wait_for

NOT_RUN: Final = {
    "make up": "the fixture starts `tollgate up`, which this target runs",
    "TOLLGATE_CATALOG=mine.yaml make up": "the same, with the entries of that page in its catalog",
    ".venv/bin/pip install torch ": "downloads another build of torch",
    "pip install openapi-python-client": "downloads; the tests' dependencies have it",
    "openapi-python-client generate ": "tests/trust/test_openapi_is_true.py runs it",
    "docker compose up ": "needs a container runtime",
    "tollgate archive 2026-03": "needs a month that has ended; tests/archive has one",
    "tollgate archive verify ": "the same",
    "tollgate archive restore ": "the same",
    "tollgate notices add acme --email ": "needs a mail server",
    "tollgate-worker --catalog catalog.yaml --device cuda:0 ": "needs a GPU",
    "tollgate try pocket-chat ": "loads a model several times; tests/cli/test_try.py runs it",
}
"""Commands, or their beginnings, that are not run here, each with the reason."""

MODELS: Final = (
    "pocket-chat",
    "pocket-image",
    "pocket-speech",
    "pocket-talking",
    "pocket-talking-head",
    "pocket-upscale",
    "pocket-video",
)
PRELUDE: Final = """\
set -euo pipefail
trap 'echo "failed: $BASH_COMMAND" >&2' ERR
curl() { command curl --fail-with-body --max-time 60 "$@"; }
. .tollgate/first-keys.env
"""


@dataclass(frozen=True)
class Sandbox:
    """A directory like a checkout, in which ``tollgate up`` runs."""

    directory: Path
    port: int
    environment: dict[str, str]

    def run(self, program: list[str], text: str, what: str) -> None:
        done = subprocess.run(
            program,
            input=text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}"),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=480,
        )
        assert done.returncode == 0, f"{what}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    directory = tmp_path_factory.mktemp("checkout")
    for folder in ("docs", "workers"):
        (directory / folder).symlink_to(ROOT / folder)
    shipped = yaml.safe_load((ROOT / "catalog.yaml").read_text())["models"]
    models = [entry for entry in shipped if entry["name"] in MODELS]
    assert len(models) == len(MODELS)
    (directory / "catalog.yaml").write_text(yaml.safe_dump({"models": [*models, *_first_model()]}))
    port = free_port()
    outside = ("TOLLGATE_", "DATABASE_URL", "REDIS_URL", "BLOB_URL")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(outside)},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TOLLGATE_PORT": str(port),
        "TOLLGATE_PRELOAD": "false",
    }
    log = directory / "up.log"
    with open(log, "wb") as output:
        up = subprocess.Popen(
            ["tollgate", "up"],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
        )
    try:
        wait_for(
            lambda: "\nready " in log.read_text() or up.poll() is not None, "ready", patience_s=100
        )
        assert up.poll() is None, log.read_text()
        yield Sandbox(directory, port, environment)
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(timeout=60)


def _first_model() -> list[object]:
    """Return the entries that the page of the first model writes into a file."""
    page = ROOT / "docs" / "start" / "first-model.md"
    command = next(each for each in commands(page) if each.startswith("cat > mine.yaml"))
    models = yaml.safe_load("\n".join(command.splitlines()[1:-1]))["models"]
    assert isinstance(models, list)
    return models


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


@pytest.mark.timeout(300)
def test_python_of_the_quickstart_runs(sandbox: Sandbox) -> None:
    keys = (sandbox.directory / ".tollgate" / "first-keys.env").read_text()
    secret = dict(line.split("=", 1) for line in keys.splitlines())["TOLLGATE_API_KEY"]
    page = ROOT / "docs" / "start" / "quickstart.md"
    text = "\n".join(block.text for block in blocks(page, "python")).replace("tg_…", secret)

    sandbox.run(
        [sys.executable, "-"],
        text + "\nassert request['status'] == 'succeeded', request\n",
        name(page),
    )
