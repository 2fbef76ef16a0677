"""Counts what one unstreamed chat costs: functions of ours, SQL statements, queue commands.

``python -m benchmarks.counts [--list] [MODEL]``. Counts depend on the code alone, not on the
machine, so ``tests/gateway/test_counts.py`` bounds them. Chats are sent one after another, with
SQLite. Each count is the median of several chats, and a function counts if each of several chats
calls it, so periodic tasks do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest import mock

import httpx
import redis

from benchmarks.processes import queue_url, roles, start_product

TRACED: Final = 15
"""Chats of which each is traced alone. A background loop that turns during two of three of them is
taken for a part of a chat in one of 500 runs; with five chats it was one of eight."""
COUNTED: Final = 31
"""Chats sent one after another; an odd number, so that the median is a whole number."""
TAIL_S: Final = 0.1
"""Time for what follows an answer, such as acknowledgements."""
WAIT_S: Final = 30.0
TRACING: Final = Path(__file__).parent / "tracing"
CHAT: Final = f"""\
  - name: pocket-chat
    task: text-generation
    engine: llm
    checkpoint: {Path(__file__).parents[1] / "workers/pocket/chat"}
    options: {{dtype: float32, slots: 8}}
    limits: {{context_tokens: 1024, output_tokens: 64, choices: 1}}
    price:
      - {{unit: input_token, amount: "0.0000001"}}
      - {{unit: output_token, amount: "0.0000001"}}
"""


@dataclass(frozen=True)
class Counts:
    """What one chat runs through."""

    functions: Mapping[str, set[str]]
    """Functions of ours, by role of the process."""
    statements: Mapping[str, int]
    """SQL statements by kind, such as ``INSERT receipts``; each row of ``executemany`` is one."""
    commands: Mapping[str, int]
    """Commands to the queue server by name; those that its scripts run are not included."""
    inner_commands: int
    """Commands that the queue server's scripts run."""
    round_trips: int
    """Reads of the queue server from its clients: each is a round trip."""

    @property
    def commits(self) -> int:
        return self.statements.get("COMMIT", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pocket-chat")
    parser.add_argument("--list", action="store_true", help="name the functions and statements")
    chosen = parser.parse_args()
    counts = count_product(chosen.model)
    for role, names in counts.functions.items():
        files = {name.partition(":")[0] for name in names}
        print(f"{role:<10}{len(names):>5} functions in {len(files)} modules")
        if chosen.list:
            print(*(f"    {name}" for name in sorted(names)), sep="\n")
    print(f"{'together':<10}{sum(map(len, counts.functions.values())):>5}")
    print(f"{'SQL':<10}{sum(counts.statements.values()):>5} statements, {counts.commits} commits")
    if chosen.list:
        print(*(f"    {n:>3} {kind}" for kind, n in counts.statements.items()), sep="\n")
    print(
        f"{'queue':<10}{sum(counts.commands.values()):>5} commands in {counts.round_trips} round "
        f"trips, {counts.inner_commands} more in scripts"
    )
    if chosen.list:
        print(*(f"    {n:>3} {name}" for name, n in counts.commands.items()), sep="\n")


def count_product(model: str) -> Counts:
    """Start ``tollgate up`` and count a chat with a model."""
    with tempfile.TemporaryDirectory(prefix="tg-") as directory:
        home = Path(directory)
        with mock.patch.dict(os.environ, tracing_environment(home)):
            product = start_product(home, None, models=CHAT if model == "pocket-chat" else "")
        processes = {pid: role for pid, role in roles(product).items() if role != "queue"}

        def ask() -> None:
            answer = client.post(
                "/v1/chat/completions",
                json={"model": model, "messages": [{"role": "user", "content": "What is a hold?"}]},
            )
            answer.raise_for_status()

        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{product.port}",
                headers={"Authorization": f"Bearer {product.key}"},
                timeout=WAIT_S,
            ) as client:
                return count(ask, processes=processes, queue_url=queue_url(product), folder=home)
        finally:
            product.stop()


