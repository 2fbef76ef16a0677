"""Embeddings by the unmodified OpenAI client, which asks for base64 by default."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import openai
import pytest

from tests.stack import Caller, Stack, ended


def client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


def test_vectors_are_returned_in_order_and_charged_per_token(text_stack: Stack) -> None:
    caller = text_stack.caller()
    embeddings = client(text_stack, caller).embeddings

    raw = embeddings.with_raw_response.create(model="tiny-embed", input=["the fox", "a dog", "!"])

    answer = raw.parse()
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert all(len(one.embedding) == 48 for one in answer.data)
    assert math.isclose(sum(x * x for x in answer.data[0].embedding), 1, rel_tol=1e-5)
    cost = Decimal(answer.usage.prompt_tokens) / 100_000_000
    assert Decimal(raw.headers["x-request-cost"]) == cost
    alone = embeddings.create(model="tiny-embed", input="a dog", encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(answer.data[1].embedding, abs=1e-5)
    short = embeddings.create(model="tiny-embed", input="a dog", dimensions=8)
    assert len(short.data[0].embedding) == 8
    ids = embeddings.create(model="tiny-embed", input=[[5, 6], [7]])
    assert ids.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"input": ["ok", ""]}, 400, "invalid_value"),
        ({"input": []}, 400, "invalid_value"),
        ({"input": ["x"] * 101}, 400, "invalid_value"),
        ({"input": "x", "dimensions": 49}, 400, "invalid_value"),
        ({"input": "fox " * 200}, 400, "context_length_exceeded"),
        ({"input": [[5, 100_000]]}, 400, "invalid_input"),
        ({"input": "x", "model": "tiny"}, 400, "task_not_supported"),
        ({"input": "x", "encoding_format": "hex"}, 400, "invalid_value"),
        ({}, 400, "missing_required_parameter"),
    ],
)
def test_invalid_embedding_input_is_refused_and_not_charged(
    body: dict[str, Any], status: int, code: str, text_stack: Stack
) -> None:
    caller = text_stack.caller()

    answer = caller.http.post("/v1/embeddings", json={"model": "tiny-embed", **body})

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    balance = caller.http.get("/v1/balance").json()
    assert (balance["posted"], balance["held"]) == ("1", "0")


def test_native_api_accepts_embeddings(text_stack: Stack) -> None:
    caller = text_stack.caller()

    accepted = caller.http.post(
        "/v1/requests", json={"model": "tiny-embed", "input": {"input": ["the fox", "a dog"]}}
    )

    assert accepted.status_code == 202, accepted.text
    found = ended(caller, accepted.json()["id"])
    assert found["status"] == "succeeded"
    assert len(found["output"]["vectors"]) == 2
