"""Processes of gateway and worker, forked from one that has imported their modules.

Python imports for longer than all else that such a process does until it is ready, and the tests
start hundreds. Starting by the command itself is tested by ``tests/cli`` and ``tests/docs``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gateway import failpoints
from gateway.up.queue_server import die_with_parent

_IMPORTED: Final = ["tests.forked", "gateway.server.single", "workers.__main__"]
"""What the process to fork from imports; the modules that these import are the expensive ones."""


class Forked:
    """``python -m MODULE ARGUMENTS`` in a session of its own, as far as tests use a ``Popen``."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str], log: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self.args = [module, *arguments]
        self._process = context.Process(
            target=_run, args=(module, arguments, dict(environment), log), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def started(
    module: str, *arguments: str, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """The same by an interpreter of its own, for what happens when one starts."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _run(module: str, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    die_with_parent()
    with open(log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # One of them would keep the process that was forked from alive when the tests are killed.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(failpoints)  # reads its variable when it is imported
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