def tracing_environment(folder: Path, *, functions: bool = True) -> dict[str, str]:
    """Return the environment in which processes can be traced; they write to ``folder``."""
    path = os.pathsep.join([str(TRACING), str(TRACING.parents[1])])
    environment = {"PYTHONPATH": path, "PYTHONTRACEFOLDER": str(folder)}
    return {**environment, "PYTHONTRACEFUNCTIONS": "1"} if functions else environment


def count(
    ask: Callable[[], None], *, processes: Mapping[int, str], queue_url: str, folder: Path
) -> Counts:
    """Count what ``ask``, one chat, costs processes that run in ``tracing_environment(folder)``."""
    for _ in range(3):
        # The first chats fill caches and prepare statements.
        ask()
    traces = []
    for _ in range(TRACED):
        start_trace(processes)
        ask()
        time.sleep(TAIL_S)
        traces.append(read_traces(processes, folder))
    functions = {
        role: set.intersection(*(set(trace[role]["functions"]) for trace in traces))
        for role in traces[0]
    }
    with redis.Redis.from_url(queue_url) as client, client.monitor() as monitor:
        start_trace(processes)
        moments, reads = [time.monotonic()], [_reads(client)]
        for _ in range(COUNTED):
            ask()
            moments.append(time.monotonic())
            reads.append(_reads(client))
        traced = read_traces(processes, folder)["gateway"]
        commands, inner = _commands(monitor)
    statements = [Counter[str]() for _ in range(COUNTED)]
    for moment, statement in traced["statements"]:
        number = bisect_left(moments, moment) - 1
        if 0 <= number < COUNTED:
            statements[number][_kind(statement)] += 1
    # One read of each chat is that of the question for the number.
    round_trips = [after - before - 1 for before, after in pairwise(reads)]
    return Counts(
        functions,
        _medians(statements),
        _medians(commands),
        inner_commands=int(median(inner)),
        round_trips=int(median(round_trips)),
    )


def start_trace(processes: Mapping[int, str]) -> None:
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    time.sleep(TAIL_S)


def read_traces(processes: Mapping[int, str], folder: Path) -> dict[str, Any]:
    """End the recording. Return what each process recorded, by its role."""
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    traces = {}
    for pid, role in processes.items():
        file = folder / f"{pid}.json"
        deadline = time.monotonic() + WAIT_S
        while not file.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{role} wrote no trace")
            time.sleep(0.01)
        traces[role] = json.loads(file.read_text())
        file.unlink()
    return traces


def _reads(client: redis.Redis) -> int:
    """Return how often the queue server has read from its clients, this time included."""
    return int(client.info("stats")["total_reads_processed"])


def _commands(monitor: Any) -> tuple[list[Counter[str]], list[int]]:
    """Count the commands of each chat by name, and those inside scripts.

    The chats lie between the questions for the number of reads.
    """
    outer: list[Counter[str]] = []
    inner: list[int] = []
    while len(outer) <= COUNTED:
        seen = monitor.next_command()
        name = seen["command"].split(" ")[0].upper()
        if name == "INFO":
            outer.append(Counter())
            inner.append(0)
        elif outer and seen["client_type"] == "lua":
            inner[-1] += 1
        elif outer:
            outer[-1][name] += 1
    return outer[:COUNTED], inner[:COUNTED]


def _kind(statement: str) -> str:
    """Return what a statement does, and to which table."""
    words = statement.replace("(", " ").split()
    verb = words[0].upper()
    marker = {"INSERT": "INTO", "UPDATE": "UPDATE", "DELETE": "FROM", "SELECT": "FROM"}.get(verb)
    upper = [word.upper() for word in words]
    if marker is None or marker not in upper[:-1]:
        return verb
    return f"{verb} {words[upper.index(marker) + 1]}"


def _medians(counters: list[Counter[str]]) -> dict[str, int]:
    names = sorted(set().union(*counters))
    found = {name: int(median(each[name] for each in counters)) for name in names}
    return {name: number for name, number in found.items() if number}


if __name__ == "__main__":
    main()
