"""What the pages of the console cost: time to the first byte, sizes, and what orders notice of it.

``python -m benchmarks console``. ``BENCH_CONSOLE`` is the number of receipts (200,000; from a
million on, of 24 months), inserted as by ``old``. It runs on SQLite; with ``BENCH_POSTGRES``, on a
database of that server as well, which is made and dropped. The whole product runs beside: each page
is read by one visitor, and by four at a time beside some 50 chats a second. Chat is measured with
and without them, and with 20 viewers of the live overview; 200 viewers are measured without orders.
Chat is sent by a process of its own, as it would be timed beside the threads of visitors otherwise.
The processor time of the gateway is that of one visit, so it also tells on a busy machine.
``BENCH_VISITS`` is the number of visits of each page (20).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from benchmarks import old
from benchmarks.load import Figures, chat_load
from benchmarks.processes import Product, consumption, roles, start_product

RECEIPTS: Final = int(os.environ.get("BENCH_CONSOLE", "200000"))
READERS: Final = 4
VISITS: Final = int(os.environ.get("BENCH_VISITS", "20"))
"""Visits of each page by one visitor."""
PAUSE_S: Final = 0.25
"""Time for which each of several visitors looks at a page."""
LOAD_S: Final = 20.0
SETTLING_S: Final = 10.0
SETTLED_MS: Final = 40.0
"""Processor time in a second of a gateway and a console of which nobody wants anything."""
VIEWERS: Final = 20
CROWD: Final = 200
"""Viewers of the live overview whose processor time is measured: as many as a gateway takes."""
CROWD_S: Final = 10
CONSOLE_ROLES: Final = ("gateway", "console")
ROUNDS: Final = 3
"""Comparisons of chat with and without viewers, by turns."""
CONCURRENCY: Final = 4
ORDER_PAUSE_S: Final = 0.075
"""Pause of each client after a chat, which makes some 50 orders a second of all."""
TOKEN: Final = re.compile(r'name="csrf" value="(\w+)"')
REQUEST: Final = re.compile(r"/console/requests/(req_[0-9a-f]{32})")
ASSET: Final = re.compile(r'(?:src|href)="(/console/assets/[^"]+)"')
LINK: Final = re.compile(r'href="(/console[^"#?]*)(?:\?[^"]*)?"')
MORE: Final = (
    "/console/requests?status=failed",
    "/console/requests?model=none",
    "/console/requests?tag=project=none",
    "/console/requests?cost=1",
    "/console/requests?account=customer+0",
    "/console/requests?account=customer+0&model=none",
    "/console/requests/histogram",
    "/console/balance?account=customer+0",
    "/console/ledger?account=customer+0",
    "/console/statements?account=customer+0",
    "/console/limits?account=customer+0",
    "/console/keys?account=customer+0",
    "/console/usage?by=model",
    "/console/usage?by=day&account=customer+0",
)
"""Pages beside those that the navigation leads to."""


@dataclass(frozen=True)
class Visits:
    """Times to the first byte of a page, in milliseconds, and its size."""

    path: str
    status: int
    times_ms: list[float]
    bytes: int

    def at(self, share: float) -> float:
        """Return a percentile, by the nearest rank."""
        ordered = sorted(self.times_ms)
        return ordered[math.ceil(share * len(ordered)) - 1]


def main() -> None:
    print(f"\nconsole: {RECEIPTS:,} receipts")
    with tempfile.TemporaryDirectory() as directory:
        measure("SQLite", f"sqlite:///{Path(directory) / 'bench.db'}", Path(directory))
        if postgres := os.environ.get("BENCH_POSTGRES"):
            with _database_on_server(postgres) as url:
                measure("PostgreSQL", url, Path(directory))


def measure(name: str, url: str, directory: Path) -> None:
    filled = old.install(url, receipts=RECEIPTS, size=old.size_of(RECEIPTS))
    filled.database.dispose()
    filled.books.engine.dispose()
    home = directory / name
    home.mkdir()
    product = start_product(home, url)
    try:
        _sizes(name, product)
        _settle(product)
        alone, watched = [], []
        with _visitor(product, url) as client:
            paths = _pages(client)
            one, used = [], []
            for path in paths:
                before = consumption(roles(product))
                one.append(_visit(client, path, VISITS))
                spent = consumption(roles(product)).since(before, VISITS)
                used.append(sum(spent.cpu_ms[role] for role in CONSOLE_ROLES))
            for _ in range(ROUNDS):
                alone.append(_load(product))
                with _viewers(client):
                    watched.append(_load(product))
            crowd = _crowd(product, client)
        together, beside = _read_beside(product, url, paths)
    finally:
        product.stop()
    head = "p50 | p95 | processor | p95 of four beside orders | kB"
    print(f"\n| {name}: ms to the first byte | {head} |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for visits, four, cpu_ms in zip(one, together, used, strict=True):
        note = "" if visits.status == 200 else f" ({visits.status})"
        print(
            f"| `{visits.path}`{note} | {visits.at(0.5):.1f} | {visits.at(0.95):.1f} | "
            f"{cpu_ms:.1f} | {four.at(0.95):.1f} | {visits.bytes / 1000:.1f} |"
        )
    whole = [ms for visits in one for ms in visits.times_ms]
    print(f"\nall pages: median {statistics.median(whole):.1f} ms")
    print(f"\n| {name}: chat | requests/s | p50 | p99 |\n| --- | ---: | ---: | ---: |")
    for title, rounds in (
        ("without visitors", alone),
        (f"with {VIEWERS} viewers of the overview", watched),
        (f"with {READERS} visitors", [beside]),
    ):
        rate, p50, p99 = (
            statistics.median(getattr(found, name) for found in rounds)
            for name in ("rate", "p50_ms", "p99_ms")
        )
        print(f"| {title} | {rate:.0f} | {p50:.1f} ms | {p99:.1f} ms |")
    print(f"\n{CROWD} viewers: {crowd}")


def _sizes(name: str, product: Product) -> None:
    """Print the bytes that a first visit transfers, compressed."""
    with httpx.Client(base_url=f"http://127.0.0.1:{product.port}") as client:
        html = client.get("/console/enter").text
        sizes: dict[str, int] = {}
        for asset in sorted(set(ASSET.findall(html))):
            with client.stream("GET", asset) as answer:
                size = sum(len(part) for part in answer.iter_raw())
            sizes[asset.rpartition(".")[2]] = sizes.get(asset.rpartition(".")[2], 0) + size
    text_ = ", ".join(f"{kind} {size / 1000:.1f} kB" for kind, size in sizes.items())
    print(f"\n{name}: assets of a first page, compressed: {text_}", flush=True)


def _settle(product: Product) -> None:
    """Wait for what a start and a new history cause: the console prepares its pages, the gateway
    closes a month and proves all receipts."""
    while True:
        before = consumption(roles(product))
        time.sleep(SETTLING_S)
        spent = consumption(roles(product)).since(before, SETTLING_S)
        if all(spent.cpu_ms[role] < SETTLED_MS for role in CONSOLE_ROLES):
            return


@contextmanager
def _visitor(product: Product, url: str) -> Iterator[httpx.Client]:
    """Enter as an operator."""
    environment = {
        **os.environ,
        "DATABASE_URL": url,
        "TOLLGATE_HOME": str(product.home),
        "TOLLGATE_PORT": str(product.port),
        "TOLLGATE_CATALOG": str(product.home / "catalog.yaml"),
    }
    command = [sys.executable, "-m", "gateway", "console", "link", "--json"]
    made = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    secret = json.loads(made.stdout)[0]["path"].partition("#")[2]
    with httpx.Client(base_url=f"http://127.0.0.1:{product.port}", timeout=30) as client:
        token = TOKEN.findall(client.get("/console/enter").text)[-1]
        answer = client.post(
            "/console/enter/link",
            data={"csrf": token, "secret": secret},
            headers={"Sec-Fetch-Site": "same-origin"},
        )
        assert answer.status_code == 303, answer.text
        yield client


@contextmanager
def _viewers(client: httpx.Client, count: int = VIEWERS) -> Iterator[list[int]]:
    """Follow the overview as many browsers do; yield the bytes that each has received."""
    ended, received = threading.Event(), [0] * count

    def follow(number: int) -> None:
        topics = ["now/UTC", "hour", "workers", "queue"]
        with (
            httpx.Client(base_url=client.base_url, cookies=client.cookies) as own,
            own.stream("GET", "/console/live", params={"topics": topics}) as answer,
        ):
            assert answer.status_code == 200, answer.status_code
            for part in answer.iter_raw():
                received[number] += len(part)
                if ended.is_set():
                    return

    viewers = [threading.Thread(target=follow, args=(each,)) for each in range(count)]
    for viewer in viewers:
        viewer.start()
    try:
        yield received
    finally:
        ended.set()
        for viewer in viewers:
            viewer.join()


def _crowd(product: Product, client: httpx.Client) -> str:
    """Measure what many viewers cost in a second, beyond one of them."""
    costs = []
    for count in (1, CROWD):
        with _viewers(client, count) as received:
            while not all(received):
                time.sleep(0.1)
            time.sleep(CROWD_S / 2)
            bytes_before, before = sum(received), consumption(roles(product))
            time.sleep(CROWD_S)
            spent = consumption(roles(product)).since(before, CROWD_S)
            costs.append((spent.cpu_ms, (sum(received) - bytes_before) / CROWD_S / count))
    (one, _), (all_, each_bytes) = costs
    shares = ", ".join(f"{role} {(all_[role] - one[role]) / 10:.1f} %" for role in CONSOLE_ROLES)
    return f"{shares} of a processor, {each_bytes / 1000:.2f} kB a second to each"


def _pages(client: httpx.Client) -> list[str]:
    """Return the pages of the navigation, those beside them, and one request."""
    html = client.get("/console").text
    found = [path for path in dict.fromkeys(LINK.findall(html)) if "/assets/" not in path]
    newest = REQUEST.findall(client.get("/console/requests?model=bench").text)[0]
    wanted = dict.fromkeys([*found, *MORE, f"/console/requests/{newest}"])
    return [path for path in wanted if not REQUEST.search(path) or path.endswith(newest)]


def _visit(client: httpx.Client, path: str, times: int) -> Visits:
    taken, size, status = [], 0, 0
    for _ in range(times):
        began = time.perf_counter()
        with client.stream("GET", path) as answer:
            taken.append((time.perf_counter() - began) * 1000)
            size, status = sum(len(part) for part in answer.iter_raw()), answer.status_code
    return Visits(path, status, taken, size)


def _read_beside(product: Product, url: str, paths: list[str]) -> tuple[list[Visits], Figures]:
    """Read all pages by several visitors, who begin at different ones, while chat is ordered; until
    both have ended."""
    found: dict[str, list[Visits]] = {path: [] for path in paths}
    ended = threading.Event()
    ready = threading.Barrier(READERS + 1)

    def read(first: int) -> None:
        with _visitor(product, url) as client:
            ready.wait()
            rounds = 0
            while rounds < VISITS // 4 or not ended.is_set():
                for path in paths[first:] + paths[:first]:
                    found[path].append(_visit(client, path, 1))
                    time.sleep(PAUSE_S)
                rounds += 1

    firsts = [len(paths) * number // READERS for number in range(READERS)]
    readers = [threading.Thread(target=read, args=(each,)) for each in firsts]
    for reader in readers:
        reader.start()
    ready.wait()
    beside = _load(product)
    ended.set()
    for reader in readers:
        reader.join()
    together = [
        Visits(path, each[0].status, [ms for one in each for ms in one.times_ms], each[0].bytes)
        for path, each in found.items()
    ]
    return together, beside


def _load(product: Product) -> Figures:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        return own.submit(
            chat_load,
            port=product.port,
            key=product.key,
            model="echo",
            concurrency=CONCURRENCY,
            seconds=LOAD_S,
            pause_s=ORDER_PAUSE_S,
        ).result()


@contextmanager
def _database_on_server(url: str) -> Iterator[str]:
    name = f"tollgate_bench_{os.getpid()}_console"
    own = make_url(url).set(drivername="postgresql+psycopg")
    engine = create_engine(own, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        made = make_url(url).set(database=name)
        yield made.render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        engine.dispose()
