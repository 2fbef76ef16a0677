"""``python -m tests.soak --seconds 1800 --database postgresql``: see the package's first line.

Exit status: 0 if every sum agrees, 1 if not. The seed that is printed repeats the same choices,
though never the same timing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.blackhole import black_hole
from tests.soak import verdict
from tests.soak.clients import Client, live, tally
from tests.soak.faults import break_things
from tests.soak.ground import Ground, Kind, ground
from tests.workers.fake_gmi import FakeGmi, clip, fake_gmi

ACCOUNTS = 3
CLIENTS = 3
"""Of each account, at the same time."""
CALM_S = 45.0
"""Before the first fault: everything has started and answered once."""


async def soak(made: Ground, *, seconds: float, seed: int) -> int:
    chance = random.Random(seed)
    received: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        gmi = await stack.enter_async_context(fake_gmi())
        gmi.models["Veo3"] = ("request", "0.40")
        gmi.states = ["queued", "dispatched", *["processing"] * 6, "success"]
        film = gmi.host(clip(), "video/mp4")
        gmi.outcome = lambda order: {"media_urls": [{"id": "0", "url": film}]}
        made.queue_network = stack.enter_context(black_hole(str(made.queue_socket)))
        if made.postgres is not None:
            data = made.database_url.rpartition("host=")[2]
            made.sql_network = stack.enter_context(black_hole(f"{data}/.s.PGSQL.5432"))
        hook = await stack.enter_async_context(_receiver(received))
        made.start_queue()
        stack.push_async_callback(made.stop)
        accounts = [made.open_account() for _ in range(ACCOUNTS)]
        made.start(gmi_url=gmi.url, gateways=2 if made.kind == "postgresql" else 1)
        http = await stack.enter_async_context(
            httpx.AsyncClient(timeout=httpx.Timeout(100.0, connect=5.0), limits=httpx.Limits())
        )
        clients = [
            Client(made, account, random.Random(chance.random()), http, hook)
            for account in accounts
        ]
        await _until_ready(made)
        faults: Counter[str] = Counter()
        over = asyncio.Event()
        started = time.monotonic()
        living = [
            asyncio.create_task(live(client, over)) for client in clients for _ in range(CLIENTS)
        ]
        await asyncio.sleep(min(CALM_S, seconds / 4))
        breaking = asyncio.create_task(break_things(made, chance, faults))
        remaining = started + seconds - time.monotonic()
        await asyncio.wait([*living, breaking], timeout=remaining, return_when="FIRST_EXCEPTION")
        over.set()
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
        await made.mend()
        for ended in await asyncio.gather(*living, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
        wrong = []
        for client in clients:
            wrong += await verdict.compare(client, await verdict.settled(made, client))
        _report(made, clients, faults, received, gmi, time.monotonic() - started)
    wrong += verdict.audit(made)
    for each in wrong:
        print("WRONG", each)
    print(
        "every sum agrees" if not wrong else f"{len(wrong)} things are wrong; see {made.directory}"
    )
    return 1 if wrong else 0


def _report(
    made: Ground,
    clients: list[Client],
    faults: Counter[str],
    received: Counter[str],
    gmi: FakeGmi,
    seconds: float,
) -> None:
    acts = [act for client in clients for act in client.acts]
    print(f"{made.kind}: {len(acts)} acts in {seconds:.0f} s, {sum(faults.values())} faults")
    for name, count in sorted(faults.items()):
        print(f"  {count:5} x {name.replace('_', ' ')}")
    for (kind, result), count in sorted(tally(acts).items()):
        print(f"  {count:5} x {kind}: {result}")
    for what, count in sorted((made.ends + made.probes).items()):
        print(f"  {count:5} x {what}")
    upstream = [act for act in acts if act.kind == "upstream" and act.told]
    print(f"  upstream: {len(gmi.orders)} orders for {len(upstream)} requests")
    print(f"  webhooks: {sum(received.values())} deliveries of {len(received)} messages")


@contextlib.asynccontextmanager
async def _receiver(received: Counter[str]) -> AsyncIterator[str]:
    """Take webhooks, each of which says what it is in ``webhook-id``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            lines = dict(line.split(": ", 1) for line in head.split("\r\n") if ": " in line)
            await reader.readexactly(int(lines.get("content-length", 0)))
            received[lines.get("webhook-id", "?")] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()


async def _until_ready(made: Ground) -> None:
    async with httpx.AsyncClient(timeout=5) as http:
        for port in made.ports.values():
            for _ in range(240):
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"http://127.0.0.1:{port}/health/ready")).is_success:
                        break
                await asyncio.sleep(0.5)
            else:
                raise RuntimeError(f"not ready; see {made.directory}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="postgresql")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    directory = given.directory or Path(tempfile.mkdtemp(prefix="tg-soak-"))
    kind: Kind = given.database
    print(f"seed {seed}, {kind}, {given.seconds:.0f} s, in {directory}", flush=True)
    with ground(directory, kind) as made:
        return asyncio.run(soak(made, seconds=given.seconds, seed=seed))


if __name__ == "__main__":
    sys.exit(main())
