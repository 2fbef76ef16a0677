"""Several gateway processes that share one socket, for machines with many cores.

The kernel gives each connection to a process that is ready for it. The supervisor forwards SIGHUP,
restarts a process that exits, and exits itself if a process keeps failing. Every limit of a gateway
(bodies in flight, connections) applies to each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from typing import Final

from prometheus_client import multiprocess

from gateway.metrics import DIRECTORY_VARIABLE
from gateway.server.console import ConsoleProcess
from gateway.settings import Settings
from gateway.supervision import EXIT_CODE, STOP_MARGIN_S
from gateway.up.children import Child
from gateway.up.queue_server import die_with_parent

BACKLOG: Final = 2048
CHECK_S: Final = 0.5

log = logging.getLogger(__name__)


def serve_in_processes(settings: Settings, count: int) -> None:
    """Serve until SIGINT or SIGTERM. Raise ``OSError`` if the address cannot be used."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(settings))
        counters = tempfile.mkdtemp(prefix="tollgate-metrics-")
        stack.callback(shutil.rmtree, counters, ignore_errors=True)
        console = None
        if settings.console:
            console = stack.enter_context(ConsoleProcess(settings, counters=counters))
        code = asyncio.run(_supervise(settings, count, listener, counters, console))
    if code:
        sys.exit(code)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)


async def _supervise(
    settings: Settings,
    count: int,
    listener: socket.socket,
    counters: str,
    console: ConsoleProcess | None,
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    command = [sys.executable, "-m", "gateway", "serve", "--descriptor", str(listener.fileno())]
    if console is not None:
        command += ["--console-socket", console.socket_path]
    children = [
        Child(
            f"gateway process {number}",
            command,
            {**os.environ, DIRECTORY_VARIABLE: counters},
            report=log.error,
            descriptors=(listener.fileno(),),
            prepare=_prepare,
            on_exit=functools.partial(_forget, counters),
            stop_s=settings.shutdown_grace_s + STOP_MARGIN_S,
        )
        for number in range(1, count + 1)
    ]

    def reload() -> None:
        for child in children:
            child.signal(signal.SIGHUP)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    for child in children:
        await child.start()
    tasks = [asyncio.create_task(child.keep_running()) for child in children]
    if console is not None:
        tasks.append(asyncio.create_task(console.run()))
    log.info("%d processes serve on %s:%d", count, settings.host, settings.port)
    try:
        while not stop.is_set():
            if any(child.keeps_failing for child in children):
                log.critical("this gateway exits: one of its processes keeps failing")
                return EXIT_CODE
            for task in tasks:
                if task.done():
                    task.result()
            await _wait(stop)
        return 0
    finally:
        ending = [child.stop() for child in children]
        if console is not None:
            ending.append(console.stop())
        await asyncio.gather(*ending)
        for task in tasks:
            task.cancel()


def _prepare() -> None:
    """Run in a new process: until it can reload the catalog, SIGHUP must not end it."""
    die_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _forget(counters: str, pid: int) -> None:
    """Drop the gauges of a process that exited; its counters stay in the sums."""
    multiprocess.mark_process_dead(pid, counters)  # type: ignore[no-untyped-call]


async def _wait(stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CHECK_S):
            await stop.wait()
