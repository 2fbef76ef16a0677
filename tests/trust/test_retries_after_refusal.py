"""A client that obeys Retry-After is served: a refusal does not use up its idempotency key."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import func, select

from gateway.ledger.holds import Held, Replayed, hold
from gateway.ledger.reconcile import reconcile
from gateway.ledger.settle import Settlement
from gateway.sql.database import Database
from gateway.tables.core import holds, idempotency, receipts
from tests.databases import Databases
from tests.ledger.books import open_books
from tests.stack import Caller, Stack, ended, not_started, order

BODY = {"model": "echo", "input": {"messages": [{"role": "user", "content": "hello"}]}}


@pytest.fixture
def full_stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    """No worker runs, and each account may queue one request."""
    url = Databases("sqlite", tmp_path, postgres).make()
    stack = not_started(tmp_path / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}")
    try:
        stack.start_gateway(environment={"TOLLGATE_ACCOUNT_QUEUE_MAX": "1"})
        yield stack
    finally:
        stack.stop()


def place(caller: Caller, name: str, *, path: str = "/v1/requests") -> tuple[int, dict[str, str]]:
    answer = caller.http.post(path, json=BODY, headers={"Idempotency-Key": name})
    return answer.status_code, answer.json()


def test_request_refused_by_a_full_queue_is_a_new_attempt_when_repeated(
    full_stack: Stack,
) -> None:
    caller = full_stack.caller()
    first = order(caller, "echo", "first")

    refused = [place(caller, "again") for _ in range(2)]
    caller.http.post(f"/v1/requests/{first}/cancel")
    accepted = place(caller, "again")
    repeated = place(caller, "again")
    full_stack.start_worker()

    assert [status for status, _ in refused] == [429, 429]
    assert {body["error"]["code"] for _, body in refused} == {"account_full"}  # type: ignore[index]  # an error's body
    assert accepted[0] == 202
    assert repeated[1]["id"] == accepted[1]["id"]
    assert ended(caller, accepted[1]["id"])["status"] == "succeeded"
    assert full_stack.held(caller) == 0
    assert full_stack.findings() == []


def test_concurrent_requests_under_one_key_run_once_however_often_the_queue_was_full(
    full_stack: Stack,
) -> None:
    caller = full_stack.caller()
    first = order(caller, "echo", "first")
    seen: list[tuple[int, dict[str, str]]] = []

    def insist() -> None:
        seen.extend(place(caller, "race") for _ in range(10))

    threads = [threading.Thread(target=insist) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    caller.http.post(f"/v1/requests/{first}/cancel")
    _, last = place(caller, "race")
    full_stack.start_worker()

    assert {status for status, _ in seen} <= {202, 429}
    assert ended(caller, last["id"])["status"] == "succeeded"
    ends = [ended(caller, body["id"])["status"] for status, body in seen if status == 202]
    assert set(ends) <= {"cancelled"}
    assert full_stack.held(caller) == 0
    assert full_stack.findings() == []


def test_idempotency_key_is_freed_in_the_transaction_that_releases_the_hold(
    database: Database,
) -> None:
    books = open_books(database, credit=10**6)
    taken: list[str] = []

    def insist() -> None:
        for _ in range(15):
            wanted = books.order(idempotency_key="race", body_sha256=b"x" * 32)
            with database.transaction() as connection:
                [answer] = hold(connection, [wanted])
            if isinstance(answer, Held):
                taken.append(wanted.request_id)
                books.settle(
                    Settlement(
                        wanted.request_id, "cancelled", "queue_full", billable=False, freed="race"
                    )
                )
            else:
                assert isinstance(answer, Replayed)

    threads = [threading.Thread(target=insist) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    with database.transaction() as connection:
        counts = [
            connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in (holds, idempotency, receipts)
        ]
        assert reconcile(connection, now=datetime.now(UTC)) == []
    assert counts == [0, 0, len(taken)]


def test_idempotency_key_of_a_later_request_is_not_freed_by_an_earlier_one(
    database: Database,
) -> None:
    books = open_books(database, credit=10**6)
    first, second = (
        books.order(idempotency_key=name, body_sha256=b"x" * 32) for name in ("one", "two")
    )
    with database.transaction() as connection:
        hold(connection, [first, second])

    books.settle(
        Settlement(first.request_id, "cancelled", "queue_full", billable=False, freed="two")
    )

    with database.transaction() as connection:
        assert connection.execute(select(func.count()).select_from(idempotency)).scalar_one() == 2
