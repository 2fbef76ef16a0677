"""Workers as separate processes, and the gateway's side of their queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from workers.contract.jobs import (
    BlobRef,
    Event,
    Job,
    Outcome,
    RequestId,
    SentEvent,
    decode_frame,
    decode_outcome,
    encode,
)
from workers.contract.queue import Queue, QueueEntry
from workers.contract.streams import Delivery, Mailbox, Outcomes

PATIENCE_S = 40
"""Timeout of a test that waits for something that must happen."""


class Worker:
    """A ``tollgate-worker`` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.name = ""

    async def until_ready(self) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            line = (await self.process.stdout.readline()).decode().split()
        assert line[:2] == ["worker", "ready"], line
        self.name = line[2]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ends(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])


@dataclass
class Gateway:
    """Enqueues jobs and receives their events, like a gateway; also refills a wiped queue."""

    redis: Redis
    namespace: str
    home: Path
    url: str
    models: Sequence[str] = ("echo",)
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    deliveries: dict[RequestId, list[Delivery]] = field(default_factory=dict)
    events: dict[RequestId, list[SentEvent]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(self.redis, "gw1", namespace=self.namespace)

    @property
    def blob_url(self) -> str:
        return (self.home / "blobs").as_uri()

    def queue(self, model: str = "echo") -> Queue:
        return Queue(self.redis, model, namespace=self.namespace)

    async def submit(
        self,
        text: str,
        *,
        model: str = "echo",
        stream: bool = False,
        deadline_ms: int = 0,
        attachments: tuple[BlobRef, ...] = (),
        **chat: Any,
    ) -> RequestId:
        request_id = RequestId(f"req_{len(self.jobs):032x}")
        self.jobs[request_id] = Job(
            request_id,
            "acc",
            model,
            "text-generation",
            {"messages": [{"role": "user", "content": text}], "max_tokens": 100_000} | chat,
            stream=stream,
            deadline_ms=deadline_ms,
            attachments=attachments,
        )
        await self.enqueue(request_id)
        return request_id

    async def enqueue(self, *request_ids: RequestId) -> None:
        for model in self.models:
            entries = [
                QueueEntry(
                    id=job.request_id,
                    account=job.account_id,
                    payload=encode(job),
                    cost=1.0,
                    deadline_ms=job.deadline_ms,
                    reply="gw1" if job.stream else "",
                )
                for job in map(self.jobs.__getitem__, request_ids)
                if job.model == model
            ]
            await self.queue(model).enqueue(entries, queue_max=100_000, account_max=100_000)

    async def outcome(self, request_id: RequestId) -> Outcome:
        """Return the outcome of a job that its worker ended."""
        delivery = await self.delivery(request_id)
        return decode_outcome(delivery.outcome)

    async def delivery(self, request_id: RequestId) -> Delivery:
        await self.until(lambda: request_id in self.deliveries)
        return self.deliveries[request_id][0]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    def events_of(self, request_id: RequestId) -> list[Event]:
        return [sent.event for sent in self.events.get(request_id, [])]

    async def listen(self) -> None:
        """Read outcomes and events until cancelled, whatever happens to the server."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_outcomes())
            group.create_task(self._read_mailbox())

    async def _read_outcomes(self) -> None:
        outcomes = Outcomes(self.redis, self.models, namespace=self.namespace)
        while True:
            outcomes.models = tuple(self.models)
            with contextlib.suppress(RedisError, OSError):
                deliveries = await outcomes.read("gw1", block_ms=500)
                async with self.changed:
                    for delivery in deliveries:
                        if delivery.status == "note":
                            continue
                        request_id = RequestId(delivery.request_id)
                        self.deliveries.setdefault(request_id, []).append(delivery)
                    self.changed.notify_all()
                await outcomes.acknowledge(deliveries)
                continue
            await asyncio.sleep(0.05)

    async def _read_mailbox(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                frames = await self.mailbox.read(block_ms=500)
                async with self.changed:
                    for frame in frames:
                        for sent in decode_frame(frame) if frame else ():
                            self.events.setdefault(sent.request_id, []).append(sent)
                    self.changed.notify_all()
                continue
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def worker(
        self, *catalog: Mapping[str, Any], environ: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[Worker]:
        """Run a worker with this catalog; kill it at the end."""
        worker = await self.start_worker(*catalog, environ=environ, **options)
        try:
            await worker.until_ready()
            yield worker
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            await worker.process.wait()
            # The loop closes its transport only after the end of the pipe.
            assert worker.process.stdout is not None
            await worker.process.stdout.read()

    async def start_worker(
        self, *catalog: Mapping[str, Any], environ: Mapping[str, str] | None = None, **options: Any
    ) -> Worker:
        path = self.home / f"catalog-{time.monotonic_ns()}.yaml"
        path.write_text(json.dumps({"models": [*catalog] or [echo()]}))
        options = {"catalog": path, "redis_url": self.url, "threads": 1, "name": "w"} | options
        arguments = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "workers", *arguments),
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "BLOB_URL": self.blob_url,
                "TOLLGATE_NAMESPACE": self.namespace,
                **(environ or {}),
            },
        )
        return Worker(process)


def echo(name: str = "echo", **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": "text-generation",
        "engine": "echo",
        "options": {"unsafe_test_hooks": True, **options},
    }


async def expire_leases(gateway: Gateway, model: str = "echo") -> None:
    """Expire the leases now, instead of after 15 s."""
    leases = f"{gateway.namespace}:{{{model}}}:leases"
    for request_id in cast(list[bytes], await gateway.redis.zrange(leases, 0, -1)):
        await gateway.redis.zadd(leases, {request_id: 1})
