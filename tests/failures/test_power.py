"""Kills and power failures between the hold of a client that waits for a whole answer, which is not
synced by itself, and its settlement."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sqlite3
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from sqlalchemy import delete, update

from gateway.requests.admit import needs_durable_hold
from gateway.sql.database import Database
from gateway.tables.core import accounts, holds, keys
from gateway.tasks.registry import OtherTask
from gateway.tasks.submission import Idempotency, Submission
from tests.databases import Databases, own_postgres
from tests.failures.test_crashes import WORDS, all_is_well
from tests.stack import Caller, Stack, chat, running, wait_for

WHOLE = Submission("m", OtherTask())


@pytest.fixture(params=["sqlite", "postgresql"])
def either(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: str, valkey: str
) -> Iterator[Stack]:
    """A stack on a database of each kind."""
    url = Databases(request.param, tmp_path, postgres).make()
    with running(tmp_path / "home", url, valkey, namespace=f"t{os.urandom(4).hex()}") as made:
        yield made


@pytest.mark.parametrize(
    "point",
    [
        "after_hold",
        pytest.param("after_enqueue", marks=pytest.mark.long),
        pytest.param("before_settle", marks=pytest.mark.long),
    ],
)
def test_killed_gateway_keeps_a_hold_that_was_not_synced(point: str, either: Stack) -> None:
    caller = killed_at(point, either)

    either.start_gateway()

    wait_for(lambda: ended_as(caller) == ["succeeded"], "the request to be settled")
    all_is_well(either, caller, charged=1)


@pytest.mark.parametrize(
    "point", ["after_hold", pytest.param("after_enqueue", marks=pytest.mark.long)]
)
def test_request_whose_hold_a_power_failure_lost_was_never_accepted(
    point: str, stack: Stack
) -> None:
    caller = killed_at(point, stack)
    database = Path(stack.database_url.removeprefix("sqlite:///"))
    while open_holds(database):
        take_last_commit(database)

    stack.start_gateway()

    assert ended_as(caller) == []
    all_is_well(stack, caller)
    assert caller.http.post("/v1/chat/completions", json=chat("echo", WORDS)).is_success
    assert ended_as(caller) == ["succeeded"]
    all_is_well(stack, caller, charged=1)


def test_client_whose_hold_is_lost_meanwhile_is_asked_to_send_its_request_again(
    stack: Stack,
) -> None:
    caller = stack.caller()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ask, caller)
        wait_for(lambda: stack.held(caller) > 0, "the hold")
        lose_holds(stack)
        answer = waiting.result()

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
    assert "Nothing was charged" in answer.json()["error"]["message"]
    assert ended_as(caller) == []
    assert ask(caller).is_success
    all_is_well(stack, caller, charged=1)


def test_postgres_crashes_while_a_client_waits(tmp_path: Path, valkey: str) -> None:
    namespace = f"t{os.urandom(4).hex()}"
    with (
        own_postgres() as (server, url),
        running(tmp_path / "home", url, valkey, namespace=namespace) as stack,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        caller = stack.caller()
        waiting = thread.submit(ask, caller)
        wait_for(lambda: stack.held(caller) > 0, "the hold")

        server.stop()
        time.sleep(1)
        server.start()

        # Whether the server had flushed the hold depends on what else was committed.
        answer = waiting.result()
        if answer.is_success:
            all_is_well(stack, caller, charged=1)
        else:
            assert answer.json()["error"]["code"] == "database_unavailable"
            assert ended_as(caller) == []
            all_is_well(stack, caller, charged=0)
        assert ask(caller).is_success
        all_is_well(stack, caller, charged=1 + answer.is_success)


@pytest.mark.parametrize(
    ("submission", "durable"),
    [
        (WHOLE, False),
        (replace(WHOLE, stream=True), True),
        (replace(WHOLE, waits=False), True),
        (replace(WHOLE, webhook="https://example.com"), True),
        (replace(WHOLE, idempotency=Idempotency("a", b"")), True),
    ],
)
def test_only_what_is_told_of_at_its_end_need_not_be_durable(
    submission: Submission, durable: bool
) -> None:
    assert needs_durable_hold(submission, runs_steps=False) == durable
    assert needs_durable_hold(submission, runs_steps=True)


def killed_at(point: str, stack: Stack) -> Caller:
    """Send a request whose client waits; the gateway dies at a failpoint."""
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(failpoint=point)
    with contextlib.suppress(httpx.HTTPError):
        caller.http.post("/v1/chat/completions", json=chat("echo", WORDS))
    stack.processes.pop("gateway").wait(timeout=20)
    return caller


def ask(caller: Caller) -> httpx.Response:
    return caller.http.post("/v1/chat/completions", json=chat("slow", WORDS))


def ended_as(caller: Caller) -> list[str]:
    return [found["status"] for found in caller.http.get("/v1/requests").json()["data"]]


def open_holds(database: Path) -> int:
    """Count the holds, in a copy: opening the database would empty its log."""
    copy = database.with_name("copy.db")
    for suffix in ("", "-wal"):
        copy.with_name(copy.name + suffix).write_bytes(Path(f"{database}{suffix}").read_bytes())
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        return int(connection.execute("SELECT count(*) FROM holds").fetchone()[0])


def take_last_commit(database: Path) -> None:
    """Take the last transaction off the write-ahead log, as if it had not been synced."""
    file = Path(f"{database}-wal")
    log = file.read_bytes()
    (page_size,) = struct.unpack_from(">I", log, 8)
    salts = log[16:24]
    commits = [32]
    for start in range(32, len(log) - page_size - 23, 24 + page_size):
        (pages_after_commit,) = struct.unpack_from(">I", log, start + 4)
        if log[start + 8 : start + 16] != salts:
            break
        if pages_after_commit:
            commits.append(start + 24 + page_size)
    assert len(commits) > 1, "the log has no transaction"
    file.write_bytes(log[: commits[-2]])
    Path(f"{database}-shm").unlink(missing_ok=True)


def lose_holds(stack: Stack) -> None:
    """Undo the transactions of all holds, as a crash of PostgreSQL can."""
    database = Database(stack.database_url)
    with database.transaction() as connection:
        connection.execute(delete(holds))
        connection.execute(update(accounts).values(held_nanos=0, open_requests=0))
        connection.execute(update(keys).values(held_nanos=0, open_requests=0))
    database.dispose()
