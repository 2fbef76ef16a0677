"""Exports over HTTP: few run at a time, and none blocks other requests."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.api.native import exports
from gateway.api.native.exports import ACCOUNT_EXPORTS_MAX, EXPORTS_MAX, ExportRequest, ExportSlots
from gateway.billing.usage.report import Filters
from gateway.errors import TooManyRequests
from gateway.sql.database import Database
from tests.billing.test_exports import SPAN
from tests.gateway.test_usage import spend
from tests.stack import Caller, Stack
from workers.contract.blobs import Blobs


@pytest.fixture
def tarpits(stack: Stack) -> Iterator[list[socket.socket]]:
    """Connections whose client asks for an export and reads nothing of it."""
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def ask(stack: Stack, caller: Caller) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", stack.port))
    connection.sendall(
        b"GET /v1/usage/export HTTP/1.1\r\nHost: t\r\n"
        b"Authorization: Bearer " + caller.secret.encode() + b"\r\n\r\n"
    )
    return connection


def test_exports_beyond_the_slots_are_refused_and_nothing_else_waits(
    stack: Stack, tarpits: list[socket.socket]
) -> None:
    callers = [stack.caller() for _ in range(3)]
    for caller in callers:
        spend(caller, "one")

    tarpits += [ask(stack, caller) for caller in callers for _ in range(10)]
    deadline = time.monotonic() + 5
    answers = []
    while time.monotonic() < deadline:
        answers.append(callers[0].http.get("/v1/requests").status_code)
        answers.append(callers[1].http.get("/health/ready").status_code)

    assert set(answers) == {200}
    assert httpx.get(f"{stack.url}/health/ready", timeout=2).is_success


def test_slots_are_limited_per_account_and_in_total() -> None:
    slots = ExportSlots()
    taken = [slots.take(1) for _ in range(ACCOUNT_EXPORTS_MAX)]

    with pytest.raises(TooManyRequests) as refused:
        slots.take(1)
    assert refused.value.code == "too_many_exports"
    taken += [slots.take(account) for account in range(2, 2 + EXPORTS_MAX - ACCOUNT_EXPORTS_MAX)]
    with pytest.raises(TooManyRequests):
        slots.take(99)

    slots.leave(taken[0])
    slots.take(1)


def test_stalled_export_loses_its_slot_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exports, "STALLED_S", 0.0)
    slots = ExportSlots()
    stalled = [slots.take(1) for _ in range(ACCOUNT_EXPORTS_MAX)]
    time.sleep(0.01)

    slots.take(1)

    with pytest.raises(ConnectionAbortedError):
        slots.move(stalled[0])


def test_slot_is_taken_before_the_first_part_and_freed_with_the_file(tmp_path: Path) -> None:
    """A client can go away before anything of its file was asked for."""
    database = Database(f"sqlite:///{tmp_path / 'none.db'}")
    blobs = Blobs("memory:///")
    asked = ExportRequest(SPAN, Filters((1,)), "csv", "native", "usage.csv")
    files = [
        exports._File(database, blobs, asked, exports._slots.take(1))
        for _ in range(ACCOUNT_EXPORTS_MAX)
    ]

    with pytest.raises(TooManyRequests):
        exports._slots.take(1)
    del files

    exports._slots.leave(exports._slots.take(1))
    database.dispose()
