"""A proxy to a real queue server that loses answers: it forwards commands, then disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator


class LossyProxy:
    """Drops the next ``lose`` answers, each with its connection."""

    def __init__(self, socket: str) -> None:
        self.lose = 0
        self._socket = socket
        self._served: set[asyncio.Task[None]] = set()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._served.add(asyncio.create_task(self._serve(reader, writer)))

    async def close(self) -> None:
        for task in self._served:
            task.cancel()
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, server = await asyncio.open_unix_connection(self._socket)
        requests = asyncio.create_task(self._forward(reader, server))
        try:
            while answer := await answers.read(1 << 20):
                if self.lose:
                    self.lose -= 1
                    break
                writer.write(answer)
        finally:
            requests.cancel()
            for end in (writer, server):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _forward(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while request := await reader.read(1 << 20):
            server.write(request)
        server.close()


@contextlib.asynccontextmanager
async def lossy_proxy(server_url: str) -> AsyncIterator[tuple[LossyProxy, str]]:
    """Yield the proxy and its URL."""
    proxy = LossyProxy(server_url.removeprefix("unix://"))
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        socket = f"{directory}/p"
        server = await asyncio.start_unix_server(proxy.serve, socket)
        try:
            yield proxy, f"unix://{socket}"
        finally:
            server.close()
            await server.wait_closed()
            await proxy.close()
