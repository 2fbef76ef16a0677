"""No input is answered with 500, and none is stored that SQL cannot hold."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.databases import Databases, Kind
from tests.stack import Caller, Stack, chat, running

GMI = "/api/v1/ie/requestqueue/apikey"
HUGE = 10**24
FAR = ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00")
DIGITS = str(HUGE)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def gateway(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: str,
    valkey: str,
) -> Iterator[Stack]:
    kind: Kind = request.param
    directory = tmp_path_factory.mktemp("door")
    url = Databases(kind, directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


@pytest.fixture
def stack(gateway: Stack) -> Iterator[Stack]:
    yield gateway
    gateway.close_clients()


@pytest.fixture
def caller(stack: Stack) -> Caller:
    return stack.caller(scopes=("inference", "read", "admin"))


def error_of(answer: httpx.Response) -> Any:
    """Check the error body of the path's dialect; return the part with the message."""
    body = answer.json()
    path = answer.request.url.path
    if path.startswith(GMI):
        assert isinstance(body["error"], str)
        return body
    if path.startswith("/elevenlabs"):
        assert body["detail"]["status"]
        return body["detail"]
    assert body["error"]["code"]
    return body["error"]


JSON_PATHS = [
    "/v1/chat/completions",
    "/v1/images/edits",
    "/v1/requests",
    "/v1/admin/accounts",
    f"{GMI}/requests",
    "/elevenlabs/v1/music",
]


@pytest.mark.parametrize("path", JSON_PATHS)
@pytest.mark.parametrize(
    "body",
    [b'{"model":"\xff"}', b"[" * 5000, b'{"a":' * 2000, b'{"model":"\\ud800"}', b"{", b""],
    ids=["not UTF-8", "deep lists", "deep objects", "half a pair", "cut", "empty"],
)
def test_body_that_cannot_be_decoded_is_refused(caller: Caller, path: str, body: bytes) -> None:
    answer = caller.http.post(path, content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400, answer.text
    error_of(answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("echo", "a\0b")),
        ("/v1/chat/completions", chat("echo", "a", metadata={"project": "a\0b"})),
        ("/v1/chat/completions", chat("echo", "a", metadata={"a\0b": "c"})),
        ("/v1/requests", {"model": "echo", "input": {"a": [{"b\0": 1}]}}),
        ("/v1/requests", {**chat("echo", "a"), "webhook": "https://a\0.example"}),
        ("/v1/admin/accounts", {"name": "a\0b"}),
        (f"{GMI}/requests", {"model": "echo", "payload": {"prompt": "a\0b"}}),
        ("/elevenlabs/v1/music", {"prompt": "a\0b"}),
        ("/v1/images/edits", {"prompt": "a\0b"}),
        ("/v1/quote", {"model": "echo", "input": {"prompt": "\0"}}),
    ],
)
def test_null_in_a_body_is_refused(caller: Caller, path: str, body: dict[str, Any]) -> None:
    answer = caller.http.post(path, json=body)

    assert answer.status_code == 400
    assert "U+0000" in answer.text
    error_of(answer)


def test_null_that_is_only_described_is_text(caller: Caller) -> None:
    answer = caller.http.post("/v1/chat/completions", json=chat("echo", r"a \u0000 b"))

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == r"a \u0000 b"


@pytest.mark.parametrize(
    "address",
    [
        "/v1/usage?model=a%00",
        "/v1/usage?tag:a%00b=x",
        "/v1/usage?group_by=tag:a%00",
        "/v1/usage/export?model=%00",
        "/v1/requests?tag:a%00b=x",
        "/v1/requests?task=%00",
        "/v1/ledger?kind=%00",
        "/v1/balance?account=%00",
        "/v1/payments/a%00",
        "/v1/requests/req_%00",
        "/v1/files/%00",
        "/v1/admin/keys?account=%00",
        "/elevenlabs/v1/voices/%00",
        f"{GMI}/requests/%00",
    ],
)
def test_null_in_an_address_is_refused(caller: Caller, address: str) -> None:
    answer = caller.http.get(address)

    assert answer.status_code == 400
    assert "U+0000" in answer.text
    error_of(answer)


def test_null_in_a_form_is_refused(caller: Caller) -> None:
    picture = ("a.png", b"\x89PNG")

    by_field = caller.http.post(
        "/v1/images/edits", data={"prompt": "a\0b"}, files={"image": picture}
    )
    by_name = caller.http.post("/v1/files", data={"purpose": "user\0"}, files={"file": picture})
    in_json = caller.http.post(
        "/elevenlabs/v1/voices/add",
        data={"name": "a", "labels": '{"a": "b\\u0000"}'},
        files={"files": picture},
    )

    for answer in (by_field, by_name, in_json):
        assert answer.status_code == 400
        assert "U+0000" in answer.text


def test_null_in_a_header_is_refused(stack: Stack, caller: Caller) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nidempotency-key: a\0b\r\n"
        f"authorization: Bearer {caller.secret}\r\ncontent-length: 2\r\n\r\n{{}}"
    )
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 400")


