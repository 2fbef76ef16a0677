"""The process that computes: one step loop over the engines of one device, fed by its agent.

Started by the agent with one end of a socket, it ends with the agent: when that hangs up, and on
Linux also by the kernel, so that an agent that was killed leaves nobody behind who holds the
device. It knows no queue and no lease; if it dies, everything in it is the agent's to give back.
Commands are read between steps, without blocking while there is work.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from workers.engines import registry
from workers.logs import configure_logging
from workers.protocol.ipc import (
    Admit,
    Cancel,
    Command,
    Configure,
    Loaded,
    Loading,
    Moving,
    Ready,
    Report,
    Stepped,
    Withdraw,
    Withdrawn,
    command_unpacker,
    pack,
)
from workers.pulse import PULSE
from workers.runtime.background import Background, StuckError
from workers.runtime.step_loop import DeviceLostError, StepLoop

log = logging.getLogger(__name__)

EXIT_DEVICE_LOST: Final = 3
EXIT_STUCK: Final = 4
_READ_BYTES: Final = 1 << 18
_PARTIAL_MS: Final = 5
"""How long the next piece of a command may take before the step goes on without it."""
_PR_SET_PDEATHSIG: Final = 1
_THREADS: Final = 4
"""Of those that read and write files beside the loop. They hold no device, and mostly no lock."""


class Connection:
    """The engine process's end of the socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unpacker = command_unpacker()
        self._incoming = select.poll()
        self._incoming.register(connected, select.POLLIN)
        self._sending = threading.Lock()
        self._wait_end, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        self._readable = select.poll()
        for source in (connected.fileno(), self._wait_end):
            self._readable.register(source, select.POLLIN)

    def wake(self) -> None:
        """End a wait, from any thread."""
        with contextlib.suppress(BlockingIOError):  # full of wakes already
            os.write(self._wake_end, b"!")

    def wait(self, seconds: float | None) -> None:
        """Wait until something comes or somebody wakes, at most so long."""
        for source, _ in self._readable.poll(None if seconds is None else seconds * 1000):
            if source == self._wait_end:
                os.read(self._wait_end, _READ_BYTES)

    def receive(self, *, wait: bool = False) -> list[Command]:
        """Return the commands that have come, with ``wait`` at least one; raise at the end.

        A command that has begun is read to its end if it keeps coming: a picture does not fit into
        the socket, and would otherwise come in by one piece a step.
        """
        commands: list[Command] = []
        while True:
            flags = 0 if wait and not commands else socket.MSG_DONTWAIT
            try:
                data = self._socket.recv(_READ_BYTES, flags)
            except BlockingIOError:
                if self._unpacker.is_midway and self._incoming.poll(_PARTIAL_MS):
                    continue
                return commands
            if not data:
                raise EOFError
            commands += self._unpacker.feed(data)
            if commands and len(data) < _READ_BYTES and not self._unpacker.is_midway:
                return commands

    def send(self, report: Report) -> None:
        """Send a whole report, from any thread."""
        packed = pack(report)
        with self._sending:
            self._socket.sendall(packed)


def serve(connection: Connection) -> None:
    """Run the loop until the agent hangs up. Raise ``DeviceLostError`` if the device is gone."""
    configure, *rest = connection.receive(wait=True)
    assert isinstance(configure, Configure)
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="background")
    loop = StepLoop(
        worker=configure.worker,
        now_us=_now_us,
        unix_ms=lambda: time.time_ns() // 1_000_000,
        background=Background(_now_us, pool.submit, connection.wake),
    )
    for spec in configure.models:
        try:
            loop.add(spec.name, registry.create(spec), weight=registry.serving(spec).weight)
        except Exception as error:
            log.exception("engine could not be made", extra={"model": spec.name})
            connection.send(Loaded(spec.name, f"{type(error).__name__}: {error}"))
            continue
        if configure.preload:
            _load(loop, spec.name, connection)
    PULSE.tell = lambda: connection.send(Moving())
    connection.send(Ready())
    _apply(loop, rest, connection)
    while True:
        if (patience_s := loop.patience_s) != 0.0:
            connection.wait(patience_s)
        _apply(loop, connection.receive(), connection)
        while model := loop.missing_model:
            _load(loop, model, connection)
        if not loop.idle:
            report = loop.turn()
            connection.send(Stepped(loop.busy_us, tuple(report.events), tuple(report.outcomes)))


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _apply(loop: StepLoop, commands: list[Command], connection: Connection) -> None:
    for command in commands:
        match command:
            case Admit(jobs):
                for handed in jobs:
                    loop.admit(
                        handed.job,
                        queue_us=handed.queue_us,
                        leased_us=handed.leased_us,
                        files=handed.files,
                    )
            case Cancel(request_id, reason):
                loop.cancel(request_id, reason)
            case Withdraw():
                connection.send(Withdrawn(tuple(loop.withdraw())))


def _load(loop: StepLoop, model: str, connection: Connection) -> None:
    connection.send(Loading(model))
    problem = loop.load(model)
    gc.collect()
    gc.freeze()  # weights live as long as the process; no collection need look at them again
    connection.send(Loaded(model, problem))


def _die_with_agent(connected: socket.socket) -> None:
    """End this process when its agent does, even in the middle of a long step."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    hangup = select.poll()
    hangup.register(connected, 0)

    def wait() -> None:
        hangup.poll()
        os._exit(0)

    threading.Thread(target=wait, name="hangup", daemon=True).start()


def main() -> None:
    # The agent decides when this process ends; a Ctrl-C goes to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(os.environ.get("TOLLGATE_LOG_LEVEL", "INFO"))
    connected = socket.socket(fileno=int(sys.argv[1]))
    _die_with_agent(connected)
    try:
        serve(Connection(connected))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except StuckError as error:
        log.critical("work does not end: %s", error)
        os._exit(EXIT_STUCK)  # nor would its thread
    except DeviceLostError as error:
        log.critical("device lost: %s", error)
        os._exit(EXIT_DEVICE_LOST)  # an ordinary exit would wait for a device that is gone


if __name__ == "__main__":
    main()
