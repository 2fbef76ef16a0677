"""The console in a process of its own, which its first visit starts, at a lower priority.

Pages are rendered by Python, which runs one thread at a time: within a gateway, each page would
delay the tokens of every stream. The gateway passes calls below ``/console`` on to a Unix socket;
the process behind it is a gateway that runs no scheduled work and settles nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Final, Self

import httpx
from litestar.types import ASGIApp, Receive, Send

from gateway.api.front import is_console
from gateway.metrics import DIRECTORY_VARIABLE
from gateway.settings import Settings
from gateway.supervision import IDLE_BEAT_S, STOP_MARGIN_S, Beat, no_beat
from gateway.up.children import Child
from gateway.up.queue_server import die_with_parent

log = logging.getLogger(__name__)

BACKLOG: Final = 512
NICENESS: Final = 5
SILENCE_S: Final = 60.0
"""Time without a byte after which an answer counts as lost. The process may have to start first."""
KEPT_S: Final = 30.0
"""Time for which an idle connection to the process is kept; the process keeps it longer."""
ORIGIN: Final = b"tollgate-origin"
"""Header with what the process cannot see of a connection that the gateway accepted."""
_OF_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"}
)
"""Headers about one connection, which are not passed on."""
_GONE: Final = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Not available \
at the moment</title></head><body><h1>Not available at the moment</h1><p>The process that serves \
the console does not answer. Look at what has changed before you repeat what you did.</p></body>\
</html>"""


class ConsoleProcess:
    """The socket of the console's process, and the process, from the first connection on."""

    def __init__(self, settings: Settings, *, counters: str | None = None) -> None:
        """``counters`` is where the processes of this gateway share metrics."""
        self._directory = tempfile.mkdtemp(prefix="tollgate-console-")
        self.socket_path: Final = str(Path(self._directory) / "socket")
        self.counters: Final = counters or self._directory
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.socket_path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        number = self._listener.fileno()
        self._child = Child(
            "console",
            (sys.executable, "-m", "gateway", "serve", "--console", "--descriptor", str(number)),
            {**os.environ, DIRECTORY_VARIABLE: self.counters},
            report=log.error,
            descriptors=(number,),
            prepare=_prepare,
            stop_s=settings.shutdown_grace_s + STOP_MARGIN_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def run(self, beat: Beat = no_beat) -> None:
        """Start the process when somebody connects, and keep it running, until cancelled."""
        loop, wanted = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener.fileno(), wanted.set)
        try:
            await _beside(beat, wanted.wait())
        finally:
            loop.remove_reader(self._listener.fileno())
        await self._child.start()
        await _beside(beat, self._child.keep_running())
        # It was stopped, as the gateway will be in a moment.
        await _beside(beat, asyncio.Event().wait())

    async def stop(self) -> None:
        await self._child.stop()


async def _beside(beat: Beat, work: Coroutine[Any, Any, Any]) -> None:
    """Beat until ``work`` ends."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            beat()
            await asyncio.wait((task,), timeout=IDLE_BEAT_S)
        await task
    finally:
        task.cancel()


def _prepare() -> None:
    die_with_parent()
    # The gateway announces a reload to it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(NICENESS)


class PassedOn:
    """Wraps the gateway: calls of the console are passed on to its process."""

    def __init__(self, app: ASGIApp, socket_path: str) -> None:
        self._app = app
        self._transport = httpx.AsyncHTTPTransport(
            uds=socket_path,
            limits=httpx.Limits(max_keepalive_connections=16, keepalive_expiry=KEPT_S),
        )

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_console(scope["path"]):
            await self._app(scope, receive, send)
            return
        client = _Client(receive)
        answering = asyncio.ensure_future(self._answer(scope, client, send))
        leaving = asyncio.ensure_future(client.left())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            ends = await asyncio.gather(answering, leaving, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _answer(self, scope: Any, client: _Client, send: Send) -> None:
        began = False
        try:
            answer = await self._transport.handle_async_request(_request(scope, client))
            try:
                headers = [
                    (name.lower(), value)
                    for name, value in answer.headers.raw
                    if name.lower() not in _OF_CONNECTION
                ]
                began = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status_code,
                        "headers": headers,
                    }
                )
                async for chunk in answer.stream:  # type: ignore[union-attr]
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            finally:
                await answer.aclose()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except _Left:
            return
        except httpx.HTTPError as error:
            log.warning("the console's process did not answer: %s", type(error).__name__)
            if began:
                raise  # uvicorn closes the connection, so that nobody takes the part for the whole
            await _send_gone(send)


class _Left(Exception):
    """The client has closed the connection before it sent all."""


class _Client:
    """The sender of a call: its body, and whether it has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._complete = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message: Any = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Left
            more = message.get("more_body", False)
            if chunk := message.get("body", b""):
                yield chunk
        self._complete.set()

    def without_body(self) -> None:
        self._complete.set()

    async def left(self) -> None:
        """Return when the client has closed the connection, after it has sent all."""
        await self._complete.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _request(scope: Any, client: _Client) -> httpx.Request:
    origin = {"scheme": scope["scheme"], "client": scope["client"], "server": scope["server"]}
    names = {name for name, _ in scope["headers"]}
    headers = [
        *(
            (name, value)
            for name, value in scope["headers"]
            if name not in _OF_CONNECTION and name != ORIGIN
        ),
        (ORIGIN, json.dumps(origin).encode()),
    ]
    body: AsyncIterator[bytes] | None = None
    if b"content-length" in names or b"transfer-encoding" in names:
        body = client.body()
    else:
        client.without_body()
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    return httpx.Request(
        scope["method"],
        "http://console",
        headers=headers,
        content=body,
        extensions={
            "target": target,
            "timeout": {"connect": SILENCE_S, "read": SILENCE_S, "write": None, "pool": None},
        },
    )


async def _send_gone(send: Send) -> None:
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(_GONE)).encode()),
        (b"content-security-policy", b"default-src 'none'"),
        (b"cache-control", b"no-store"),
        (b"retry-after", b"2"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _GONE, "more_body": False})


class Received:
    """Wraps the console's process: a call is as the gateway received it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = next(value for name, value in scope["headers"] if name == ORIGIN)
            scope["headers"] = [each for each in scope["headers"] if each[0] != ORIGIN]
            scope.update(json.loads(origin))
        await self._app(scope, receive, send)
