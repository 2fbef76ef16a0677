"""A share of a model's requests runs on other entries, at the price of the model ordered."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.artist import Artist, at_work
from tests.databases import Databases
from tests.stack import Caller, Stack, chat, ended, order, wait_for

CATALOG = """\
version: 1
models:
  - name: writer
    task: text-generation
    engine: echo
    canary: {writer-2: 50}
    slo: {total_ms: 60000}
    limits: &limits {context_tokens: 4096, output_tokens: 100}
    price: &price
      - {unit: input_token, amount: "1", per: 1000}
      - {unit: output_token, amount: "3", per: 1000}
  - name: writer-2
    task: text-generation
    engine: echo
    limits: *limits
    price: [{unit: request, amount: "0.9"}]
  - name: drawer
    task: text-to-image
    engine: echo
    canary: {drawer-2: 100}
    price: [{unit: image, amount: "0.01"}]
  - name: drawer-2
    task: text-to-image
    engine: echo
    price: [{unit: image, amount: "0.5"}]
  - name: lonely
    task: text-generation
    engine: echo
    canary: {absent: 100}
    limits: *limits
    price: *price
  - name: absent
    task: text-generation
    engine: echo
    limits: *limits
    price: *price
"""


@pytest.fixture(scope="module")
def module_stack(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Artist]]:
    directory = tmp_path_factory.mktemp("versions") / "home"
    directory.mkdir()
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG)
    url = Databases("sqlite", directory, postgres).make()
    made = Stack(directory, url, valkey, f"t{uuid.uuid4().hex[:8]}", catalog)
    served = ["writer", "writer-2", "drawer", "drawer-2", "lonely"]
    with at_work(served, valkey, made.namespace, made.environment()["BLOB_URL"]) as artist:
        try:
            made.start_gateway()
            made.wait_for_model("drawer-2")
            yield made, artist
        finally:
            made.stop()


@pytest.fixture
def stack(module_stack: tuple[Stack, Artist]) -> Iterator[Stack]:
    yield module_stack[0]
    module_stack[0].close_clients()


@pytest.fixture
def artist(module_stack: tuple[Stack, Artist]) -> Artist:
    return module_stack[1]


def admin(stack: Stack) -> Caller:
    return stack.caller(credit="0", scopes=("read", "admin"))


def served_by(boss: Caller, caller: Caller, request_id: str) -> str:
    path = f"/v1/requests/{request_id}/receipt"
    receipt = boss.http.get(path, params={"account": str(caller.account_id)}).json()
    return str(receipt["operator"]["served_by"])


def test_versions_share_the_requests_at_the_price_of_the_ordered_model(stack: Stack) -> None:
    caller, boss = stack.caller(credit="1000"), admin(stack)

    ids = [order(caller, "writer", "two words") for _ in range(20)]
    ended_all = [ended(caller, id) for id in ids]

    assert {(one["model"], one["status"], one["cost"]) for one in ended_all} == {
        ("writer", "succeeded", "0.008")
    }
    counted = Counter(served_by(boss, caller, id) for id in ids)
    assert counted.keys() == {"writer", "writer-2"}
    assert "operator" not in caller.http.get(f"/v1/requests/{ids[0]}/receipt").json()

    asked = {"group_by": "model,served_by", "model": "writer"}
    margins = boss.http.get("/v1/admin/margins", params=asked).json()["data"]
    assert {one["served_by"]: one["requests"] for one in margins} == counted
    stats = "/v1/models/writer/stats"
    versions = boss.http.get(stats).json()["versions"]
    assert {name: one["requests"] for name, one in versions.items()} == counted
    assert {one["goodput"]["share"] for one in versions.values()} == {1.0}
    of_all = caller.http.get(stats).json()
    assert (of_all["requests"], "versions" in of_all) == (20, False)


def test_lines_of_a_batch_run_on_one_version(stack: Stack, artist: Artist) -> None:
    caller = stack.caller(credit="1000")
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": chat("writer", f"line {number}"),
        }
        for number in range(8)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    for _ in range(2):
        file = caller.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}
        ).json()
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        made = caller.http.post("/v1/batches", json=body).json()
        path = f"/v1/batches/{made['id']}"
        wait_for(lambda path=path: caller.http.get(path).json()["status"] == "completed", path)

        ran = [job.model for job in artist.jobs if job.sticky_key == made["id"]]
        assert len(ran) == 8
        assert len(set(ran)) == 1


def test_request_of_a_version_can_be_followed_and_cancelled(stack: Stack, artist: Artist) -> None:
    caller = stack.caller()
    body: dict[str, Any] = {"model": "drawer", "input": {"prompt": "!slow"}}

    placed = caller.http.post("/v1/requests", json=body).json()
    path = f"/v1/requests/{placed['id']}"
    wait_for(lambda: caller.http.get(path).json()["status"] == "running", "its start")
    caller.http.post(f"{path}/cancel")

    assert ended(caller, placed["id"])["status"] == "cancelled"
    assert next(job.model for job in artist.jobs if job.request_id == placed["id"]) == "drawer-2"
    assert served_by(admin(stack), caller, placed["id"]) == "drawer-2"


def test_shares_are_shown_to_administrators_only(stack: Stack) -> None:
    path = "/v1/catalog/writer"

    assert admin(stack).http.get(path).json()["canary"] == {"writer-2": 50}
    assert "canary" not in stack.caller().http.get(path).json()


def test_model_runs_its_requests_itself_while_a_version_is_not_served(stack: Stack) -> None:
    caller = stack.caller(credit="1000")

    answer = caller.http.post("/v1/chat/completions", json=chat("lonely", "hello"))

    assert answer.is_success, answer.text
    id = answer.headers["x-request-id"]
    assert served_by(admin(stack), caller, id) == "lonely"
