"""Starts what is compared on the path of a request: this tree, earlier commits, other proxies.

Portkey's gateway and LiteLLM's proxy are installed under ``.bench/``, outside the project's
environment. Neither has a database here, so they hold, book and charge nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.load import chat_load
from benchmarks.processes import free_port, process_tree, roles, start_product, wait_until_up

HERE: Final = Path(__file__).parents[1]
TOOLS: Final = HERE / ".bench"
PORTKEY: Final = "@portkey-ai/gateway@1.15.2"
LITELLM: Final = "litellm[proxy]==1.106.2"
THIS_TREE: Final = "this tree"
LITELLM_CONFIG: Final = """\
model_list:
  - model_name: upstream
    litellm_params:
      model: openai/fake
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
general_settings:
  master_key: sk-bench
litellm_settings:
  telemetry: false
"""


@dataclass(frozen=True)
class Contender:
    """A server of the model ``upstream``, and of ``echo`` and ``streamed`` if it is Tollgate."""

    name: str
    port: int
    processes: Callable[[], dict[int, str]]
    """Its processes and their roles."""
    key: str = "none"
    headers: Mapping[str, str] = field(default_factory=dict)
    has_engines: bool = False


@contextmanager
def contenders(names: list[str]) -> Iterator[list[Contender]]:
    """Start this tree and what is named, before one upstream, and warm each of them up.

    A name is ``portkey``, ``litellm`` or a revision of this repository.
    """
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tg-")))
        port = stack.enter_context(_upstream())
        started = [stack.enter_context(_tree(THIS_TREE, HERE, home / "this", port))]
        for name in names:
            if name in PEERS:
                started.append(stack.enter_context(PEERS[name](home, port)))
            else:
                tree = _check_out(name, home / f"tree-{len(started)}")
                at = home / f"home-{len(started)}"
                started.append(stack.enter_context(_tree(name, tree, at, port)))
        for each in started:
            chat_load(
                port=each.port,
                key=each.key,
                headers=each.headers,
                model="upstream",
                concurrency=8,
                seconds=1,
            )
        yield started


@contextmanager
def _upstream() -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_upstream", str(port)])
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def _check_out(revision: str, tree: Path) -> Path:
    clone = ["git", "clone", "--quiet", "--no-checkout", str(HERE), str(tree)]
    subprocess.run(clone, check=True)
    subprocess.run(["git", "checkout", "--quiet", revision], cwd=tree, check=True)
    return tree


@contextmanager
def _tree(name: str, tree: Path, home: Path, upstream_port: int) -> Iterator[Contender]:
    home.mkdir()
    product = start_product(home, None, upstream_port=upstream_port, tree=tree)
    try:
        yield Contender(
            name, product.port, lambda: roles(product), key=product.key, has_engines=True
        )
    finally:
        product.stop()


@contextmanager
def _portkey(home: Path, upstream_port: int) -> Iterator[Contender]:
    folder = TOOLS / "portkey"
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise RuntimeError("Portkey's gateway needs node and npm; install Node.js 20 or newer")

    def install_peer() -> None:
        subprocess.run([npm, "install", "--no-audit", "--no-fund", PORTKEY], cwd=folder, check=True)

    install(folder, PORTKEY, install_peer)
    script = folder / "node_modules/@portkey-ai/gateway/build/start-server.js"
    port = free_port()
    with _running([node, str(script), f"--port={port}", "--headless"], f"{port}/") as processes:
        yield Contender(
            "Portkey",
            port,
            processes,
            headers={
                "x-portkey-provider": "openai",
                "x-portkey-custom-host": f"http://127.0.0.1:{upstream_port}/v1",
            },
        )


@contextmanager
def _litellm(home: Path, upstream_port: int) -> Iterator[Contender]:
    folder = TOOLS / "litellm"
    python = folder / "bin" / "python"

    def install_peer() -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", LITELLM], check=True)

    install(folder, LITELLM, install_peer)
    config = home / "litellm.yaml"
    config.write_text(LITELLM_CONFIG.format(port=upstream_port))
    port = free_port()
    command = [str(folder / "bin" / "litellm"), "--config", str(config), "--port", str(port)]
    with _running(command, f"{port}/health/liveliness") as processes:
        yield Contender("LiteLLM", port, processes, key="sk-bench")


PEERS: Final[dict[str, Callable[[Path, int], AbstractContextManager[Contender]]]] = {
    "portkey": _portkey,
    "litellm": _litellm,
}


def install(folder: Path, version: str, action: Callable[[], None]) -> None:
    """Install a tool under ``.bench``, unless this version is already installed."""
    installed = folder / "installed"
    if installed.exists() and installed.read_text() == version:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    action()
    installed.write_text(version)


@contextmanager
def _running(command: list[str], ready: str) -> Iterator[Callable[[], dict[int, str]]]:
    # Without the project's own modules, and without a price list from the network.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        env={
            **environment,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "TRUSTED_CUSTOM_HOSTS": "127.0.0.1",
            "NODE_ENV": "production",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_up(f"http://127.0.0.1:{ready}", process, seconds=120)
        yield lambda: dict.fromkeys(process_tree(process.pid), "proxy")
    finally:
        process.terminate()
        process.wait()
