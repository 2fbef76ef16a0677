"""A proxy before a real queue server that loses answers: it forwards, and then breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator


class LossyProxy:
    """Loses the next ``lose`` answers, each together with its connection."""

    def __init__(self, socket: str) -> None:
        self.lose = 0
        self._socket = socket

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
        try:
            while request := await reader.read(1 << 20):
                server_writer.write(request)
                answer = await server_reader.read(1 << 20)
                if self.lose:
                    self.lose -= 1
                    break
                writer.write(answer)
        finally:
            for end in (writer, server_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()


@contextlib.asynccontextmanager
async def lossy_proxy(server_url: str) -> AsyncIterator[tuple[LossyProxy, str]]:
    """Yield the proxy and its address."""
    proxy = LossyProxy(server_url.removeprefix("unix://"))
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        socket = f"{directory}/p"
        server = await asyncio.start_unix_server(proxy.serve, socket)
        try:
            yield proxy, f"unix://{socket}"
        finally:
            server.close()
            await server.wait_closed()