def test_null_in_a_line_of_a_batch_is_refused(caller: Caller) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": chat("echo", "a\0b"),
    }
    file = caller.http.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("a.jsonl", json.dumps(line).encode())},
    ).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch = caller.http.post("/v1/batches", json=body).json()

    for _ in range(200):
        found = caller.http.get(f"/v1/batches/{batch['id']}").json()
        if found["status"] not in ("validating", "in_progress", "finalizing"):
            break
    assert found["status"] == "failed"
    assert "U+0000" in found["errors"]["data"][0]["message"]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"minimum": -(10**300)}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("echo", "a", logit_bias={str(2**64): 1})),
        ("/v1/chat/completions", chat("echo", "a", logit_bias={str(-(2**63) - 1): 1})),
        ("/v1/chat/completions", chat("echo", "a", response_format=SCHEMA)),
        ("/v1/completions", {"model": "echo", "prompt": [2**64]}),
        ("/v1/completions", {"model": "echo", "prompt": [[2**63]]}),
        ("/v1/requests", {"model": "echo", "input": {"prompt": [2**64]}}),
        ("/v1/requests", {"model": "Veo3", "input": {"prompt": "a", "n": 2**64}}),
        ("/v1/quote", {"model": "Veo3", "input": {"prompt": "a", "seconds": HUGE}}),
        ("/v1/embeddings", {"model": "echo", "input": [2**64]}),
        ("/v1/admin/accounts", {"name": "in debt", "credit_limit": "-5"}),
        ("/v1/admin/accounts/{id}/keys", {"requests_per_minute": 10**30}),
        ("/v1/admin/accounts/{id}/keys", {"tokens_per_minute": 2**63}),
        ("/v1/admin/accounts/{id}/keys", {"expires_at": FAR[0]}),
        ("/v1/admin/accounts/{id}/keys", {"expires_at": FAR[1]}),
        ("/v1/admin/accounts/{id}/keys", {"expires_at": 5}),
        (
            "/v1/admin/accounts/{id}/credit",
            {"kind": "grant", "amount": "1", "reference": "a", "reason": "b", "expires_at": FAR[1]},
        ),
        ("/v1/admin/budgets", {"account": HUGE, "limit": "1", "window": "day"}),
        ("/v1/admin/budgets", {"account": 1, "limit": "1", "window": "day", "key": HUGE}),
        (
            "/v1/admin/prices",
            {"model": "echo", "account": "a", "from": FAR[1], "reason": "b"},
        ),
        (
            "/v1/admin/corrections",
            {"model": "echo", "from": FAR[0], "to": FAR[1], "price": [], "reference": "a",
             "reason": "b"},
        ),
    ],
)  # fmt: skip
def test_number_or_moment_beyond_its_range_is_refused(
    caller: Caller, path: str, body: dict[str, Any]
) -> None:
    answer = caller.http.post(path.format(id=caller.account_id), json=body)

    assert answer.status_code == 400, answer.text
    error_of(answer)


@pytest.mark.parametrize(
    ("method", "address"),
    [
        *(
            ("GET", f"/v1/{name}?account={DIGITS}")
            for name in ("balance", "usage", "requests", "ledger", "budgets", "rate-limits",
                         "statements", "usage/export", "admin/keys", "admin/budgets")
        ),
        ("GET", f"/v1/balance?account={'9' * 5000}"),
        ("GET", f"/v1/ledger/{DIGITS}"),
        ("GET", f"/v1/ledger/{'9' * 5000}"),
        ("GET", f"/v1/ledger?cursor={2**63}"),
        ("GET", f"/v1/ledger?limit={DIGITS}"),
        ("GET", f"/v1/requests?limit={DIGITS}"),
        *(("GET", f"/v1/usage?as_of={moment.replace('+', '%2B')}") for moment in FAR),
        ("GET", "/v1/usage?as_of=5"),
        ("GET", "/v1/usage?as_of=2026-03-01"),
        ("GET", "/v1/usage?from=0001-01-01"),
        ("GET", "/v1/usage?to=9999-12-31&tz=America/Los_Angeles"),
        ("GET", "/v1/requests/summary?from=0001-01-01&to=0001-01-02&tz=Asia/Tokyo"),
        ("PATCH", f"/v1/admin/budgets/{DIGITS}"),
        ("DELETE", f"/v1/admin/budgets/{DIGITS}"),
        ("DELETE", f"/v1/admin/keys/{DIGITS}"),
        ("DELETE", f"/v1/admin/rate-limits?account=1&key={DIGITS}"),
        ("POST", f"/v1/admin/accounts/{DIGITS}/keys"),
        ("GET", f"/v1/organization/costs?start_time={DIGITS}"),
        ("GET", "/v1/organization/costs?start_time=253402300799"),
        ("GET", f"/v1/organization/costs?start_time=0&page=page_{'9' * 5000}"),
        ("GET", f"/v1/organization/costs?start_time=0&project_ids[]={DIGITS}"),
        ("GET", f"{GMI}/requests?offset={DIGITS}"),
        ("GET", "/v1/statements/9999-12"),
        ("GET", "/v1/admin/periods/0000-00/verify"),
    ],
)  # fmt: skip
def test_address_beyond_its_range_is_refused(caller: Caller, method: str, address: str) -> None:
    body = {} if method in ("PATCH", "POST") else None
    answer = caller.http.request(method, address, json=body)

    assert answer.status_code in (400, 404), answer.text
    error_of(answer)


def test_balance_stays_within_what_sql_can_hold(caller: Caller) -> None:
    path = f"/v1/admin/accounts/{caller.account_id}/credit"
    body = {"kind": "grant", "amount": "9000000000", "reference": uuid.uuid4().hex, "reason": "a"}

    answer = caller.http.post(path, json=body)

    assert answer.status_code == 400
    assert caller.http.get("/v1/balance").json()["posted"] == "1"


def test_refused_method_lists_the_allowed_ones(caller: Caller) -> None:
    answer = caller.http.patch("/v1/files/file-1")

    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) >= {"GET", "DELETE"}
