"""``kill -9`` of the gateway during a workflow: no step runs twice, and the run is charged once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest
import redis

from gateway.failpoints import Failpoint
from tests.artist import Artist, at_work
from tests.databases import Databases
from tests.stack import Caller, Stack, ended, wait_for
from tests.workflows.conftest import MODELS, make_stack
from tests.workflows.test_workflows import jobs_of, placed, receipt

KEYED = {"Idempotency-Key": "one order"}
BODY = {"model": "draw-then-enlarge", "input": {"prompt": "a red circle"}}


@pytest.fixture(params=["sqlite", "postgresql"])
def own(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Artist]]:
    kind: Literal["sqlite", "postgresql"] = request.param
    made = make_stack(tmp_path / "home", Databases(kind, tmp_path, postgres).make(), valkey)
    with at_work(MODELS, valkey, made.namespace, made.environment()["BLOB_URL"]) as artist:
        try:
            yield made, artist
        finally:
            made.stop()


def order(caller: Caller) -> str:
    """Place one order, as often as it takes; return its id."""
    found = ""

    def accepted() -> bool:
        nonlocal found
        with contextlib.suppress(httpx.HTTPError):
            answer = caller.http.post("/v1/requests", json=BODY, headers=KEYED)
            found = answer.json()["id"] if answer.status_code == 202 else ""
        return bool(found)

    wait_for(accepted, "the order to be accepted")
    return found


@pytest.mark.parametrize(
    ("point", "own"),
    [
        ("after_hold", "sqlite"),
        pytest.param("step_placed", "sqlite", marks=pytest.mark.long),
        ("step_recorded", "postgresql"),
        ("workflow_ended", "sqlite"),
        pytest.param("closed", "postgresql", marks=pytest.mark.long),
    ],
    indirect=["own"],
)
def test_run_continues_after_its_gateway_crashes(
    point: Failpoint, own: tuple[Stack, Artist]
) -> None:
    stack, artist = own
    stack.start_gateway(failpoint=point)
    stack.wait_for_model("draw-then-enlarge")
    caller = stack.caller()
    with contextlib.suppress(httpx.HTTPError):
        caller.http.post("/v1/requests", json=BODY, headers=KEYED)
    wait_for(lambda: stack.processes["gateway"].poll() is not None, "the gateway to die")

    stack.start_gateway()
    request_id = order(caller)
    found = ended(caller, request_id)

    assert (found["status"], found["cost"]) == ("succeeded", "0.0105"), found
    assert [job.model for job in jobs_of(artist, request_id)] == ["draw", "enlarge"]
    assert [step["attempts"] for step in receipt(caller, request_id)["steps"]] == [1, 1]
    assert caller.http.get("/v1/balance").json()["posted"] == "0.9895"
    assert stack.held(caller) == 0
    assert stack.findings() == []


@pytest.mark.parametrize("own", ["sqlite"], indirect=True)
def test_steps_that_a_crashed_gateway_did_not_stop_are_stopped(own: tuple[Stack, Artist]) -> None:
    stack, artist = own
    stack.start_gateway(failpoint="closed")
    stack.wait_for_model("draw")
    caller = stack.caller()
    request_id = placed(caller, "draw-then-enlarge", prompt="!slow")
    wait_for(lambda: bool(jobs_of(artist, request_id)), "the first step to run")
    with contextlib.suppress(httpx.HTTPError):
        caller.http.post(f"/v1/requests/{request_id}/cancel")
    wait_for(lambda: stack.processes["gateway"].poll() is not None, "the gateway to die")

    stack.start_gateway()

    found = ended(caller, request_id)
    assert (found["status"], found["cost"]) == ("cancelled", "0")
    server = redis.Redis.from_url(stack.redis_url)
    leases = f"{stack.namespace}:{{draw}}:leases"
    # It would draw for twenty seconds.
    wait_for(lambda: server.zcard(leases) == 0, "the step to be stopped")
    server.close()
    assert len(jobs_of(artist, request_id)) == 1
    assert stack.findings() == []


@pytest.mark.parametrize("own", ["sqlite"], indirect=True)
def test_steps_that_the_queue_lost_are_queued_again(own: tuple[Stack, Artist]) -> None:
    stack, artist = own
    stack.start_gateway()
    stack.wait_for_model("draw")
    caller = stack.caller()
    request_id = placed(caller, "both-then-blend", one="!slow a", other="b")
    wait_for(lambda: len(jobs_of(artist, request_id)) == 2, "both to run")
    server = redis.Redis.from_url(stack.redis_url)
    for key in server.scan_iter(f"{stack.namespace}:{{draw}}:*"):
        server.delete(key)
    server.close()

    wait_for(lambda: len(jobs_of(artist, request_id)) == 3, "the lost step to run again")
    caller.http.post(f"/v1/requests/{request_id}/cancel")

    assert ended(caller, request_id)["status"] == "cancelled"
    assert [job.input["prompt"] for job in jobs_of(artist, request_id)].count("b") == 1
