"""Webhooks of one account do not affect those of others, whatever their URLs and receivers."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, delete, func, insert, select

from gateway.ids import new_request_id
from gateway.sql.database import Database
from gateway.tables.core import receipts
from gateway.tables.webhooks import webhook_deliveries
from tests.databases import Databases
from tests.stack import Caller, Stack, ended, free_port, order, running, wait_for


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("webhooks")
    url = Databases("sqlite", directory, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    with running(directory / "home", url, valkey, namespace=name) as made:
        yield made


@pytest.fixture
def stack(shared: Stack) -> Iterator[Stack]:
    yield shared
    shared.close_clients()


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[str]]]:
    """A receiver that takes everything, and the ids it was sent."""
    received: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            received.append(self.headers["webhook-id"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as url:
        yield url, received


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def place(caller: Caller, url: str) -> str:
    value = {"messages": [{"role": "user", "content": "one two"}]}
    answer = caller.http.post(
        "/v1/requests", json={"model": "echo", "input": value, "webhook": url}
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@pytest.mark.parametrize(
    "url",
    ["http://8.8.8.8/\u0001", "https://☃.net/hook", "not a URL", "http://[::1", "http://\u0001/"],
)
def test_invalid_stored_url_does_not_end_the_gateway(
    stack: Stack, receiver: tuple[str, list[str]], url: str
) -> None:
    """Rows that an earlier version accepted are tried, postponed and stop nothing else."""
    healthy, received = receiver
    caller = stack.caller()
    poisoned = order(caller, "echo", "poison")
    ended(caller, poisoned)

    queue_delivery(stack, caller, poisoned, url)
    wait_for(lambda: attempts(stack, poisoned) >= 1, "the first try of the poisoned row")
    placed = place(caller, healthy)

    wait_for(lambda: placed in received, "the delivery after the poisoned row")
    assert stack.processes["gateway"].poll() is None
    assert caller.http.get("/health/ready").is_success


def test_invalid_webhook_url_is_refused_at_submission(stack: Stack) -> None:
    caller = stack.caller()
    value = {"messages": [{"role": "user", "content": "one two"}]}

    for url in ("https://8.8.8.8/\u0001", "https://☃.net/", "https://a\\b/", "https://u@a.com/"):
        answer = caller.http.post(
            "/v1/requests", json={"model": "echo", "input": value, "webhook": url}
        )
        assert answer.status_code == 400, (url, answer.text)
        assert "webhook is not a valid URL" in answer.text


def test_delivery_that_ends_the_process_each_time_is_given_up(
    stack: Stack, receiver: tuple[str, list[str]]
) -> None:
    """Attempts are counted before each try, so those without a result count as well."""
    url, received = receiver
    caller = stack.caller()
    deadly = order(caller, "echo", "deadly")
    ended(caller, deadly)

    queue_delivery(stack, caller, deadly, url, attempts=10)

    wait_for(lambda: outcome(stack, deadly) == "failed", "the end of the delivery")
    assert deadly not in received


@pytest.fixture
def tarpit() -> Iterator[tuple[str, list[float]]]:
    """A receiver that accepts connections and answers none, and when each was made."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    accepted: list[float] = []
    kept: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                accepted.append(time.monotonic())

    thread = threading.Thread(target=accept)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook", accepted
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for one in kept:
        one.close()


def test_tarpit_of_one_account_delays_no_other_account(
    stack: Stack, receiver: tuple[str, list[str]], tarpit: tuple[str, list[float]]
) -> None:
    url, received = receiver
    silent, accepted = tarpit
    bad, good = stack.caller(), stack.caller()
    for _ in range(64):
        place(bad, silent)
    wait_for(lambda: len(accepted) >= 8, "the tarpit to be full")

    placed = place(good, url)
    wait_for(lambda: placed in received, "the delivery beside the tarpit")

    assert len(accepted) == 8, "none of the tarpit's was over yet, and no more of them were sent"


def test_a_thousand_failing_deliveries_of_one_account_delay_no_other_account(
    stack: Stack, receiver: tuple[str, list[str]]
) -> None:
    class Failing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(0.5)
            self.send_response(500)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    url, received = receiver
    bad, good = stack.caller(), stack.caller()
    example = order(bad, "echo", "failing")
    ended(bad, example)
    with serving(Failing) as failing:
        copy_deliveries(stack, bad, example, failing, 1000)
        wait_for(lambda: any_tried(stack, bad), "the first failures")

        placed = place(good, url)
        wait_for(lambda: placed in received, "the delivery beside the failing ones")

        with transaction(stack) as connection:
            table = webhook_deliveries
            mine = select(func.count()).where(table.c.account_id == bad.account_id)
            assert connection.scalar(mine.where(table.c.tried == 0)), "it did not wait for them all"
        with transaction(stack) as connection:
            table = webhook_deliveries
            mine = delete(table).where(table.c.account_id == bad.account_id)
            connection.execute(mine.where(table.c.request_id != example))


