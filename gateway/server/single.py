"""One process of a gateway: uvicorn around the application, on its own socket or an inherited one.

The console has a process of its own beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import socket
import sys
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE

from gateway import metrics
from gateway.api.direct import Direct
from gateway.api.http.request import Services
from gateway.api.http.stopping import answered_when_stopped
from gateway.app import create_app
from gateway.server.console import KEPT_S, ConsoleProcess, PassedOn, Received
from gateway.server.protocol import bounded_by
from gateway.settings import Settings


def serve(
    settings: Settings, *, descriptor: int | None = None, console_socket: str | None = None
) -> None:
    """Serve until SIGINT or SIGTERM.

    ``descriptor`` is a listening socket that the parent process opened, ``console_socket`` that of
    the console's process. Without the former, this process is the whole gateway but the console.
    """
    with contextlib.ExitStack() as stack:
        console = None
        if descriptor is None and settings.console:
            console = stack.enter_context(ConsoleProcess(settings))
            console_socket = console.socket_path
            metrics.add_from(console.counters)
        is_alone = descriptor is None and console is None
        app = create_app(settings, part="all" if is_alone else "gateway")
        served: ASGIApp = Direct(app)
        if console_socket is not None:
            served = PassedOn(served, console_socket)
        config = uvicorn.Config(answered_when_stopped(served), **_bounds(settings))
        sockets = None if descriptor is None else [socket.socket(fileno=descriptor)]
        _run(Server(config, app, console), app, sockets)


def serve_console(settings: Settings, descriptor: int) -> None:
    """Serve what a gateway passes on, on a listening Unix socket, until SIGTERM."""
    app = create_app(settings, part="console")
    config = uvicorn.Config(
        Received(answered_when_stopped(app)),
        **_bounds(settings),
        timeout_keep_alive=int(2 * KEPT_S),
        date_header=False,
        proxy_headers=False,
    )
    _run(Server(config, app), app, [socket.socket(fileno=descriptor)])


def _bounds(settings: Settings) -> dict[str, Any]:
    return {
        "host": settings.host,
        "port": settings.port,
        "access_log": False,
        "server_header": False,
        "log_config": None,
        "timeout_graceful_shutdown": int(settings.shutdown_grace_s),
        "http": bounded_by(settings),
        "ws": "none",
    }


def _run(server: Server, app: Litestar, sockets: list[socket.socket] | None) -> None:
    faulthandler.enable()  # a crash in native code leaves a traceback in the log
    # Threads wake the event loop sooner after a commit; by default a busy loop keeps the GIL 5 ms.
    sys.setswitchinterval(0.0005)
    app.on_startup.append(tune_garbage_collection)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets)
    if not server.started:
        sys.exit(STARTUP_FAILURE)


class Server(uvicorn.Server):
    """Ends the console's live updates when it stops; it would wait for these streams."""

    def __init__(
        self, config: uvicorn.Config, app: Litestar, console: ConsoleProcess | None = None
    ) -> None:
        super().__init__(config)
        self._app = app
        self._console = console

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._console is not None and self.started:
            services: Services = self._app.state.services
            services.supervisor.start("console process", self._console.run)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if "live_updates" in self._app.state:
            self._app.state.live_updates.close()
        if self._console is None:
            await super().shutdown(sockets)
        else:
            await asyncio.gather(super().shutdown(sockets), self._console.stop())


def tune_garbage_collection() -> None:
    """Collect rarely, and never what startup made: it lives as long as the process.

    A request creates few cycles, but a full collection would stop every request for 100 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
