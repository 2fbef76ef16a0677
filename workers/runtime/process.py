"""The engine process: one step loop over the engines of one device.

The agent starts it with one end of a socket. The process ends with its agent: when the socket is
closed and, on Linux, also by a signal of the kernel, so that a killed agent leaves no process
behind that occupies the device. It knows neither queue nor leases; if it crashes, its agent
requeues its jobs. Commands are read between steps, without blocking while there is work.

Models are loaded one by one, in the order of the catalog, as long as they fit the memory; the
others are loaded for their first job, in place of models that are not used. Each is served as soon
as it is loaded; while the next one loads, running jobs wait. Models can be added and removed at any
time.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from workers.contract.jobs import Failed
from workers.contract.models import ModelSpec
from workers.engines import registry
from workers.failures import DeviceLostError
from workers.logs import configure_logging
from workers.protocol.ipc import (
    AddModel,
    Admit,
    Cancel,
    Command,
    Configure,
    KeepAlive,
    Loaded,
    Loading,
    LoadModel,
    Measure,
    Ready,
    RemoveModel,
    Report,
    Stepped,
    Unloaded,
    Withdraw,
    Withdrawn,
    command_unpacker,
    pack,
)
from workers.pulse import PULSE
from workers.runtime.background import Background, StuckError
from workers.runtime.lanes import Lane
from workers.runtime.measuring import measure
from workers.runtime.residency import Change
from workers.runtime.step_loop import NOT_LOADED, StepLoop

log = logging.getLogger(__name__)

EXIT_DEVICE_LOST: Final = 3
EXIT_STUCK: Final = 4
_READ_BYTES: Final = 1 << 18
_PARTIAL_MS: Final = 5
"""Time to wait for the rest of a command before the next step."""
_PR_SET_PDEATHSIG: Final = 1
_LOAD_PAUSE_S: Final = 1.0
"""Time for running jobs between two loads. Without jobs, one load follows the other."""
_IDLE_S: Final = 1.0
"""Time without jobs after which freed memory is returned to the system."""
_THREADS: Final = 4
"""Threads that read and write files beside the loop; they use no device and rarely hold the GIL."""


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
        """End ``wait``, from any thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wakes
            os.write(self._wake_end, b"!")

    def wait(self, seconds: float | None) -> bool:
        """Wait for a command or ``wake``, at most ``seconds``. Return whether there was one."""
        readable = self._readable.poll(None if seconds is None else seconds * 1000)
        for source, _ in readable:
            if source == self._wait_end:
                os.read(self._wait_end, _READ_BYTES)
        return bool(readable)

    def receive(self, *, wait: bool = False) -> list[Command]:
        """Return the commands received, with ``wait`` at least one. Raise ``EOFError`` at the end.

        A partly received command is read to its end as long as data keeps arriving: an image does
        not fit into the socket's buffer, and only one buffer would be read per step.
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
        """Send a report, from any thread."""
        packed = pack(report)
        with self._sending:
            self._socket.sendall(packed)


def serve(connection: Connection) -> None:
    """Run the loop until the socket is closed. Raise ``DeviceLostError`` if the device is lost."""
    configure, *rest = connection.receive(wait=True)
    assert isinstance(configure, Configure)
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="background")
    waiting: dict[str, ModelSpec] = {}
    loop = StepLoop(
        worker=configure.worker,
        now_us=_now_us,
        unix_ms=lambda: time.time_ns() // 1_000_000,
        background=Background(_now_us, pool.submit, connection.wake),
        budget_bytes=configure.budget_bytes,
        expected=waiting.keys(),
    )
    PULSE.send = lambda: connection.send(KeepAlive())
    preload = configure.preload
    _apply(loop, list(map(AddModel, configure.models)), connection, waiting, preload=preload)
    connection.send(Ready())
    _apply(loop, rest, connection, waiting, preload=preload)
    next_load_s = 0.0
    while True:
        if not waiting and (patience_s := loop.patience_s) != 0.0:
            _wait(connection, patience_s)
        _apply(loop, connection.receive(), connection, waiting, preload=preload)
        if waiting and (loop.idle or time.monotonic() >= next_load_s):
            _start(loop, waiting.pop(next(iter(waiting))), connection)
            next_load_s = time.monotonic() + _LOAD_PAUSE_S
        # One change for each turn: a model that was loaded for its jobs must admit them first.
        if loop.residency.is_pending and (change := loop.residency.next()) is not None:
            _carry_out(loop, change, connection)
        if not loop.idle:
            report = loop.turn()
            connection.send(Stepped(loop.busy_us, tuple(report.events), tuple(report.outcomes)))


def _wait(connection: Connection, patience_s: float | None) -> None:
    """Wait for a command, without ``patience_s`` until one comes; then nothing is computed, and
    freed memory is returned."""
    if patience_s is None:
        if connection.wait(_IDLE_S):
            return
        _trim()
    connection.wait(patience_s)


def _start(loop: StepLoop, spec: ModelSpec, connection: Connection) -> None:
    """Create the engine of a model, and load it if that needs no other model's memory."""
    connection.send(Loading(spec.name))
    if not _create(loop, spec, connection):
        return
    lane, residency = loop.lanes[spec.name], loop.residency
    if residency.fits(lane):
        _load(loop, lane.model, connection)
    elif (problem := residency.problem(lane)) is not None:
        _carry_out(loop, Change(lane, problem=problem), connection)
    else:
        connection.send(Unloaded(lane.model))


