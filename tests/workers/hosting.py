"""Shared by tests of upstream models: a replacement of the agent, and servers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from tests.workers.running import PATIENCE_S
from workers.contract.jobs import Completed, Event, Failed, Outcome, RequestId
from workers.contract.models import ModelSpec
from workers.upstreams.host import UpstreamHost


class Hosted(Protocol):
    host: UpstreamHost


class Service(Protocol):
    port: int

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...


class Caller:
    """Replaces the agent, for one model and one request."""

    def __init__(self, spec: ModelSpec, environ: Mapping[str, str]) -> None:
        self.events: list[Event] = []
        self.outcomes: list[Outcome] = []
        self.changed = asyncio.Event()
        self.host = UpstreamHost([spec], worker="w1", environ=environ, report=self.on_report)

    def on_report(
        self,
        events: Sequence[tuple[RequestId, Event]],
        outcomes: Sequence[tuple[RequestId, Outcome]],
    ) -> None:
        self.events += [event for _, event in events]
        self.outcomes += [outcome for _, outcome in outcomes]
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ends(self) -> Outcome:
        await self.until(lambda: self.outcomes)
        assert len(self.outcomes) == 1
        return self.outcomes[0]

    async def completes(self) -> Completed:
        outcome = await self.ends()
        assert isinstance(outcome, Completed), outcome
        return outcome

    async def fails(self) -> Failed:
        outcome = await self.ends()
        assert isinstance(outcome, Failed), outcome
        return outcome


@contextlib.asynccontextmanager
async def running(caller: Hosted) -> AsyncIterator[None]:
    task = asyncio.create_task(caller.host.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def listening(service: Service, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Serve on a free port and store it in the service."""
    tasks: set[asyncio.Task[None]] = set()

    def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(service.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connect, "127.0.0.1", 0, ssl=tls)
    service.port = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the connections are closed in the loop's next iteration
