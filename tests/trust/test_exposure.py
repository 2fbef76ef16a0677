"""What callers without a key can reach, and what clients can write into the logs."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.databases import Databases
from tests.stack import CATALOG, Stack, wait_for

TOKEN = "a-token-for-the-scraper"


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[Stack]:
    """A gateway without a worker, its metrics as they are by default."""
    directory = tmp_path_factory.mktemp("guarded")
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(veo="0.40"))
    url = Databases("sqlite", directory, postgres).make()
    stack = Stack(directory, url, valkey, f"t{uuid.uuid4().hex[:8]}", catalog)
    try:
        stack.start_gateway(
            environment={"TOLLGATE_METRICS": "key", "TOLLGATE_METRICS_TOKEN": TOKEN}
        )
        yield stack
    finally:
        stack.stop()


def metrics(stack: Stack, secret: str | None) -> httpx.Response:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    return httpx.get(f"{stack.url}/metrics", headers=headers)


def test_metrics_need_the_token_or_an_administrators_key(guarded: Stack) -> None:
    reader = guarded.caller(scopes=("inference", "read"))
    admin = guarded.caller(scopes=("admin",))

    assert metrics(guarded, None).status_code == 401
    assert metrics(guarded, "wrong").status_code == 401
    assert metrics(guarded, reader.secret).status_code == 403
    assert "tollgate_" in metrics(guarded, admin.secret).text
    assert "tollgate_" in metrics(guarded, TOKEN).text


def test_metrics_token_grants_nothing_else(guarded: Stack) -> None:
    answer = httpx.get(f"{guarded.url}/v1/balance", headers={"Authorization": f"Bearer {TOKEN}"})

    assert answer.status_code == 401


def test_metrics_can_be_turned_off(guarded: Stack) -> None:
    port, guarded.port = guarded.port, 0
    try:
        guarded.start_gateway("silent", environment={"TOLLGATE_METRICS": "off"})
        admin = guarded.caller(scopes=("admin",))

        assert metrics(guarded, admin.secret).status_code == 404
    finally:
        guarded.kill("silent")
        guarded.port = port


def test_client_that_leaves_while_it_sends_costs_one_line_of_the_log(guarded: Stack) -> None:
    caller = guarded.caller()
    log = Path(guarded.directory) / "gateway.log"
    before = log.read_text()

    for _ in range(20):
        with socket.create_connection(("127.0.0.1", guarded.port)) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
                b"Content-Type: application/json\r\n"
                b"Authorization: Bearer " + caller.secret.encode() + b'\r\n\r\n{"model":'
            )

    def written() -> list[str]:
        return log.read_text()[len(before) :].splitlines()

    wait_for(lambda: len(written()) >= 20, "a line for each")
    assert len(written()) == 20
    assert all("the client disconnected" in line for line in written())


@pytest.fixture(scope="module")
def impatient(guarded: Stack) -> Iterator[Stack]:
    """The same, with half a second for headers and few connections."""
    other = Stack(
        guarded.directory,
        guarded.database_url,
        guarded.redis_url,
        guarded.namespace,
        guarded.catalog,
    )
    try:
        other.start_gateway(
            "impatient",
            environment={
                "TOLLGATE_HEADER_TIMEOUT_S": "0.5",
                "TOLLGATE_BODY_BYTES_PER_S_MIN": "1000",
                "TOLLGATE_CONNECTIONS_MAX": "20",
                "TOLLGATE_HOST": "0.0.0.0",
            },
        )
        yield other
    finally:
        other.stop()


def opened(stack: Stack, begin: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", stack.port), timeout=20)
    client.sendall(begin)
    return client


def test_connection_that_sends_nothing_is_closed(impatient: Stack) -> None:
    with opened(impatient) as client:
        assert client.recv(100) == b""


def test_connection_that_never_ends_its_headers_is_closed(impatient: Stack) -> None:
    with opened(impatient, b"GET /health/live HTTP/1.1\r\nHost: x\r\n") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_body_that_stalls_is_given_up(impatient: Stack) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        f"Authorization: Bearer {impatient.caller().secret}\r\n\r\n"
    )
    with opened(impatient, head.encode() + b'{"model":') as client:
        assert client.recv(100) == b""


def test_idle_connection_that_was_used_is_kept_for_the_next_request(impatient: Stack) -> None:
    with httpx.Client(base_url=impatient.url) as client:
        client.get("/health/live").raise_for_status()
        time.sleep(1.5)
        client.get("/health/live").raise_for_status()


def test_connections_beyond_the_bound_are_closed(impatient: Stack) -> None:
    kept = [opened(impatient, b"GET /health/live HTTP/1.1\r\nHost: x\r\n") for _ in range(20)]
    try:
        with opened(impatient) as one_more, contextlib.suppress(ConnectionResetError):
            assert one_more.recv(100) == b""
    finally:
        for client in kept:
            client.close()


def test_public_gateway_without_a_public_url_warns(impatient: Stack) -> None:
    said = (impatient.directory / "impatient.log").read_text()

    assert "TOLLGATE_PUBLIC_URL is not set" in said


def test_compose_has_no_default_password() -> None:
    compose = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text())
    services = compose["services"]

    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"] == "${POSTGRES_PASSWORD}"
    assert "--requirepass" in services["valkey"]["command"]
    for name in ("gateway", "worker"):
        assert ":${VALKEY_PASSWORD:?" in services[name]["environment"]["REDIS_URL"]
    gateway = services["gateway"]["environment"]
    assert "tollgate:${POSTGRES_PASSWORD:?" in gateway["DATABASE_URL"]
    assert gateway["TOLLGATE_PUBLIC_URL"].startswith("${TOLLGATE_PUBLIC_URL:-")
    assert "TOLLGATE_PEPPER" not in services["worker"]["environment"]


def test_documentation_calls_no_other_origin_and_runs_only_what_is_shipped(guarded: Stack) -> None:
    page = httpx.get(f"{guarded.url}/schema")
    script = re.search(r'src="(/[^"/][^"]*)" integrity="sha256-([^"]+)"', page.text)

    assert page.is_success
    assert "://" not in page.text
    assert "script-src 'self'" in page.text
    assert page.text.count("<script") == 1
    assert script is not None
    shipped = httpx.get(f"{guarded.url}{script[1]}")
    assert shipped.headers["content-type"].startswith("text/javascript")
    assert base64.b64encode(hashlib.sha256(shipped.content).digest()).decode() == script[2]
    assert b"sourceMappingURL" not in shipped.content
    spec = re.search(r'spec-url="([^"]+)"', page.text)
    assert spec is not None
    assert httpx.get(f"{guarded.url}{spec[1]}").json()["openapi"].startswith("3.")