def _create(loop: StepLoop, spec: ModelSpec, connection: Connection) -> bool:
    """Create the engine of a model. Report a failure, and return whether it succeeded."""
    # Imports leave no garbage, and collections would take a sixth of their time.
    gc.disable()
    try:
        loop.add(spec.name, registry.create(spec), weight=registry.serving(spec).weight)
    except Exception as error:
        log.exception("could not create an engine", extra={"model": spec.name})
        connection.send(Loaded(spec.name, f"{type(error).__name__}: {error}"))
        return False
    finally:
        gc.enable()
        gc.freeze()
    return True


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _apply(
    loop: StepLoop,
    commands: Sequence[Command],
    connection: Connection,
    waiting: dict[str, ModelSpec],
    *,
    preload: bool,
) -> None:
    """Apply commands. A job of a model that is ``waiting`` to be loaded loads it now."""
    for command in commands:
        match command:
            case Admit(jobs):
                for handed in jobs:
                    if handed.job.model in waiting:
                        _start(loop, waiting.pop(handed.job.model), connection)
                    if handed.job.model not in loop.lanes:  # its engine could not be created
                        failed = Failed("model_load_failed", NOT_LOADED, worker=loop.worker)
                        outcome = (handed.job.request_id, failed)
                        connection.send(Stepped(loop.busy_us, (), (outcome,)))
                        continue
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
            case AddModel(spec) if preload:
                waiting[spec.name] = spec
            case AddModel(spec):
                _create(loop, spec, connection)
            case LoadModel(model):
                if model in waiting:
                    _start(loop, waiting.pop(model), connection)
                if (lane := loop.lanes.get(model)) is not None:
                    lane.wished = not lane.loaded
            case Measure():
                connection.send(measure(loop))
            case RemoveModel(model):
                if waiting.pop(model, None) is None:
                    loop.remove(model)
                    _trim()


def _carry_out(loop: StepLoop, change: Change, connection: Connection) -> None:
    model = change.load.model
    if change.problem is not None:
        log.error("a model does not fit", extra={"model": model, "problem": change.problem})
        loop.refuse(model, change.problem)
        connection.send(Loaded(model, change.problem))
        return
    for lane in change.unload:
        _unload(loop, lane, connection, in_favour_of=model)
    _load(loop, model, connection)


def _unload(loop: StepLoop, lane: Lane, connection: Connection, *, in_favour_of: str) -> None:
    log.info("model unloaded", extra={"model": lane.model, "in_favour_of": in_favour_of})
    loop.unload(lane.model)
    _trim()
    connection.send(Unloaded(lane.model))


def _trim() -> None:
    """Return what an engine has freed to the system."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _load(loop: StepLoop, model: str, connection: Connection) -> None:
    connection.send(Loading(model))
    problem = loop.load(model)
    gc.collect()
    gc.freeze()  # weights live long; exclude them from collections
    lane = loop.lanes[model]
    if problem is None and not lane.loaded:
        connection.send(Unloaded(model))
        return
    runs_on = lane.hardware
    if problem is None:
        place = {"model": model, "device": runs_on.device, "dtype": runs_on.dtype}
        log.info("model loaded", extra=place)
    connection.send(Loaded(model, problem, runs_on.device, runs_on.dtype))
    for other in loop.residency.excess(lane):
        _unload(loop, other, connection, in_favour_of=model)


def _die_with_agent(connected: socket.socket) -> None:
    """End this process with its agent, even during a long step."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    hangup = select.poll()
    hangup.register(connected, 0)

    def wait() -> None:
        hangup.poll()
        os._exit(0)

    threading.Thread(target=wait, name="hangup", daemon=True).start()


def main() -> None:
    # The agent decides when this process ends; Ctrl-C signals the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    configure_logging(os.environ.get("TOLLGATE_LOG_LEVEL", "INFO"))
    connected = socket.socket(fileno=int(sys.argv[1]))
    _die_with_agent(connected)
    try:
        serve(Connection(connected))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except StuckError as error:
        log.critical("background task is stuck: %s", error)
        os._exit(EXIT_STUCK)  # an ordinary exit would wait for its thread
    except DeviceLostError as error:
        log.critical("device lost: %s", error)
        os._exit(EXIT_DEVICE_LOST)  # an ordinary exit would wait for the lost device


if __name__ == "__main__":
    main()
