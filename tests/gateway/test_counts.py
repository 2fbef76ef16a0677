"""The cost of one chat in counts: they depend on the code alone, and must not grow unnoticed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from benchmarks.counts import Counts, count, tracing_environment
from tests.databases import Databases
from tests.servers import queue_server
from tests.stack import chat, running

BOUNDS: Final = {
    # Two of these estimate the waiting time, if the load of the model's queue was read before.
    # Background loops do not count: a function counts if every one of many chats calls it.
    # Chats with pictures come the same way: four functions look whether there are any. A loaded
    # machine has shown up to seven more.
    "functions of the gateway": 256,
    "functions of the agent": 52,
    "functions of the engine": 52,
    "SQL statements": 20,
    "commits": 2,
    "commands to the queue server": 7,
    "commands in its scripts": 64,
    # On a slow machine the queue server reads each of the commands by itself.
    "round trips to the queue server": 7,
}
"""The most that an unstreamed chat with the echo engine may cost, on SQLite, sent alone.

``python -m benchmarks.counts --list echo`` prints the counts with what makes them up. If a change
lowers a count, lower its bound with it. If a change has to raise one, raise the bound in the same
commit, and say in its message what the cost is for.
"""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[Counts]:
    directory = tmp_path_factory.mktemp("counts")
    url = Databases("sqlite", directory, postgres).make()
    # A queue server that nothing else uses, because all of its commands are counted.
    with pytest.MonkeyPatch.context() as environment, queue_server("valkey") as queue_url:
        for name, value in tracing_environment(directory).items():
            environment.setenv(name, value)
        name = f"t{uuid.uuid4().hex[:8]}"
        # An interpreter begins to trace when it starts.
        with running(directory / "home", url, queue_url, namespace=name, forked=False) as stack:
            http = stack.caller().http

            def ask() -> None:
                body = chat("echo", "What is a hold?")
                http.post("/v1/chat/completions", json=body).raise_for_status()

            processes = {
                stack.processes["gateway"].pid: "gateway",
                stack.processes["worker"].pid: "agent",
                stack.engine_pid(): "engine",
            }
            for is_last in (False, False, True):
                try:
                    found = count(ask, processes=processes, queue_url=queue_url, folder=directory)
                    break
                except httpx.HTTPStatusError:
                    # Tracing slows processes so much that a busy machine can refuse a chat.
                    if is_last:
                        raise
                    time.sleep(3)
            yield found


def test_chat_costs_no_more_than_its_bounds(counts: Counts) -> None:
    measured = {
        **{f"functions of the {role}": len(names) for role, names in counts.functions.items()},
        "SQL statements": sum(counts.statements.values()),
        "commits": counts.commits,
        "commands to the queue server": sum(counts.commands.values()),
        "commands in its scripts": counts.inner_commands,
        "round trips to the queue server": counts.round_trips,
    }

    assert measured.keys() == BOUNDS.keys()
    exceeded = {name: n for name, n in measured.items() if n > BOUNDS[name]}
    assert exceeded == {}, f"SQL: {counts.statements}; queue: {counts.commands}"
    # A count of almost nothing means that the tracing is broken.
    assert all(n > BOUNDS[name] / 2 for name, n in measured.items()), measured


def test_every_chat_is_held_and_settled_in_the_books(counts: Counts) -> None:
    for statement in ("INSERT holds", "DELETE holds", "INSERT receipts", "INSERT transfers"):
        assert counts.statements[statement] == 1
