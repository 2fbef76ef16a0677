"""Pages about what runs, with a gateway and a worker that run: workers, queue, upstreams."""

from __future__ import annotations

import http.server
import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from click.testing import CliRunner

from gateway.__main__ import cli
from gateway.audit_log import AuditFilter, Author, list_events
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.sql.database import Database
from tests.console.seeding import HOSTILE, seeded_database
from tests.console.test_pages import text_of
from tests.console.visiting import Browser, installed
from tests.databases import Databases
from tests.gateway.test_pictures import SOLD
from tests.stack import PATIENCE_S, PEPPER, Stack, ended, free_port, order, running, wait_for


@pytest.fixture
def stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    url = Databases("sqlite", tmp_path, postgres).make()
    with running(tmp_path / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


def enter(stack: Stack, role: str, **where: Any) -> Browser:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            name = f"{role} {uuid.uuid4().hex[:8]}"
            body = LinkBody.model_validate({"role": role, "name": name, **where})
            link = create_link(connection, Author("test", "cli"), body, pepper=PEPPER.encode())
    finally:
        database.dispose()
    client = httpx.Client(timeout=PATIENCE_S)
    stack.clients.append(client)
    browser = Browser(client, stack.url)  # type: ignore[arg-type]  # it only sends requests
    assert browser.enter(link).status_code == 303
    return browser


def shows(browser: Browser, path: str, sentence: str) -> None:
    wait_for(lambda: sentence in text_of(browser.get(path).text), f"{sentence!r} at {path}")


def acts(stack: Stack) -> list[str]:
    database = Database(stack.database_url)
    try:
        with database.snapshot() as connection:
            found = list_events(connection, AuditFilter(actor=None), limit=100)
    finally:
        database.dispose()
    return [event.act for event in found if event.act.startswith(("worker.", "queue."))]


def test_worker_is_drained_and_resumed_and_its_queue_is_seen_and_cancelled(stack: Stack) -> None:
    operator, auditor = enter(stack, "operator"), enter(stack, "auditor")
    caller = stack.caller()
    admin = stack.caller(credit="0", scopes=("read", "admin")).http
    (worker,) = admin.get("/v1/admin/workers").json()["data"]
    name = worker["name"]
    path = f"/console/workers/{name}"

    began = order(caller, "slow", "word " * 120)
    shows(operator, path, "req_")
    shows(operator, f"{path}/drain", "1 running job ends as it would.")
    assert "No other worker serves" in text_of(operator.get(f"{path}/drain").text)
    assert operator.post(f"{path}/drain", {"reason": "driver"}).status_code == 303
    shows(auditor, path, "It takes no jobs until it is resumed.")
    assert auditor.get(f"{path}/drain").status_code == 404

    waiting = order(caller, "echo", "one two three")
    queue = text_of(operator.get("/console/queue?model=echo").text)
    assert "1 job waits" in queue
    assert waiting[:16] in queue
    held = stack.held(caller)
    released = text_of(operator.get(f"/console/queue/cancel/{waiting}").text)
    assert "all is released to" in released
    answer = operator.post(f"/console/queue/cancel/{waiting}", {"reason": "a test"})
    assert answer.headers["location"] == f"/console/requests/{waiting}"
    cancelled = ended(caller, waiting)
    assert (cancelled["status"], cancelled["cost"]) == ("cancelled", "0")
    assert stack.held(caller) < held

    assert ended(caller, began)["status"] == "succeeded"
    shows(operator, path, "Nothing runs on it: it can be stopped.")
    assert operator.post(f"{path}/resume").status_code == 303
    stack.wait_for_model()
    assert operator.post(f"{path}/unload", {"model": "nothing"}).status_code == 400
    assert operator.post(f"{path}/unload", {"model": "slow"}).status_code == 303
    shows(operator, path, "an operator has unloaded it")
    assert operator.post(f"{path}/load", {"model": "slow"}).status_code == 303
    stack.wait_for_model("slow")
    assert acts(stack) == [
        "worker.load", "worker.unload", "worker.resume", "queue.cancel", "worker.drain",
    ]  # fmt: skip

    environment = {**stack.environment(), "TOLLGATE_ACTOR": "ann"}
    listed = CliRunner().invoke(cli, ["worker", "list", "--json"], env=environment)
    assert [each["name"] for each in json.loads(listed.stdout)] == [name]
    shown = CliRunner().invoke(cli, ["queue", "show", "echo"], env=environment)
    assert shown.exit_code == 0, shown.output

    stack.kill("worker")
    with redis.Redis.from_url(stack.redis_url) as client:
        client.delete(f"{stack.namespace}:{{workers}}:{name}")  # it expires after 15 s
    shows(operator, "/console/workers", "last heard")
    assert "It was last heard" in text_of(operator.get(path).text)
    refused = operator.post(f"{path}/drain")
    assert refused.status_code == 409
    assert "has not been heard since" in text_of(refused.text)


def test_gateways_and_upstreams_tell_how_they_are(stack: Stack) -> None:
    finance = enter(stack, "finance")

    shows(finance, "/console/gateways", "One gateway process runs")
    page = text_of(finance.get("/console/gateways").text)
    assert "current" in page
    assert "rollups" in page
    stack.start_gateway("second", environment={"TOLLGATE_PORT": str(free_port())}, wait=False)
    shows(finance, "/console/gateways", "2 gateway processes run")
    stack.kill("second")
    shows(finance, "/console/gateways", "One gateway process runs")
    upstreams = text_of(finance.get("/console/upstreams").text)
    assert "console.gmicloud.ai" in upstreams
    assert "GMI_API_KEY" in upstreams
    assert "not set" in upstreams
    assert finance.get("/console/queue/requeue").status_code == 404

    operator = enter(stack, "operator")
    assert "does not know <b>0</b>" in operator.get("/console/queue/requeue").text
    assert operator.post("/console/queue/requeue").status_code == 303
    assert acts(stack) == ["queue.requeue"]


class Failing(http.server.ThreadingHTTPServer):
    """Somebody else's model, which fails with markup until it is mended."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.is_mended = False

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Failing)
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "delta": {"content": "Well."}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        lines = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in lines) + "data: [DONE]\n\n"
        self._answer(200, body) if self.server.is_mended else self._answer(500, HOSTILE)

    def do_GET(self) -> None:
        assert isinstance(self.server, Failing)
        self._answer(200 if self.server.is_mended else 500, "{}")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def failing() -> Iterator[Failing]:
    with Failing() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_upstream_that_fails_is_down_and_then_back(
    tmp_path: Path, postgres: str, valkey: str, failing: Failing
) -> None:
    url = Databases("sqlite", tmp_path, postgres).make()
    name = f"t{uuid.uuid4().hex[:8]}"
    sold = SOLD.format(url=f"http://{failing.host}")
    with running(tmp_path / "home", url, valkey, namespace=name, more_models=sold) as stack:
        operator, caller = enter(stack, "operator"), stack.caller()

        def row() -> str:
            page = operator.get("/console/upstreams").text
            return page.partition(failing.host)[2].partition("</tr>")[0]

        assert HOSTILE not in operator.get("/console/upstreams").text
        requests = [order(caller, "looker", "one") for _ in range(3)]
        wait_for(lambda: ">down</span>" in row(), "the endpoint to be down", patience_s=60)
        assert "since" in text_of(row())
        assert "next probe" in text_of(row())
        for each in requests:
            assert ended(caller, each)["status"] == "failed"

        failing.is_mended = True
        wait_for(lambda: ">up</span>" in row(), "the endpoint to be back", patience_s=90)
        # A gateway can learn it later than the console.
        stack.wait_for_model("looker")
        assert ended(caller, order(caller, "looker", "two"))["status"] == "succeeded"


def test_pages_are_shown_while_the_queue_server_is_away(tmp_path: Path, postgres: str) -> None:
    url, _ = seeded_database(tmp_path, postgres, requests=4)
    with installed(tmp_path / "home", url, "unix:///nonexistent") as made:
        operator = made.visitor("operator")
        began = time.monotonic()
        pages = {
            name: operator.get(f"/console/{name}")
            for name in ("workers", "queue", "upstreams", "gateways")
        }

        assert {answer.status_code for answer in pages.values()} == {200}
        assert all("does not answer" in answer.text for answer in pages.values())
        assert "Open requests, by their holds" in pages["queue"].text
        assert time.monotonic() - began < 30
