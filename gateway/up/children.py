"""Child processes of a supervisor: started, restarted when they exit, stopped with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gateway.up.queue_server import die_with_parent

COMMAND: Final = "tollgate"
"""Name with which a command's error begins."""
LOG_BYTES_MAX: Final = 10_000_000
"""Size at which a log is rotated; the previous one is deleted."""
LOG_CHECK_S: Final = 10.0
STOP_S: Final = 15.0
"""Time after which a child that was asked to stop is killed."""
RESTART_PAUSES_S: Final = (0.2, 1.0, 5.0, 15.0)
STABLE_S: Final = 60.0


class CannotStart(Exception):
    """The reason why ``up`` cannot start, in one line."""


@dataclass(slots=True)
class Child:
    """A child process, restarted when it exits unexpectedly."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    report: Callable[[str], None]
    """Tells the operator about an exit."""
    log: Path | None = None
    """File for the output; None: that of the supervisor."""
    descriptors: Sequence[int] = ()
    """Open files that the child inherits."""
    prepare: Callable[[], None] = die_with_parent
    """Run in the new process before the command."""
    on_exit: Callable[[int], None] | None = None
    """Called with the process id after each exit."""
    stop_s: float = STOP_S
    process: asyncio.subprocess.Process | None = None
    started: float = 0.0
    failures: int = 0
    stopping: bool = field(default=False)
    log_start: int = 0
    """Size of the log when the process was started."""

    @property
    def keeps_failing(self) -> bool:
        """Whether every restart so far failed soon."""
        return self.failures >= len(RESTART_PAUSES_S)

    async def start(self) -> asyncio.subprocess.Process:
        with contextlib.ExitStack() as stack:
            # Opened once, for the child to write.
            log = None if self.log is None else stack.enter_context(open(self.log, "ab"))  # noqa: ASYNC230
            self.log_start = 0 if self.log is None else self.log.stat().st_size
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env=dict(self.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self.descriptors,
                # Ctrl-C reaches the supervisor alone, which then stops everything in order.
                start_new_session=True,
                preexec_fn=self.prepare,
            )
        self.started = time.monotonic()
        return self.process

    async def keep_running(self) -> None:
        """Restart the process whenever it exits, with growing pauses while it keeps failing."""
        while not self.stopping:
            assert self.process is not None
            code = await self.process.wait()
            if self.on_exit is not None:
                self.on_exit(self.process.pid)
            if self._stopped():
                return
            if time.monotonic() - self.started > STABLE_S:
                self.failures = 0
            pause = RESTART_PAUSES_S[min(self.failures, len(RESTART_PAUSES_S) - 1)]
            self.failures += 1
            where = "" if self.log is None else f" (see {self.log})"
            self.report(f"{self.name} exited with {code}; restarting it{where}")
            await asyncio.sleep(pause)
            if not self._stopped():
                await self.start()

    def last_words(self) -> str:
        """Return the error with which the process, a command of Tollgate, has ended."""
        if self.log is None:
            return ""
        with open(self.log, "rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace")
        return text.rpartition(f"{COMMAND}: ")[2].strip() if f"{COMMAND}: " in text else ""

    async def keep_log_small(self) -> None:
        """Rotate the log whenever it is too large, while the child keeps writing."""
        while self.log is not None and not self.stopping:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(rotate, self.log)
            await asyncio.sleep(LOG_CHECK_S)

    def _stopped(self) -> bool:
        return self.stopping

    async def stop(self) -> None:
        """End the process permanently."""
        self.stopping = True
        await self.end()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self) -> None:
        """End the process, by force after ``stop_s``; ``keep_running`` can restart it."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.stop_s):
                await process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await process.wait()


def rotate(log: Path, *, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Copy a log that is too large, then truncate it. Its writer appends, so it continues at the
    start; lines written between the two steps are lost."""
    if not log.exists() or log.stat().st_size <= bytes_max:
        return
    shutil.copyfile(log, log.with_suffix(".log.1"))
    os.truncate(log, 0)
