"""One installation, started by ``tollgate up``, in which commands and examples of pages run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import yaml

from gateway.up.queue_server import die_with_parent
from tests.docs.command_server import install
from tests.docs.pages import ROOT, commands
from tests.stack import free_port, wait_for

MODELS: Final = (
    "pocket-chat",
    "pocket-image",
    "pocket-music",
    "pocket-speech",
    "pocket-talking",
    "pocket-talking-head",
    "pocket-upscale",
    "pocket-video",
)


@dataclass(frozen=True)
class Sandbox:
    """A directory like a checkout, in which ``tollgate up`` runs."""

    directory: Path
    port: int
    environment: dict[str, str]

    @property
    def keys(self) -> dict[str, str]:
        """The variables of ``first-keys.env``."""
        lines = (self.directory / ".tollgate" / "first-keys.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

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


@pytest.fixture(scope="package")
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
        "TOLLGATE_URL": f"http://127.0.0.1:{port}",
        "TOLLGATE_PRELOAD": "false",
        # The example of a webhook's receiver listens on this machine.
        "TOLLGATE_WEBHOOK_PRIVATE_ADDRESSES": "true",
    }
    # The path of a Unix socket is limited to about a hundred bytes.
    address = Path(tempfile.mkdtemp(prefix="tg-")) / "s"
    install(directory / "bin", address)
    quick = {**environment, "PATH": f"{directory / 'bin'}:{environment['PATH']}"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.command_server", str(address)],
        env=environment,
        preexec_fn=die_with_parent,
    )
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
        wait_for(address.exists, "the commands to be imported")
        yield Sandbox(directory, port, quick)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(address.parent)
        up.send_signal(signal.SIGINT)
        up.wait(timeout=60)


def _first_model() -> list[object]:
    """Return the entries that the page of the first model writes into a file."""
    page = ROOT / "docs" / "start" / "first-model.md"
    command = next(each for each in commands(page) if each.startswith("cat > mine.yaml"))
    models = yaml.safe_load("\n".join(command.splitlines()[1:-1]))["models"]
    assert isinstance(models, list)
    return models
