"""Large bodies: refused before they are read, bounded in memory, and no delay for others."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.artist import Artist, at_work, png
from tests.databases import Databases
from tests.gateway.conftest import MEDIA
from tests.stack import Caller, Stack, ended, wait_for

ACCOUNT_BYTES = 30_000_000
GATEWAY_BYTES = 50_000_000
MEMORY_BYTES = 3_000_000


@pytest.fixture(scope="module")
def drawing(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Artist]]:
    """A gateway with little memory for bodies, whose worker generates images without a model."""
    directory = tmp_path_factory.mktemp("bodies") / "home"
    directory.mkdir()
    catalog = directory / "catalog.yaml"
    catalog.write_text("version: 1\nmodels:\n" + MEDIA)
    url = Databases("sqlite", directory, postgres).make()
    stack = Stack(directory, url, valkey, f"t{directory.stat().st_ino}", catalog)
    with at_work(["pocket"], valkey, stack.namespace, stack.environment()["BLOB_URL"]) as artist:
        try:
            stack.start_gateway(
                environment={
                    "TOLLGATE_ACCOUNT_BODIES_BYTES_MAX": str(ACCOUNT_BYTES),
                    "TOLLGATE_BODIES_BYTES_MAX": str(GATEWAY_BYTES),
                    "TOLLGATE_BODIES_MEMORY_BYTES_MAX": str(MEMORY_BYTES),
                }
            )
            stack.wait_for_model("pocket")
            yield stack, artist
        finally:
            stack.stop()


@pytest.fixture
def stack(drawing: tuple[Stack, Artist]) -> Iterator[Stack]:
    yield drawing[0]
    drawing[0].close_clients()


def picture(size: int) -> bytes:
    """A PNG of about so many bytes: what follows its end is ignored."""
    return png(8, 8) + random.randbytes(size)


def edit(data: bytes) -> bytes:
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    body = {"model": "pocket", "input": {"prompt": "a circle", "image": uri}}
    return json.dumps(body).encode()


def order(caller: Caller, body: bytes, **headers: str) -> httpx.Response:
    return caller.http.post(
        "/v1/requests", content=body, headers={"Content-Type": "application/json", **headers}
    )


@contextlib.contextmanager
def begun(caller: Caller, stack: Stack, size: int, begin: bytes = b"") -> Iterator[socket.socket]:
    """A request whose body is announced, and does not come."""
    head = (
        f"POST /v1/requests HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {caller.secret}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", stack.port), timeout=20) as client:
        client.sendall(head.encode() + begin)
        yield client


def memory_peak(stack: Stack) -> int:
    """Bytes that the gateway has had resident at most."""
    status = Path(f"/proc/{stack.processes['gateway'].pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_file_extracted_from_a_large_body_is_unchanged(drawing: tuple[Stack, Artist]) -> None:
    stack, _ = drawing
    caller, data = stack.caller(), picture(3_000_000)

    answer = order(caller, edit(data))

    assert answer.status_code == 202, answer.text
    done = ended(caller, answer.json()["id"])
    assert done["status"] == "succeeded", done
    stored = [path for path in (stack.directory / "blobs").rglob("*") if path.is_file()]
    assert any(path.read_bytes() == data for path in stored)


def test_repeated_large_body_is_one_request(stack: Stack) -> None:
    caller, body = stack.caller(), edit(picture(1_000_000))

    first = order(caller, body, **{"Idempotency-Key": "a"})
    again = order(caller, body, **{"Idempotency-Key": "a"})
    other = order(caller, edit(picture(1_000_000)), **{"Idempotency-Key": "a"})

    assert first.json()["id"] == again.json()["id"]
    assert other.status_code == 409


def test_account_without_standing_is_refused_before_its_body_is_read(stack: Stack) -> None:
    with begun(stack.caller(credit="0"), stack, 40_000_000) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 402 ")
    with begun(Caller(0, 0, "tg_unknown", httpx.Client()), stack, 40_000_000) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 401 ")


def test_body_of_unknown_size_is_admitted_like_a_large_one(stack: Stack) -> None:
    poor, rich = stack.caller(credit="0"), stack.caller()

    def pieces() -> Iterator[bytes]:
        body = edit(picture(500_000))
        yield from (body[start : start + 50_000] for start in range(0, len(body), 50_000))

    headers = {"Content-Type": "application/json"}
    assert poor.http.post("/v1/requests", content=pieces(), headers=headers).status_code == 402
    # Without its size it may have any, which is more than an account's part, and fits alone.
    assert rich.http.post("/v1/requests", content=pieces(), headers=headers).status_code == 202


def test_bytes_in_flight_are_bounded_for_an_account_and_for_the_gateway(stack: Stack) -> None:
    first, second, third = stack.caller(), stack.caller(), stack.caller()
    small = edit(picture(500_000))

    with begun(first, stack, 25_000_000), begun(second, stack, 24_500_000):
        wait_for(lambda: order(first, edit(picture(6_000_000))).status_code == 429, "the account's")
        refused = order(first, edit(picture(6_000_000)))
        assert refused.json()["error"]["code"] == "too_many_bytes_in_flight"
        assert refused.json()["error"]["limit"] == ACCOUNT_BYTES
        assert int(refused.headers["retry-after"]) > 0
        busy = order(third, edit(picture(6_000_000)))
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "too_many_bytes_in_flight")
        assert third.http.get("/v1/balance").is_success

    wait_for(lambda: order(first, small).status_code == 202, "room again")


def test_text_in_a_large_body_stays_within_the_budget_of_memory(stack: Stack) -> None:
    caller = stack.caller()
    body = {"model": "pocket", "input": {"prompt": "a" * (MEMORY_BYTES + 100_000)}}

    busy = order(caller, json.dumps(body).encode())
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "too_many_bytes_in_flight")

    body = {"model": "pocket", "input": {"prompt": "a" * 400_000}}
    refused = order(caller, json.dumps(body).encode())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input.prompt")


def test_file_that_is_not_base64_is_refused_by_its_field(stack: Stack) -> None:
    uri = "data:image/png;base64," + "*" * 400_000
    body = {"model": "pocket", "input": {"prompt": "a circle", "image": uri}}

    refused = order(stack.caller(), json.dumps(body).encode())

    assert refused.status_code == 400
    assert "invalid base64" in refused.json()["error"]["message"]


def test_concurrent_large_bodies_need_little_memory_and_delay_others_little(stack: Stack) -> None:
    body = edit(picture(18_000_000))
    order(stack.caller(), edit(picture(500_000)))
    before = memory_peak(stack)
    statuses: list[int] = []
    waits: list[float] = []

    def send(caller: Caller) -> None:
        with contextlib.suppress(httpx.HTTPError):
            statuses.append(order(caller, body).status_code)

    threads = [threading.Thread(target=send, args=(stack.caller(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        httpx.get(f"{stack.url}/health/live", timeout=30).raise_for_status()
        waits.append(time.monotonic() - began)

    assert set(statuses) <= {202, 503}
    assert statuses.count(202) >= 2
    # Eight bodies of 24 MB that were parsed in memory would take 600 MB and more.
    assert memory_peak(stack) - before < 60_000_000
    assert not list((stack.directory / "spool").iterdir())
