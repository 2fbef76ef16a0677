"""Pages about what runs, with a gateway and a worker that run: workers, queue, upstreams."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from click.testing import CliRunner

from gateway.__main__ import cli
from gateway.audit_log import AuditFilter, Author, list_events
from gateway.operations.entrance.links import LinkBody, create_link
from gateway.sql.database import Database
from tests.console.seeding import seeded_database
from tests.console.test_pages import text_of
from tests.console.visiting import Browser, installed
from tests.databases import Databases
from tests.stack import PEPPER, Stack, ended, free_port, order, running, wait_for


@pytest.fixture
def stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    url = Databases("sqlite", tmp_path, postgres).make()
    with running(tmp_path / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as made:
        yield made


def enter(stack: Stack, role: str) -> Browser:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            body = LinkBody.model_validate({"role": role, "name": f"{role} {uuid.uuid4().hex[:8]}"})
            link = create_link(connection, Author("test", "cli"), body, pepper=PEPPER.encode())
    finally:
        database.dispose()
    client = httpx.Client()
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