def copy_deliveries(stack: Stack, caller: Caller, request_id: str, url: str, number: int) -> None:
    """Write deliveries as if so many requests had ended; their receipts are copies of one."""
    now = datetime.now(UTC)
    with transaction(stack) as connection:
        row = (
            connection.execute(select(receipts).where(receipts.c.request_id == request_id))
            .mappings()
            .one()
        )
        ids = [new_request_id() for _ in range(number)]
        # As released requests: copies of a charged one would not match the transfers.
        released = {"outcome": "released", "charge_nanos": 0, "transfer_id": None}
        connection.execute(insert(receipts), [{**row, **released, "request_id": id} for id in ids])
        connection.execute(
            insert(webhook_deliveries),
            [
                {
                    "request_id": id,
                    "account_id": caller.account_id,
                    "url": url,
                    "due_at": now,
                    "queued_at": now,
                }
                for id in ids
            ],
        )


def any_tried(stack: Stack, caller: Caller) -> bool:
    table = webhook_deliveries
    with transaction(stack) as connection:
        query = select(func.max(table.c.tried)).where(table.c.account_id == caller.account_id)
        return bool(connection.scalar(query))


def test_deliveries_are_kept_with_their_attempts_and_can_be_sent_again(
    stack: Stack, receiver: tuple[str, list[str]]
) -> None:
    codes = [500, 204, 503, 200]

    class Scripted(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            ids.append(self.headers["webhook-id"])
            self.send_response(codes.pop(0))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    ids: list[str] = []
    caller, other = stack.caller(), stack.caller()
    admin = stack.caller(scopes=("read", "admin"))
    with serving(Scripted) as url:
        placed = place(caller, url)
        path = f"/v1/requests/{placed}/deliveries"

        def shown() -> dict[str, Any]:
            data = caller.http.get(path).json()["data"]
            return dict(data[0]) if data else {}

        wait_for(lambda: shown().get("status") == "delivered", "the second attempt")
        first = shown()
        assert [(one["number"], one["code"], one["error"]) for one in first["attempts"]] == [
            (1, 500, "status"),
            (2, 204, None),
        ]
        assert all(one["duration_ms"] >= 0 for one in first["attempts"])

        assert other.http.post(f"/v1/requests/{placed}/redeliver").status_code == 404
        assert other.http.get(path).status_code == 404
        again = caller.http.post(f"/v1/requests/{placed}/redeliver")
        assert again.status_code == 202, again.text
        assert again.json()["status"] == "pending"
        wait_for(lambda: shown().get("status") == "delivered", "the new series")

    assert ids == [placed] * 4, "the same webhook-id each time"
    assert [one["code"] for one in shown()["attempts"]] == [500, 204, 503, 200]
    (listed,) = caller.http.get("/v1/webhooks/deliveries?status=delivered").json()["data"]
    assert listed == shown()
    assert other.http.get("/v1/webhooks/deliveries").json()["data"] == []
    of_all = admin.http.get("/v1/admin/webhooks/deliveries?limit=100").json()["data"]
    assert caller.account_id in {one["account_id"] for one in of_all if one["id"] == placed}
    assert caller.http.get("/v1/admin/webhooks/deliveries").status_code == 403
    assert caller.http.post(f"/v1/admin/requests/{placed}/redeliver").status_code == 403
    assert admin.http.post("/v1/admin/requests/req_x/redeliver").status_code == 404


def test_unanswered_delivery_has_a_reason(stack: Stack) -> None:
    caller = stack.caller()
    placed = place(caller, f"http://127.0.0.1:{free_port()}/hook")

    def attempts_shown() -> list[dict[str, Any]]:
        data = caller.http.get(f"/v1/requests/{placed}/deliveries").json()["data"]
        return list(data[0]["attempts"]) if data else []

    wait_for(lambda: bool(attempts_shown()), "the first attempt")

    assert attempts_shown()[0]["error"] == "connect"
    assert attempts_shown()[0]["code"] is None


def queue_delivery(
    stack: Stack, caller: Caller, request_id: str, url: str, *, attempts: int = 0
) -> None:
    with transaction(stack) as connection:
        connection.execute(
            insert(webhook_deliveries).values(
                request_id=request_id,
                account_id=caller.account_id,
                url=url,
                attempts=attempts,
                tried=attempts,
                due_at=datetime.now(UTC),
                queued_at=datetime.now(UTC),
            )
        )


def attempts(stack: Stack, request_id: str) -> int:
    table = webhook_deliveries
    with transaction(stack) as connection:
        found = connection.scalar(select(table.c.attempts).where(table.c.request_id == request_id))
    return int(found or 0)


def outcome(stack: Stack, request_id: str) -> str | None:
    table = webhook_deliveries
    with transaction(stack) as connection:
        return connection.scalar(select(table.c.outcome).where(table.c.request_id == request_id))


@contextlib.contextmanager
def transaction(stack: Stack) -> Iterator[Connection]:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            yield connection
    finally:
        database.dispose()
