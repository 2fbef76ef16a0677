"""A door before a server that can be shut without closing a connection: a black hole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class Gate:
    """Forwards connections to a Unix socket while it is open; shut, it accepts and stays silent."""

    def __init__(self, socket: Path) -> None:
        self.port = 0
        self._socket = socket
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            near, far = await asyncio.open_unix_connection(str(self._socket))
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._pump(reader, far)),
            asyncio.create_task(self._pump(near, writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (far, writer):
            end.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()


@contextlib.asynccontextmanager
async def gate(socket: Path) -> AsyncIterator[Gate]:
    """Yield a gate that listens on a port of this machine."""
    made = Gate(socket)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
