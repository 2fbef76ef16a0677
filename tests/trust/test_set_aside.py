"""A stored row that cannot be processed is set aside and listed, and stops nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import httpx
import msgspec
import pytest
import redis
from sqlalchemy import Connection, insert, select, update

from gateway.aside import add_note, count_notes, delete_obsolete_notes
from gateway.ids import new_id, new_request_id
from gateway.ledger.workflow_plan import PlannedStep, WorkflowPlan
from gateway.sql.database import Database
from gateway.tables.batches import batches
from gateway.tables.core import accounts, holds, keys, price_periods, prices
from gateway.tables.set_aside import set_aside
from gateway.tables.workflows import steps
from tests.cli.here import run_here
from tests.databases import Databases
from tests.stack import Caller, Stack, chat, ended, order, running, wait_for
from workers.contract.jobs import Job, RequestId, Usage, encode

HOLD_NANOS = 1_000


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: str,
    valkey: str,
) -> Iterator[Stack]:
    kind: Literal["sqlite", "postgresql"] = request.param
    directory = tmp_path_factory.mktemp("poison")
    url = Databases(kind, directory, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    with running(directory / "home", url, valkey, namespace=name) as made:
        yield made


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    yield shared
    shared.close_clients()


def write(stack: Stack, *statements: Any) -> None:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            for statement in statements:
                connection.execute(statement)
    finally:
        database.engine.dispose()


def read(stack: Stack, query: Any) -> list[Any]:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            return list(connection.execute(query).all())
    finally:
        database.engine.dispose()


def price_of_echo(stack: Stack) -> int:
    in_force = select(price_periods.c.price_id).where(price_periods.c.model == "echo")
    return int(read(stack, in_force)[0][0])


def poisoned_hold(stack: Stack, caller: Caller, job: bytes, *, timeout_s: float = 600) -> str:
    """Accept a request with an undecodable job, in SQL only."""
    request_id = new_request_id()
    now = datetime.now(UTC)
    price_id = price_of_echo(stack)
    values = {
        "request_id": request_id,
        "account_id": caller.account_id,
        "key_id": caller.key_id,
        "model": "echo",
        "task": "text-generation",
        "price_id": price_id,
        "hold_nanos": HOLD_NANOS,
        "job": job,
        "accepted_at": now,
        "deadline_at": now + timedelta(seconds=timeout_s),
    }
    write(
        stack,
        insert(holds).values(values),
        update(accounts)
        .where(accounts.c.id == caller.account_id)
        .values(
            held_nanos=accounts.c.held_nanos + HOLD_NANOS,
            open_requests=accounts.c.open_requests + 1,
        ),
        update(keys)
        .where(keys.c.id == caller.key_id)
        .values(held_nanos=keys.c.held_nanos + HOLD_NANOS, open_requests=keys.c.open_requests + 1),
    )
    return request_id


def workflow_job(caller: Caller, price_id: int) -> bytes:

    plan = WorkflowPlan(
        steps=(PlannedStep("draw", "echo", "text-generation", price_id, Usage(), {}),),
        output="draw",
    )
    return encode(
        Job(
            RequestId("req_" + "0" * 32),
            str(caller.account_id),
            "echo",
            "text-generation",
            msgspec.to_builtins(plan),
            workflow=True,
        )
    )


def noted(stack: Stack, kind: str, name: str) -> bool:
    query = select(set_aside.c.name).where(set_aside.c.kind == kind, set_aside.c.name == name)
    return bool(read(stack, query))


def serves(stack: Stack, caller: Caller) -> None:
    """The gateway is live, shows that something is set aside, and others are served."""
    assert httpx.get(f"{stack.url}/health/live", timeout=5).json() == {"status": "live"}
    assert ended(caller, order(caller, "echo", "hello"))["status"] == "succeeded"
    answer = caller.http.post("/v1/chat/completions", json=chat("echo", "hello"))
    assert answer.status_code == 200, answer.text
    assert "gateway" in stack.processes
    assert stack.processes["gateway"].poll() is None


def test_a_hold_whose_job_cannot_be_read_is_set_aside_and_released_by_the_operator(
    stack: Stack,
) -> None:
    caller = stack.caller()
    admin = stack.caller(scopes=("admin", "read", "inference"))
    poisoned = poisoned_hold(stack, caller, b"no job at all")
    wait_for(lambda: noted(stack, "request", poisoned), "the hold to be set aside")

    serves(stack, caller)
    wait_for(
        lambda: httpx.get(f"{stack.url}/health/ready", timeout=5).json()["set_aside"] > 0,
        "health to tell",
    )
    listed = admin.http.get("/v1/admin/set-aside").json()["data"]
    assert poisoned in [note["name"] for note in listed if note["kind"] == "request"]
    metrics = httpx.get(f"{stack.url}/metrics", timeout=5).text
    assert 'tollgate_set_aside{kind="request"}' in metrics

    path = f"/v1/admin/set-aside/request/{poisoned}/release"
    assert caller.http.post(path).status_code == 403
    assert admin.http.post(path).status_code == 200

    found = ended(caller, poisoned)
    assert (found["status"], found["cost"]) == ("failed", "0")
    assert stack.held(caller) == 0
    assert not noted(stack, "request", poisoned)
    assert admin.http.post(path).status_code == 404
    assert stack.findings() == []


def test_the_command_line_releases_what_is_set_aside(stack: Stack) -> None:
    caller = stack.caller()
    poisoned = poisoned_hold(stack, caller, b"\xff\xff")
    wait_for(lambda: noted(stack, "request", poisoned), "the hold to be set aside")

    def run(*arguments: str) -> str:
        done = run_here(("aside", *arguments), stack.environment())
        assert done.exit_code == 0, done.output
        return done.stdout

    assert poisoned in run("list")
    run("release", "request", poisoned)

    assert ended(caller, poisoned)["status"] == "failed"
    assert stack.held(caller) == 0
    assert poisoned not in run("list")
    assert stack.findings() == []


def test_a_hold_whose_job_cannot_be_read_is_released_after_its_deadline(stack: Stack) -> None:
    caller = stack.caller()
    poisoned = [poisoned_hold(stack, caller, b"{", timeout_s=-60) for _ in range(3)]

    assert [ended(caller, one)["status"] for one in poisoned] == ["expired"] * 3
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_undecodable_outcome_stops_no_other(stack: Stack) -> None:
    caller = stack.caller()
    slow = order(caller, "slow", "three words here")
    server = redis.Redis.from_url(stack.redis_url)
    done = f"{stack.namespace}:{{echo}}:done"
    server.xadd(done, {"nonsense": "x"})
    server.xadd(
        done,
        {
            "id": "not an id",
            "attempt": "1",
            "status": "ok",
            "account": "",
            "reply": "",
            "outcome": b"\xff\x00",
            "reason": "",
        },
    )

    serves(stack, caller)

    assert ended(caller, slow)["status"] == "succeeded"
    wait_for(lambda: server.xlen(done) == 0, "the entries to be removed")
    server.close()
    assert stack.findings() == []


def test_an_outcome_that_cannot_be_booked_ends_its_request_free_and_stops_no_other(
    stack: Stack,
) -> None:
    caller = stack.caller()
    poisoned = order(caller, "slow", " ".join(["word"] * 60))
    # SQL refuses what this hold becomes: its windows are of no known budget.
    other = order(caller, "slow", "three words here")
    write(stack, update(holds).where(holds.c.request_id == poisoned).values(windows=["x", 1]))

    serves(stack, caller)

    assert ended(caller, other)["status"] == "succeeded"
    wait_for(lambda: noted(stack, "outcome", poisoned), "the outcome to be set aside")
    wait_for(lambda: noted(stack, "request", poisoned), "its request to be set aside")
    write(stack, update(holds).where(holds.c.request_id == poisoned).values(windows=None))
    admin = stack.caller(scopes=("admin",))
    path = f"/v1/admin/set-aside/request/{poisoned}/release"
    assert admin.http.post(path).status_code == 200
    assert ended(caller, poisoned)["status"] == "failed"
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_an_announcement_that_cannot_be_read_hides_no_other_worker(stack: Stack) -> None:
    server = redis.Redis.from_url(stack.redis_url)
    index = f"{stack.namespace}:{{workers}}"
    server.sadd(index, "odd")
    server.set(f"{index}:odd", b"{]", ex=60)

    serves(stack, stack.caller())

    server.delete(f"{index}:odd")
    server.close()


def test_a_batch_whose_row_cannot_be_run_is_set_aside(stack: Stack) -> None:
    caller = stack.caller()
    batch_id = new_id("batch_")
    now = datetime.now(UTC)
    write(
        stack,
        insert(batches).values(
            id=batch_id,
            account_id=caller.account_id,
            key_id=caller.key_id,
            endpoint="/v1/of-another-version",
            input_file_id=new_id("file-"),
            completion_window="24h",
            status="validating",
            created_at=now,
            expires_at=now + timedelta(days=1),
        ),
    )
    wait_for(lambda: noted(stack, "batch", batch_id), "the batch to be set aside")

    serves(stack, caller)

    admin = stack.caller(scopes=("admin",))
    path = f"/v1/admin/set-aside/batch/{batch_id}/release"
    assert admin.http.post(path).status_code == 200
    found = caller.http.get(f"/v1/batches/{batch_id}").json()
    assert found["status"] == "failed"
    assert found["errors"]["data"][0]["code"] == "released"


def test_a_step_whose_output_cannot_be_read_is_set_aside(stack: Stack) -> None:
    caller = stack.caller()
    request_id = poisoned_hold(stack, caller, workflow_job(caller, price_of_echo(stack)))
    write(
        stack,
        insert(steps).values(
            request_id=request_id,
            name="draw",
            attempt=1,
            model="echo",
            job=b"",
            status="succeeded",
            placed_at=datetime.now(UTC) - timedelta(minutes=1),
            ended_at=datetime.now(UTC) - timedelta(minutes=1),
            output=b"\xc1",
        ),
    )
    wait_for(lambda: noted(stack, "request", request_id), "the workflow to be set aside")

    serves(stack, caller)

    admin = stack.caller(scopes=("admin",))
    path = f"/v1/admin/set-aside/request/{request_id}/release"
    assert admin.http.post(path).status_code == 200
    assert ended(caller, request_id)["status"] == "failed"
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_obsolete_notes_are_deleted(stack: Stack) -> None:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            add_note(connection, "request", "req_that_ended", "x")
            add_note(connection, "outcome", "req_recent", "x")
            delete_obsolete_notes(connection, datetime.now(UTC))
            assert not count_notes(connection).get("request")
            assert count_notes(connection)["outcome"] >= 1
            connection.execute(set_aside.delete().where(set_aside.c.name == "req_recent"))
    finally:
        database.engine.dispose()


# Last: a price row cannot be deleted.
def test_a_price_that_cannot_be_read_stops_no_other_model(stack: Stack) -> None:
    caller = stack.caller()
    now = datetime.now(UTC)

    def poison(connection: Connection) -> None:
        made = connection.execute(
            insert(prices)
            .values(
                model="brief",
                components=[{"no": "component"}],
                minimum_nanos=0,
                content_sha256=uuid.uuid4().hex,
            )
            .returning(prices.c.id)
        )
        connection.execute(
            insert(price_periods).values(
                model="brief",
                account_id=0,
                effective_from=now,
                price_id=made.scalar_one(),
                source="operator",
            )
        )

    database = Database(stack.database_url)
    with database.transaction() as connection:
        poison(connection)
    database.engine.dispose()

    def refused() -> bool:
        answer = caller.http.post("/v1/chat/completions", json=chat("brief", "hello"))
        return answer.status_code == 503 and answer.json()["error"]["code"] == "no_price"

    wait_for(refused, "the model not to be sold")
    serves(stack, caller)
    assert caller.http.get("/v1/models").status_code == 200
