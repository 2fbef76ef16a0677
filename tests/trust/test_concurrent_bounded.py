"""Default limits bound the open requests of an account or key, and its batches still finish."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from openai import OpenAI, RateLimitError

from gateway.accounts.limits import Limit, set_limit
from gateway.sql.database import Database
from tests.databases import Databases
from tests.failures.test_batches import LINES, content, submit
from tests.failures.test_batches import ended as batch_ended
from tests.stack import Caller, Stack, chat, ended, not_started, order, wait_for

BODY = {"model": "echo", "input": {"messages": [{"role": "user", "content": "hello"}]}}
BOUNDS = {"TOLLGATE_ACCOUNT_CONCURRENT": "4", "TOLLGATE_KEY_CONCURRENT": "2"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("bounded")
    url = Databases("sqlite", directory, postgres).make()
    stack = not_started(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}")
    try:
        stack.start_gateway(environment=BOUNDS)
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def still_stack(shared: Stack) -> Iterator[Stack]:
    """No worker runs, and each key may have two open requests."""
    yield shared
    shared.close_clients()
    if "worker" in shared.processes:
        shared.kill("worker")


def test_flooding_key_is_refused_at_its_default_and_other_accounts_are_not(
    still_stack: Stack,
) -> None:
    flooding, other = still_stack.caller(), still_stack.caller()
    named = {"Idempotency-Key": "name"}

    answers = [flooding.http.post("/v1/requests", json=BODY) for _ in range(5)]
    refused = [flooding.http.post("/v1/requests", json=BODY, headers=named) for _ in range(2)]
    held = still_stack.held(flooding)
    order(other, "echo", "hello")

    assert [answer.status_code for answer in answers] == [202, 202, 429, 429, 429]
    for answer in (*answers[2:], *refused):
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "too_many_concurrent"
    placed = [answer.json()["id"] for answer in answers[:2]]
    flooding.http.post(f"/v1/requests/{placed[0]}/cancel")
    again = [flooding.http.post("/v1/requests", json=BODY, headers=named) for _ in range(2)]
    assert [answer.status_code for answer in again] == [202, 202]
    assert len({answer.json()["id"] for answer in again}) == 1
    still_stack.start_worker()
    assert ended(flooding, again[0].json()["id"])["status"] == "succeeded"
    assert ended(flooding, placed[1])["status"] == "succeeded"
    assert held > 0
    wait_for(lambda: still_stack.held(flooding) == 0, "the holds to end")
    assert still_stack.findings() == []


def test_refusal_is_in_the_dialect_of_the_interface(still_stack: Stack) -> None:
    caller = still_stack.caller()
    still_stack.start_worker()
    still_stack.wait_for_model("slow")
    for _ in range(2):
        order(caller, "slow", "hello " * 400)
    with (
        OpenAI(
            base_url=f"{still_stack.url}/v1",
            api_key=caller.http.headers["authorization"].removeprefix("Bearer "),
            max_retries=0,
        ) as client,
        pytest.raises(RateLimitError) as caught,
    ):
        client.chat.completions.create(**chat("slow", "hello"))

    assert caught.value.code == "too_many_concurrent"
    assert caught.value.response.headers["retry-after"] == "1"
    assert "This key already has 2 requests" in caught.value.message


def test_limit_that_is_set_counts_in_place_of_the_default(still_stack: Stack) -> None:
    caller = still_stack.caller()
    allow(still_stack, caller, 6)

    answers = [caller.http.post("/v1/requests", json=BODY).status_code for _ in range(8)]

    assert answers == [202] * 6 + [429] * 2


def test_batch_of_a_key_at_its_default_completes(still_stack: Stack) -> None:
    caller = still_stack.caller()
    for _ in range(2):
        order(caller, "echo", "hello")
    assert caller.http.post("/v1/requests", json=BODY).status_code == 429

    batch_id = submit(caller, content("echo"))
    still_stack.start_worker()

    found = batch_ended(caller, batch_id)
    assert found["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert still_stack.findings() == []


def allow(stack: Stack, caller: Caller, concurrent: int) -> None:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            set_limit(connection, Limit(caller.account_id, concurrent_max=concurrent))
    finally:
        database.dispose()
