"""A gateway as the upstream of another: both charge for the same usage."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.databases import Databases
from tests.stack import Caller, Stack, running, wait_for

SOLD = """\
  - name: resold
    task: text-generation
    upstream: {{url: "{url}/v1", model: tiny, credential: BEHIND_KEY}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4}}
    price:
      - {{unit: input_token, amount: "3", per: 1000000}}
      - {{unit: output_token, amount: "7", per: 1000000}}
  - name: resold-slow
    task: text-generation
    upstream: {{url: "{url}/v1", model: slow, credential: BEHIND_KEY}}
    limits: {{context_tokens: 4096, output_tokens: 512, choices: 4}}
    price: *price
"""
ASK: Any = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def behind(shared_text_stack: Stack) -> Caller:
    """The account that the front gateway has at the one behind it."""
    return shared_text_stack.caller()


@pytest.fixture(scope="module")
def front(
    shared_text_stack: Stack,
    behind: Caller,
    tmp_path_factory: pytest.TempPathFactory,
    postgres: str,
    valkey: str,
) -> Iterator[Stack]:
    directory: Path = tmp_path_factory.mktemp("front")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEHIND_KEY", behind.secret)
        with running(
            directory / "home",
            Databases("sqlite", directory, postgres).make(),
            valkey,
            namespace=f"t{uuid.uuid4().hex[:8]}",
            more_models=SOLD.format(url=shared_text_stack.url),
        ) as made:
            yield made


def client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


def _last_receipt(caller: Caller) -> dict[str, Any]:
    listed = caller.http.get("/v1/requests", params={"limit": 1}).json()["data"]
    receipt: dict[str, Any] = caller.http.get(f"/v1/requests/{listed[0]['id']}/receipt").json()
    return receipt


@pytest.mark.parametrize("stream", [False, True])
def test_both_gateways_count_the_same_tokens_each_at_its_price(
    stream: bool, front: Stack, behind: Caller
) -> None:
    caller = front.caller()
    ask = client(front, caller).chat.completions
    given: Any = {"model": "resold", "messages": ASK, "max_tokens": 20, "seed": 4, "n": 2}

    if stream:
        chunks = list(ask.create(**given, stream=True))
        assert "".join(part.delta.content or "" for c in chunks for part in c.choices)
    else:
        assert ask.create(**given).choices[1].message.content
    ours, theirs = _last_receipt(caller), _last_receipt(behind)

    for unit in ("input_tokens", "cached_input_tokens", "output_tokens"):
        assert ours["usage"].get(unit, 0) == theirs["usage"].get(unit, 0)
    usage = ours["usage"]
    assert usage["output_tokens"] == 40
    read = usage.get("input_tokens", 0) + usage.get("cached_input_tokens", 0)
    assert Decimal(ours["cost"]) == (Decimal(3) * read + Decimal(7) * 40) / 1_000_000
    assert Decimal(theirs["cost"]) < Decimal(ours["cost"])


def test_functions_and_completions_pass_through_both(front: Stack) -> None:
    made = client(front, front.caller())
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    answer = made.chat.completions.create(
        model="resold",
        messages=ASK,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    calls = answer.choices[0].message.tool_calls or []
    completion = made.completions.create(model="resold", prompt=["the", "a"], max_tokens=4)

    assert answer.choices[0].finish_reason == "tool_calls"
    assert all(call.type == "function" and json.loads(call.function.arguments) for call in calls)
    assert len(completion.choices) == 2


def test_disconnecting_in_front_is_charged_behind_for_what_was_delivered(
    front: Stack, behind: Caller
) -> None:
    caller = front.caller()
    words = " ".join(["word"] * 200)
    stream = client(front, caller).chat.completions.create(
        model="resold-slow", messages=[{"role": "user", "content": words}], stream=True
    )
    for count, _ in enumerate(stream):
        if count == 5:
            break
    stream.close()

    wait_for(
        lambda: _last_receipt_status(caller) == _last_receipt_status(behind) == "cancelled",
        "both to end",
    )
    ours, theirs = _last_receipt(caller), _last_receipt(behind)
    assert ours["usage"]["output_tokens"] < 200
    assert theirs["usage"]["output_tokens"] < 200
    assert Decimal(theirs["cost"]) > 0


def _last_receipt_status(caller: Caller) -> str:
    listed = caller.http.get("/v1/requests", params={"limit": 1}).json()["data"]
    return str(listed[0]["status"])
