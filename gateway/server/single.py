"""One gateway process: uvicorn around the application, on its own socket or an inherited one."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import socket
import sys

import uvicorn
from litestar import Litestar
from uvicorn.config import STARTUP_FAILURE

from gateway.api.direct import Direct
from gateway.api.http.stopping import answered_when_stopped
from gateway.app import create_app
from gateway.server.protocol import bounded_by
from gateway.settings import Settings


def serve(settings: Settings, *, descriptor: int | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    ``descriptor`` is a listening socket that the parent process opened.
    """
    faulthandler.enable()  # a crash in native code leaves a traceback in the log
    # Threads wake the event loop sooner after a commit; by default a busy loop keeps the GIL 5 ms.
    sys.setswitchinterval(0.0005)
    app = create_app(settings)
    app.on_startup.append(tune_garbage_collection)
    config = uvicorn.Config(
        answered_when_stopped(Direct(app)),
        host=settings.host,
        port=settings.port,
        access_log=False,
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
        http=bounded_by(settings),
        ws="none",
    )
    server = Server(config, app)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(None if descriptor is None else [socket.socket(fileno=descriptor)])
    if not server.started:
        sys.exit(STARTUP_FAILURE)


class Server(uvicorn.Server):
    """Ends the console's live updates when it stops; it would wait for these streams."""

    def __init__(self, config: uvicorn.Config, app: Litestar) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if "live_updates" in self._app.state:
            self._app.state.live_updates.close()
        await super().shutdown(sockets)


def tune_garbage_collection() -> None:
    """Collect rarely, and never what startup made: it lives as long as the process.

    A request creates few cycles, but a full collection would stop every request for 100 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
