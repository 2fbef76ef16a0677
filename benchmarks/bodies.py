"""Concurrent large bodies: memory of the gateway, and latency of other calls meanwhile.

``python -m benchmarks.bodies [--count 200] [--megabytes 40]`` starts a gateway with an empty home
and no worker. It sends that many concurrent requests, each with an image of that size as a data URI
on a separate connection, and calls ``/health/live`` and a small authenticated endpoint every 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx

from gateway.accounts.accounts import create_account
from gateway.accounts.keys import create_key
from gateway.ledger.transfers import add_credit
from gateway.pricing import parse_usd
from gateway.sql.database import Database, migrate
from gateway.up.queue_server import arguments, find_server
from tests.artist import png
from tests.stack import free_port

PEPPER: Final = "a pepper for benchmarks, long enough"
CATALOG: Final = """\
version: 1
models:
  - name: pocket
    task: text-to-image
    also: [image-to-image]
    engine: echo
    sizes: ["64x64"]
    price: [{unit: image, amount: "0.01"}]
"""
CHUNK_BYTES: Final = 256 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--accounts", type=int, default=20)
    parser.add_argument("--credit", default="1")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tg-bodies-") as directory:
        home = Path(directory)
        environment = _environment(home)
        secrets = _accounts(home, chosen.accounts, chosen.credit)
        queue = subprocess.Popen(
            arguments(find_server(), home=home, socket=home / "s"), stdout=subprocess.DEVNULL
        )
        with open(home / "log", "wb") as log:
            gateway = subprocess.Popen(
                [sys.executable, "-m", "gateway", "serve"], env=environment, stdout=log, stderr=log
            )
        url = f"http://127.0.0.1:{environment['TOLLGATE_PORT']}"
        try:
            asyncio.run(_measure(url, gateway.pid, secrets, chosen))
        finally:
            for process in (gateway, queue):
                process.terminate()
                process.wait()


async def _measure(url: str, pid: int, secrets: list[str], chosen: argparse.Namespace) -> None:
    await _until_alive(url)
    before, latencies = _memory(pid, "VmRSS"), _Latencies()
    # The probe and the sender share the machine with the gateway, but not its process.
    watch = asyncio.create_task(latencies.watch(url, secrets[0]))
    await asyncio.sleep(5)
    quiet, latencies.live, latencies.small = max(latencies.live), [], []
    started, used = time.monotonic(), _processor_s(pid)
    codes = await _send_all(url, secrets, chosen.count, chosen.megabytes * 1_000_000)
    took, used = time.monotonic() - started, _processor_s(pid) - used
    watch.cancel()
    await asyncio.wait([watch])
    peak = _memory(pid, "VmHWM")
    print(f"{chosen.count} bodies of {chosen.megabytes} MB in {took:.1f} s: {dict(codes)}")
    print(f"memory before {before / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    print(f"/health/live at most {max(latencies.live) * 1e3:.0f} ms (quiet: {quiet * 1e3:.0f} ms)")
    print(f"  99 % within {_quantile(latencies.live, 0.99) * 1e3:.0f} ms, of {len(latencies.live)}")
    print(f"GET /v1/balance at most {max(latencies.small) * 1e3:.0f} ms")
    print(f"the gateway used {used:.1f} s of processor time")


class _Latencies:
    """Latencies of small sequential calls, in seconds."""

    def __init__(self) -> None:
        self.live: list[float] = []
        self.small: list[float] = []

    async def watch(self, url: str, secret: str) -> None:
        code = (
            "import sys,time,http.client,urllib.parse\n"
            "host=urllib.parse.urlsplit(sys.argv[1]).netloc\n"
            "c=http.client.HTTPConnection(host,timeout=60)\n"
            "while True:\n"
            "    for path in ('/health/live','/v1/balance'):\n"
            "        t=time.monotonic()\n"
            "        c.request('GET',path,headers={'Authorization':'Bearer '+sys.argv[2]})\n"
            "        c.getresponse().read()\n"
            "        print(path,time.monotonic()-t,flush=True)\n"
            "    time.sleep(0.02)\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, url, secret, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                path, seconds = line.split()
                (self.live if path == b"/health/live" else self.small).append(float(seconds))
        finally:
            process.kill()
            await process.wait()


async def _send_all(url: str, secrets: list[str], count: int, size: int) -> Counter[int]:
    data = base64.b64encode(png(8, 8) + bytes(size * 3 // 4)).decode()
    head = b'{"model":"pocket","input":{"prompt":"a circle","image":"data:image/png;base64,'
    body = memoryview(head + data.encode() + b'"}}')
    codes: Counter[int] = Counter()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), CHUNK_BYTES):
            yield bytes(body[start : start + CHUNK_BYTES])

    async def send(client: httpx.AsyncClient, secret: str) -> None:
        headers: dict[str, Any] = {
            "Authorization": f"Bearer {secret}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        try:
            answer = await client.post(f"{url}/v1/requests", content=chunks(), headers=headers)
            codes[answer.status_code] += 1
        except httpx.HTTPError:
            codes[0] += 1

    async with (
        httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(count):
            group.create_task(send(client, secrets[number % len(secrets)]))
    return codes


async def _until_alive(url: str) -> None:
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            try:
                if (await client.get(f"{url}/health/live")).is_success:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit("the gateway did not start; see its log")


def _environment(home: Path) -> dict[str, str]:
    (home / "catalog.yaml").write_text(CATALOG)
    return {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{home / 'tollgate.db'}",
        "REDIS_URL": f"unix://{home / 's'}",
        "TOLLGATE_HOME": str(home),
        "TOLLGATE_CATALOG": str(home / "catalog.yaml"),
        "TOLLGATE_PORT": str(free_port()),
        "TOLLGATE_PEPPER": PEPPER,
    }


def _accounts(home: Path, count: int, credit: str) -> list[str]:
    url = f"sqlite:///{home / 'tollgate.db'}"
    migrate(url)
    database = Database(url)
    secrets = []
    with database.transaction() as connection:
        for number in range(count):
            account = create_account(connection, f"account {number} of bodies")
            secret, _ = create_key(connection, account.id, pepper=PEPPER.encode())
            secrets.append(secret)
            if parse_usd(credit):
                add_credit(
                    connection,
                    account.id,
                    parse_usd(credit),
                    kind="grant",
                    key=f"grant:{number}",
                    actor="benchmark",
                    reason="benchmark",
                )
    database.dispose()
    return secrets


def _memory(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


if __name__ == "__main__":
    main()
