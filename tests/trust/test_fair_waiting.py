"""A flood of one account blocks no other, and others wait for a small part of it only."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.databases import Databases
from tests.stack import Caller, Stack, chat, running, wait_for

NARROW = """\
  - name: narrow
    task: text-generation
    engine: echo
    options: {slots: 2, tokens_per_step: 1, step_us: 50000}
    limits: {context_tokens: 4096, output_tokens: 512, choices: 4}
    price: *price
"""
"""Two places: a request of a hundred words takes five seconds of one."""
WORDS = "word " * 100


@pytest.fixture
def narrow_stack(tmp_path: Path, postgres: str, valkey: str) -> Iterator[Stack]:
    url = Databases("sqlite", tmp_path, postgres).make()
    namespace = f"t{uuid.uuid4().hex[:8]}"
    with running(tmp_path / "home", url, valkey, namespace=namespace, more_models=NARROW) as stack:
        yield stack


def flood(caller: Caller, count: int) -> list[str]:
    """Order more than the model does in minutes, as a script does."""
    body = {"model": "narrow", "input": {"messages": [{"role": "user", "content": WORDS}]}}
    answers = [caller.http.post("/v1/requests", json=body) for _ in range(count)]
    return [answer.json()["id"] for answer in answers if answer.status_code == 202]


def test_flood_of_one_account_shuts_no_other_out(narrow_stack: Stack) -> None:
    attacker = narrow_stack.caller(credit="100")
    victim = narrow_stack.caller()
    placed = flood(attacker, 120)
    assert len(placed) > 60

    def refused() -> bool:
        with contextlib.suppress(httpx.TimeoutException):
            answer = attacker.http.post(
                "/v1/chat/completions", json=chat("narrow", WORDS), timeout=3
            )
            return answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        return False

    # The account that sent the flood waits for it …
    wait_for(refused, "the attacker to be refused", patience_s=60)
    # … and no other one does: its order is taken, and runs long before the flood is over.
    answer = victim.http.post("/v1/chat/completions", json=chat("narrow", "hi", max_tokens=2))
    last = attacker.http.get(f"/v1/requests/{placed[-1]}").json()["status"]
    for request_id in placed:
        attacker.http.post(f"/v1/requests/{request_id}/cancel")

    assert answer.status_code == 200, answer.text
    assert last == "queued"
