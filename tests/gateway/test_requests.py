"""The native API: asynchronous requests, their events, pages, cancelling, and deadlines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.stack import Caller, Stack, ended, order


def events(caller: Caller, request_id: str, after: str | None = None) -> list[tuple[str, Any]]:
    headers = {"Last-Event-ID": after} if after else {}
    found = []
    name = cursor = ""
    with caller.http.stream("GET", f"/v1/requests/{request_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("id: "):
                cursor = line[4:]
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((cursor, {"event": name, **json.loads(line[6:])}))
    return found


def said(found: list[tuple[str, Any]]) -> str:
    return "".join(data["text"] for _, data in found if data["event"] == "tokens")


def test_a_request_is_accepted_run_and_fetched(stack: Stack) -> None:
    caller = stack.caller()
    body = {
        "model": "echo",
        "input": {"messages": [{"role": "user", "content": "one two"}]},
        "metadata": {"project": "x"},
    }

    accepted = caller.http.post("/v1/requests", json=body)

    assert accepted.status_code == 202
    assert accepted.json()["object"] == "request"
    found = ended(caller, accepted.json()["id"])
    assert found["status"] == "succeeded"
    assert found["output"]["choices"][0]["text"] == "one two"
    assert found["metadata"] == {"project": "x"}
    assert found["cost"] == "0.0000002"


def test_events_can_be_followed_from_the_start_and_resumed(stack: Stack) -> None:
    caller = stack.caller()
    words = " ".join(f"w{number}" for number in range(12))
    request_id = order(caller, "slow", words)

    live = events(caller, request_id)

    assert said(live) == words
    assert live[-1][1]["event"] == "succeeded"
    cursor = live[len(live) // 2][0]
    resumed = events(caller, request_id, after=cursor)
    half = [entry for entry in live if entry[1]["event"] == "tokens"]
    done = [cursor for cursor, _ in live].index(cursor)
    assert said(live[: done + 1]) + said(resumed) == words
    assert len(resumed) < len(live)
    assert half


def test_invalid_cursor_is_refused(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "echo", "x")

    answer = caller.http.get(
        f"/v1/requests/{request_id}/events", headers={"Last-Event-ID": "yesterday"}
    )

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"


def test_a_running_request_can_be_cancelled(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "slow", "word " * 300)

    caller.http.post(f"/v1/requests/{request_id}/cancel")

    assert ended(caller, request_id)["status"] == "cancelled"
    assert caller.http.post(f"/v1/requests/{request_id}/cancel").json()["status"] == "cancelled"
    assert stack.held(caller) == 0


def test_request_past_its_deadline_is_charged_for_what_its_log_has(stack: Stack) -> None:
    caller = stack.caller()
    request_id = order(caller, "brief", "word " * 100)

    found = ended(caller, request_id)

    assert found["status"] == "expired"
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert (receipt["outcome"], receipt["reason"]) == ("charged", "deadline")
    text = found["output"]["choices"][0]["text"]
    assert receipt["usage"]["output_tokens"] == text.count("word") > 0


def test_pages_list_every_request_once(stack: Stack) -> None:
    caller = stack.caller()
    placed = [order(caller, "echo", f"number {number}") for number in range(7)]
    for request_id in placed:
        ended(caller, request_id)

    seen: list[str] = []
    cursor = ""
    while True:
        page = caller.http.get(f"/v1/requests?limit=3{cursor}").json()
        seen += [found["id"] for found in page["data"]]
        if not page["has_more"]:
            break
        cursor = f"&cursor={page['next_cursor']}"

    assert seen == sorted(placed, reverse=True)


def test_requests_of_other_accounts_are_not_found(stack: Stack) -> None:
    request_id = order(stack.caller(), "echo", "mine")
    other = stack.caller()

    for path in ("", "/receipt", "/events"):
        assert other.http.get(f"/v1/requests/{request_id}{path}").status_code == 404
    assert other.http.post(f"/v1/requests/{request_id}/cancel").status_code == 404


@pytest.mark.parametrize("request_id", ["req_1", "x", "req_" + "0" * 32])
def test_unknown_request_is_not_found(request_id: str, stack: Stack) -> None:
    assert stack.caller().http.get(f"/v1/requests/{request_id}").status_code == 404


def test_quote_equals_the_hold(stack: Stack) -> None:
    caller = stack.caller()
    value = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}

    native = caller.http.post("/v1/quote", json={"model": "echo", "input": value}).json()
    dialect = caller.http.post("/v1/quote", json={"model": "echo", **value}).json()

    assert native == dialect
    placed = caller.http.post("/v1/requests", json={"model": "echo", "input": value}).json()
    assert placed["hold"] == native["max_cost"]


def test_changed_price_is_a_new_version_and_invalid_catalog_changes_nothing(
    stack: Stack,
) -> None:
    from tests.stack import CATALOG

    admin = stack.caller(scopes=("read", "admin", "inference"))
    before = admin.http.get("/v1/catalog/Veo3").json()["price"]

    stack.catalog.write_text(CATALOG.format(veo="0.41"))
    assert admin.http.post("/v1/admin/catalog/reload").status_code == 200
    assert admin.http.get("/v1/catalog/Veo3").json()["price"][0]["amount"] == "0.41"

    stack.catalog.write_text(CATALOG.format(veo="-1"))
    refused = admin.http.post("/v1/admin/catalog/reload")
    assert refused.status_code == 400
    assert "catalog.yaml:" in refused.json()["error"]["message"]
    assert admin.http.get("/v1/catalog/Veo3").json()["price"][0]["amount"] == "0.41"

    stack.catalog.write_text(CATALOG.format(veo="0.40"))
    admin.http.post("/v1/admin/catalog/reload")
    assert admin.http.get("/v1/catalog/Veo3").json()["price"] == before
    assert stack.caller().http.post("/v1/admin/catalog/reload").status_code == 403


def test_openapi_document_describes_every_route(stack: Stack) -> None:
    paths = stack.caller().http.get("/schema/openapi.json").json()["paths"]

    for path in ("/v1/chat/completions", "/v1/requests", "/v1/balance", "/v1/catalog", "/v1/quote"):
        assert path in paths
    for path in ("/health/live", "/health/ready", "/metrics", "/schema"):
        assert stack.caller().http.get(path).status_code == 200
