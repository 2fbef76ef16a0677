"""Servers of large models that the worker itself starts: vLLM, SGLang, llama-server or the like.

The command is the operator's, from the catalog on the worker's machine; nothing of a request is in
it, and no shell reads it. It gets a free port of this machine, the devices that it asks for and an
environment without credentials. It is probed, started again if it ends or hangs, and ended with all
its processes. Requests go to it as to any other upstream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from workers.contract.models import ModelSpec, UpstreamSpec
from workers.upstreams import guard

log = logging.getLogger(__name__)

PROBE_S: Final = 0.5
"""Interval of probes until a server is ready."""
WATCH_S: Final = 10.0
"""Interval of probes of a server that is ready."""
SILENT_MAX: Final = 6
"""Consecutive failed probes after which a server that was ready is started again."""
BACKOFF_MIN_S: Final = 0.5
BACKOFF_MAX_S: Final = 60.0
STABLE_S: Final = 60.0
"""Time of service after which the backoff is reset."""
STOP_S: Final = 15.0
"""Time between asking a server to end and killing it."""
_LINES: Final = 8
_LINE_CHARS: Final = 300


class DevicePool:
    """Devices of the worker that servers take, and engines do not use."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._free = list(devices)

    def take(self, count: int) -> list[str]:
        """Raise ``ValueError`` if too few are free."""
        if count > len(self._free):
            raise ValueError(
                f"it needs {count} GPUs, but of the {len(self.devices)} that this worker keeps for "
                f"servers {len(self._free)} are free; they are counted when the worker starts"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, devices: Sequence[str]) -> None:
        self._free = [one for one in self.devices if one in {*self._free, *devices}]


class Server:
    """The server of one catalog entry, between ``start`` and ``stop``."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        environ: Mapping[str, str],
        pool: DevicePool,
        changed: Callable[[], None],
    ) -> None:
        assert spec.upstream is not None
        self.ready = False
        self.problem: str | None = None
        """Why it is not ready, for the operator; None while it starts for the first time."""
        self._model = spec.name
        self._upstream = spec.upstream
        self._environ = environ
        self._pool = pool
        self._changed = changed
        self._port = _free_port()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._task: asyncio.Task[None] | None = None

    @property
    def spec(self) -> UpstreamSpec:
        """The upstream that requests are sent to."""
        url = f"http://127.0.0.1:{self._port}/v1"
        return msgspec.structs.replace(self._upstream, url=url, command=None)

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the server with all its processes."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            ready_s = None
            try:
                devices = self._pool.take(self._upstream.gpus)
            except ValueError as error:
                self._set(ready=False, problem=str(error))
            else:
                try:
                    ready_s = await self._run(devices)
                except OSError as error:  # of the guard itself, such as too few processes or memory
                    problem = f"it could not be started: {error.strerror}"
                    log.error(
                        "server not started", extra={"model": self._model, "problem": problem}
                    )
                    self._set(ready=False, problem=problem)
                finally:
                    self._pool.give_back(devices)
            failures = 1 if ready_s is not None and ready_s > STABLE_S else failures + 1
            await asyncio.sleep(min(BACKOFF_MIN_S * 2 ** (failures - 1), BACKOFF_MAX_S))

    async def _run(self, devices: Sequence[str]) -> float | None:
        """Run the server until it ends or hangs. Return how long it was ready, if ever."""
        self._lines.clear()
        process = await asyncio.create_subprocess_exec(
            *guard.arguments(self._command(), patience_s=STOP_S),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=self._environment(devices),
        )
        log.info("server started", extra={"model": self._model, "devices": ",".join(devices)})
        assert process.stdin is not None
        reading = asyncio.create_task(self._read(process))
        ending = asyncio.create_task(process.wait())
        ready_at: float | None = None
        problem = ""
        try:
            if await self._until_ready(ending):
                ready_at = time.monotonic()
                self._set(ready=True, problem=None)
                problem = await self._until_silent(ending)
            elif not ending.done():
                path, limit_s = self._upstream.ready, self._upstream.ready_timeout_s
                problem = f"it did not answer GET {path} within {limit_s:g} s"
        finally:
            process.stdin.close()  # the guard then ends it
            self.ready = False
            status = await ending
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await reading
            reading.cancel()
        problem = problem or _end_of(status, was_ready=ready_at is not None)
        if ready_at is None and self._lines:  # later lines can quote requests
            problem += f"; its last lines: {' | '.join(self._lines)}"
        log.error("server ended", extra={"model": self._model, "problem": problem})
        self._set(ready=False, problem=problem)
        return None if ready_at is None else time.monotonic() - ready_at

    async def _until_ready(self, ending: asyncio.Task[int]) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._upstream.ready_timeout_s):
                while not ending.done():
                    if await self._answers():
                        return True
                    await asyncio.wait([ending], timeout=PROBE_S)
        return False

    async def _until_silent(self, ending: asyncio.Task[int]) -> str:
        """Return why the server must be started again; empty if it has ended."""
        silent = 0
        while silent < SILENT_MAX:
            await asyncio.wait([ending], timeout=WATCH_S)
            if ending.done():
                return ""
            silent = 0 if await self._answers() else silent + 1
        return f"it no longer answered GET {self._upstream.ready}, and was ended"

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(WATCH_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    host = f"127.0.0.1:{self._port}"
                    head = f"GET {self._upstream.ready} HTTP/1.1\r\nHost: {host}\r\n"
                    writer.write(f"{head}Connection: close\r\n\r\n".encode())
                    words = (await reader.readline()).split()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):
            return False
        return len(words) > 1 and words[1].startswith(b"2")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Keep the last lines of the output, and log all of it for debugging."""
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-(1 << 16) :]
            for line in lines:
                self._keep(line)
        self._keep(rest)

    def _keep(self, line: bytes) -> None:
        if text := line.decode(errors="replace").strip()[:_LINE_CHARS]:
            self._lines.append(text)
            log.debug("server: %s", text, extra={"model": self._model})

    def _command(self) -> list[str]:
        """Return the words of the command, with its placeholders replaced."""
        values = {
            "{port}": str(self._port),
            "{model}": self._upstream.model or self._model,
            "{gpus}": str(self._upstream.gpus),
        }
        words = shlex.split(self._upstream.command or "")
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        return words

    def _environment(self, devices: Sequence[str]) -> dict[str, str]:
        visible = self._environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",")] if visible else None
        indices = [int(device.partition(":")[2] or 0) for device in devices]
        chosen = [names[index] if names else str(index) for index in indices]
        return {
            **self._environ,
            "CUDA_VISIBLE_DEVICES": ",".join(chosen),
            **self._upstream.environment,
        }

    def _set(self, *, ready: bool, problem: str | None) -> None:
        self.ready, self.problem = ready, problem
        self._changed()


def _end_of(status: int, *, was_ready: bool) -> str:
    if status == guard.NOT_FOUND:
        return "its command was not found; install it, or name its path in `command`"
    when = "after it had been ready" if was_ready else "before it was ready"
    signal = f" (signal {status - 128})" if status > 128 else ""
    return f"it ended with status {status}{signal} {when}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
