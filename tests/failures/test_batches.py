"""Whatever crashes while a batch runs, it is finished, and each line is charged once."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from gateway.accounts.keys import revoke_key
from gateway.sql.database import Database
from tests.databases import Databases, own_postgres
from tests.servers import queue_server
from tests.stack import PATIENCE_S, Caller, Stack, free_port, running, wait_for

WORDS = "word " * 10
COST = Decimal("0.0000005")
"""Half of ten words in at $0.02 and ten out at $0.08 a million."""
LINES = 20


def content(model: str, count: int = LINES, words: str = WORDS) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": words}]}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def submit(caller: Caller, text: bytes) -> str:
    """Upload a file and make a batch of it, in any case: a gateway may die over the answer."""
    file = caller.http.post("/v1/files", files={"file": text}, data={"purpose": "batch"})
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    made = caller.http.post("/v1/batches", json=body)
    assert made.is_success, made.text
    return str(made.json()["id"])


def now(caller: Caller, batch_id: str) -> dict[str, Any]:
    """How a batch stands, {} where the gateway does not answer."""
    with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
        answer = caller.http.get(f"/v1/batches/{batch_id}")
        if answer.is_success:
            found: dict[str, Any] = answer.json()
            return found
    return {}


def ended(caller: Caller, batch_id: str, *, patience_s: float = PATIENCE_S) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def closed() -> bool:
        found.update(now(caller, batch_id))
        return found.get("status") in ("completed", "failed", "cancelled", "expired")

    wait_for(closed, batch_id, patience_s=patience_s)
    return found


def lines_of(caller: Caller, file_id: str) -> list[dict[str, Any]]:
    text = caller.http.get(f"/v1/files/{file_id}/content").text
    return [json.loads(line) for line in text.splitlines()]


def each_line_was_charged_once(
    stack: Stack, caller: Caller, batch_id: str, count: int = LINES
) -> None:
    """Every line is answered, and the bill is right to the last digit."""
    batch = ended(caller, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
    found = lines_of(caller, batch["output_file_id"])
    assert [line["custom_id"] for line in found] == [str(n) for n in range(count)]
    assert len({line["response"]["request_id"] for line in found}) == count
    text = found[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert text.split() == WORDS.split()
    usage = caller.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == count
    assert Decimal(usage["cost"]) == count * COST
    assert stack.held(caller) == 0
    assert stack.findings() == []


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("after_hold", marks=pytest.mark.long),
        pytest.param("after_enqueue", marks=pytest.mark.long),
        pytest.param("before_settle", marks=pytest.mark.long),
        pytest.param("after_settle", marks=pytest.mark.long),
        "batch_line_recorded",
        pytest.param("batch_files_written", marks=pytest.mark.long),
    ],
)
def test_batch_survives_a_gateway_crash_at_each_failpoint(point: str, stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(failpoint=point)
    batch_id = submit(caller, content("echo"))
    stack.processes.pop("gateway").wait(timeout=20)

    stack.start_gateway()

    each_line_was_charged_once(stack, caller, batch_id)
    blobs = [path for path in (stack.directory / "blobs").rglob("*") if path.is_file()]
    assert len(blobs) == 2, "what a dead gateway wrote is still there"


@pytest.mark.long
def test_batch_survives_repeated_gateway_crashes(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))

    for lines in (1, 6, 13):
        wait_for(
            lambda lines=lines: (
                now(caller, batch_id).get("request_counts", {"completed": 0})["completed"] >= lines
            ),
            "some lines",
        )
        stack.kill("gateway")
        stack.start_gateway()

    each_line_was_charged_once(stack, caller, batch_id)


def test_batch_survives_a_wiped_queue(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")

    server = redis.Redis.from_url(stack.redis_url)
    server.flushall()
    server.close()

    each_line_was_charged_once(stack, caller, batch_id)


def test_batch_survives_an_engine_crash(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")

    stack.kill_engine()

    each_line_was_charged_once(stack, caller, batch_id)


def test_stopped_gateway_hands_its_batch_to_the_next(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 0, "some lines")

    gateway = stack.processes.pop("gateway")
    gateway.terminate()
    gateway.wait(timeout=20)
    database = Database(stack.database_url)
    with database.transaction() as connection:
        (lease,) = connection.exec_driver_sql("SELECT lease_until FROM batches").scalars()
    database.dispose()
    stack.start_gateway()

    assert lease is None
    each_line_was_charged_once(stack, caller, batch_id)


def test_revoked_key_keeps_lines_that_were_already_submitted(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")
    other = stack.caller(credit="0")
    stack.kill("gateway")
    database = Database(stack.database_url)
    with database.transaction() as connection:
        revoke_key(connection, str(caller.key_id))
        move = "UPDATE keys SET account_id = ? WHERE id = ?"
        connection.exec_driver_sql(move, (caller.account_id, other.key_id))
        placed = connection.exec_driver_sql("SELECT COUNT(*) FROM idempotency").scalar()
    database.dispose()

    stack.start_gateway()

    batch = ended(other, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"]["completed"] == placed < LINES
    failed = lines_of(other, batch["error_file_id"])
    assert {line["error"]["code"] for line in failed} == {"key_revoked"}
    assert len(failed) == LINES - placed
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_running_batch_obeys_its_changed_key(stack: Stack) -> None:
    caller = stack.caller()
    admin = stack.caller(credit="0", scopes=("admin",))
    batch_id = submit(caller, content("slow", 60))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")

    path = f"/v1/admin/keys/{caller.key_id}"
    admin.http.patch(path, json={"models": ["echo"]}).raise_for_status()

    batch = ended(caller, batch_id)
    failed = lines_of(caller, batch["error_file_id"])
    assert {line["error"]["code"] for line in failed} == {"model_not_allowed"}
    assert len(failed) + batch["request_counts"]["completed"] == 60
    assert stack.held(caller) == 0


def test_lines_not_run_in_the_window_expire_without_a_charge(stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(environment={"TOLLGATE_BATCH_WINDOW_S": "4"})
    long = "word " * 60
    batch_id = submit(caller, content("slow", words=long))

    batch = ended(caller, batch_id)

    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["expires_at"]
    counts = batch["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == LINES
    assert 0 < counts["completed"] < LINES
    late = lines_of(caller, batch["error_file_id"])
    assert {line["error"]["code"] for line in late} == {"batch_expired"}
    assert len(lines_of(caller, batch["output_file_id"])) == counts["completed"]
    usage = caller.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == counts["completed"]
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_batch_cancelled_while_no_gateway_runs_it_ends_as_cancelled(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")
    stack.kill("gateway")
    database = Database(stack.database_url)
    with database.transaction() as connection:
        connection.exec_driver_sql("UPDATE batches SET status = 'cancelling'")
    database.dispose()

    stack.start_gateway()

    batch = ended(caller, batch_id)
    assert batch["status"] == "cancelled"
    counts = batch["request_counts"]
    assert counts["completed"] + counts["failed"] == LINES
    usage = caller.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == counts["completed"] > 3
    assert stack.held(caller) == 0
    assert stack.findings() == []


@pytest.fixture
def pair(tmp_path: Path, postgres: str) -> Iterator[tuple[Stack, Stack]]:
    """Two gateways over one database, one queue and one worker."""
    url = Databases("postgresql", tmp_path, postgres).make()
    with (
        queue_server("valkey") as queue,
        running(tmp_path / "home", url, queue, namespace=f"t{os.getpid()}") as first,
    ):
        second = Stack(first.directory, url, queue, first.namespace, first.catalog)
        second.port = free_port()
        try:
            second.start_gateway("second")
            yield first, second
        finally:
            second.stop()


def test_another_gateway_continues_a_batch(pair: tuple[Stack, Stack]) -> None:
    first, second = pair
    caller = first.caller()
    elsewhere = Caller(
        caller.account_id,
        caller.key_id,
        caller.secret,
        httpx.Client(base_url=second.url, headers=caller.http.headers, timeout=40),
    )
    second.clients.append(elsewhere.http)
    batch_id = submit(caller, content("slow", 40))
    wait_for(lambda: now(elsewhere, batch_id)["request_counts"]["completed"] > 5, "some lines")

    first.kill("gateway")

    each_line_was_charged_once(second, elsewhere, batch_id, 40)


@pytest.mark.long
def test_gateway_with_an_expired_lease_changes_nothing(
    pair: tuple[Stack, Stack],
) -> None:
    first, second = pair
    caller = first.caller()
    elsewhere = Caller(
        caller.account_id,
        caller.key_id,
        caller.secret,
        httpx.Client(base_url=second.url, headers=caller.http.headers, timeout=40),
    )
    second.clients.append(elsewhere.http)
    batch_id = submit(caller, content("slow", 40))
    wait_for(lambda: now(elsewhere, batch_id)["request_counts"]["completed"] > 5, "some lines")
    process = first.processes["gateway"]

    process.send_signal(19)
    time.sleep(3.5)
    process.send_signal(18)

    each_line_was_charged_once(second, elsewhere, batch_id, 40)
    wait_for(
        lambda: "to another gateway" in (first.directory / "gateway.log").read_text(),
        "the first gateway to notice",
    )


def test_lost_input_file_ends_a_batch_with_its_results(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = submit(caller, content("slow"))
    wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")
    stack.kill("gateway")
    for path in (stack.directory / "blobs").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")

    stack.start_gateway()

    batch = ended(caller, batch_id)
    assert batch["status"] == "failed"
    assert [error["code"] for error in batch["errors"]["data"]] == ["file_damaged"]
    found = lines_of(caller, batch["output_file_id"])
    assert len(found) == batch["request_counts"]["completed"] > 3
    wait_for(lambda: stack.held(caller) == 0, "what was still running")
    assert stack.findings() == []


def test_lines_refused_by_a_full_queue_are_submitted_again(stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(environment={"TOLLGATE_ACCOUNT_QUEUE_MAX": "1"})
    stack.processes["worker"].send_signal(19)
    batch_id = submit(caller, content("slow"))

    def turned_away() -> bool:
        page = caller.http.get("/v1/requests?status=cancelled").json()["data"]
        return len(page) >= 3

    wait_for(turned_away, "lines that found the queue full")
    stack.processes["worker"].send_signal(18)

    batch = ended(caller, batch_id)
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    usage = caller.http.get("/v1/usage").json()["total"]
    assert usage["charged_requests"] == LINES
    assert Decimal(usage["cost"]) == LINES * COST
    assert stack.findings() == []


@pytest.mark.long
def test_lines_refused_by_a_full_queue_end_with_a_cancelled_batch(stack: Stack) -> None:
    caller = stack.caller()
    stack.kill("gateway")
    stack.start_gateway(environment={"TOLLGATE_ACCOUNT_QUEUE_MAX": "1"})
    stack.processes["worker"].send_signal(19)
    batch_id = submit(caller, content("slow"))
    wait_for(
        lambda: len(caller.http.get("/v1/requests?status=cancelled").json()["data"]) >= 3,
        "lines that found the queue full",
    )

    assert caller.http.post(f"/v1/batches/{batch_id}/cancel").is_success

    batch = ended(caller, batch_id)
    stack.processes["worker"].send_signal(18)
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": LINES, "completed": 0, "failed": LINES}
    assert {line["error"]["code"] for line in lines_of(caller, batch["error_file_id"])} == {
        "batch_cancelled"
    }
    assert caller.http.get("/v1/balance").json()["posted"] == "1"
    assert stack.held(caller) == 0
    assert stack.findings() == []


@pytest.mark.long
def test_batch_survives_a_restart_of_postgres(tmp_path: Path, valkey: str) -> None:
    with (
        own_postgres() as (server, url),
        running(tmp_path / "home", url, valkey, namespace=f"t{time.time_ns()}") as stack,
    ):
        caller = stack.caller()
        batch_id = submit(caller, content("slow"))
        wait_for(lambda: now(caller, batch_id)["request_counts"]["completed"] > 3, "some lines")

        server.stop()
        time.sleep(3)
        server.start()

        each_line_was_charged_once(stack, caller, batch_id)
