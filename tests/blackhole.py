"""A network before a real server that goes silent: it accepts everything and answers nothing.

``silent`` holds what is on its way and delivers it later, like a server that was stopped; ``lossy``
never delivers it, like a cut cable, and breaks those connections off once it is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class BlackHole:
    """Runs in a thread of its own, in front of a Unix socket; ``port`` is on 127.0.0.1."""

    def __init__(self, socket: str) -> None:
        self.port = 0
        self._socket = socket
        self._lossy = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def go_silent(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def lose_everything(self) -> None:
        self._lossy = True
        self.go_silent()

    def mend(self) -> None:
        self._lossy = False
        self._loop.call_soon_threadsafe(self._open.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open, self._ended = asyncio.Event(), asyncio.Event()
        self._open.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            theirs, ours = await asyncio.open_unix_connection(self._socket)
            ends.append(ours)
            pumps = [
                asyncio.ensure_future(self._pump(reader, ours)),
                asyncio.ensure_future(self._pump(theirs, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in ends:
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            lost = self._lossy
            await self._open.wait()
            if lost:
                return
            writer.write(data)
            await writer.drain()

    def __enter__(self) -> BlackHole:
        self._thread.start()
        assert self._ready.wait(timeout=10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=10)


@contextlib.contextmanager
def black_hole(socket: str) -> Iterator[BlackHole]:
    with BlackHole(socket) as made:
        yield made
