"""A worker with several devices: one worker process for each, under one parent.

Each process is a worker of its own, with its name, agent and engine process, so that neither memory
nor load nor a crash of one device concerns another. The parent only starts them, passes signals on,
and starts one again that ended unasked. If the parent dies, they drain: their standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from workers.agent.engine_supervisor import BACKOFF_MAX_S, BACKOFF_MIN_S, STABLE_S
from workers.settings import NAME_MAX

log = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def command_of(
    device: str, *, arguments: Sequence[str], name: str, all_of: Sequence[str]
) -> list[str]:
    """Return the command of the worker process of one device. Later options override earlier."""
    own = ["--device", device, "--one-of", ",".join(all_of)]
    suffix = f"-{device.replace(':', '')}"
    own += ["--name", name[: NAME_MAX - len(suffix)] + suffix]
    return [sys.executable, "-m", "workers", *arguments, *own]


async def run(commands: Mapping[str, Sequence[str]]) -> int:
    """Run a command for each device until all have ended after a signal.

    Return the highest exit status.
    """
    children = [_Child(device, command) for device, command in commands.items()]
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _pass_on(children, number))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child.keep_running()) for child in children]
    return max(task.result() for task in tasks)


def _pass_on(children: Sequence[_Child], number: signal.Signals) -> Callable[[], None]:
    def pass_on() -> None:
        for child in children:
            child.signal(number)

    return pass_on


class _Child:
    def __init__(self, device: str, command: Sequence[str]) -> None:
        self._device = device
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()

    def signal(self, number: signal.Signals) -> None:
        if number != signal.SIGHUP:
            self._ending.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def keep_running(self) -> int:
        """Start the process again whenever it ends unasked. Return its last exit status."""
        failures = 0
        while True:
            started_s = time.monotonic()
            # In a session of its own, so that Ctrl-C reaches it once: through the parent.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            if self._ending.is_set():  # a signal that came while it was started
                self.signal(signal.SIGTERM)
            status = await self._process.wait()
            self._process = None
            if self._ending.is_set():
                return status
            log.error("worker ended", extra={"device": self._device, "status": status})
            steady = time.monotonic() - started_s > STABLE_S
            failures = 1 if steady else failures + 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(BACKOFF_MIN_S * 2 ** (failures - 1), BACKOFF_MAX_S)):
                    await self._ending.wait()
                return 0
