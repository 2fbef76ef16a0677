"""Batches by the unmodified OpenAI client: half price, exact bills, files of results."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import openai
import pytest

from tests.stack import Caller, Stack, chat, wait_for

WORDS = "hello big world"
COST = Decimal("0.00000015")
"""Half of three tokens in at $0.02 and three out at $0.08 a million."""


def client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


def line(custom_id: str, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {**asked, **changes}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def submit(api: openai.OpenAI, content: bytes, **more: Any) -> Any:
    """Upload a file and make a batch of it."""
    file = api.files.create(file=("lines.jsonl", content), purpose="batch")
    return api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        **more,
    )


def ended(api: openai.OpenAI, batch_id: str) -> Any:
    """Wait for the end of a batch."""
    found: list[Any] = []

    def closed() -> bool:
        found[:] = [api.batches.retrieve(batch_id)]
        return found[0].status in ("completed", "failed", "cancelled", "expired")

    wait_for(closed, batch_id)
    return found[0]


def results(api: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Read a file of results: custom_id → line."""
    assert file_id is not None
    text = api.files.content(file_id).text
    lines = [json.loads(row, parse_float=Decimal) for row in text.splitlines()]
    return {each["custom_id"]: each for each in lines}


def test_a_batch_is_answered_as_live_requests_are_at_half_the_price(stack: Stack) -> None:
    caller = stack.caller()
    api = client(stack, caller)
    live = caller.http.post("/v1/chat/completions", json=chat("echo", WORDS)).json()

    made = submit(
        api,
        jsonl(*(line(f"line {n}", chat("echo", WORDS)) for n in range(5))),
        metadata={"project": "demo"},
    )

    assert made.status == "validating"
    batch = ended(api, made.id)
    assert batch.status == "completed"
    assert batch.metadata == {"project": "demo"}
    assert batch.model == "echo"
    assert (batch.request_counts.total, batch.request_counts.completed) == (5, 5)
    assert batch.usage.total_tokens == 30
    assert batch.error_file_id is None
    found = results(api, batch.output_file_id)
    assert list(found) == [f"line {n}" for n in range(5)]
    response = found["line 3"]["response"]
    assert response["status_code"] == 200
    body = response["body"]
    assert body["usage"]["cost"] == COST
    assert body["id"] == response["request_id"]
    changed = ("id", "created", "usage")
    assert {**body, **dict.fromkeys(changed)} == {**live, **dict.fromkeys(changed)}
    receipt = caller.http.get(f"/v1/requests/{response['request_id']}/receipt").json()
    assert receipt["service_class"] == "batch"
    assert Decimal(receipt["cost"]) == COST == sum(Decimal(x["amount"]) for x in receipt["lines"])
    balance = caller.http.get("/v1/balance").json()
    assert Decimal(balance["posted"]) == 1 - 2 * COST - 5 * COST
    assert balance["held"] == "0"
    assert stack.findings() == []
