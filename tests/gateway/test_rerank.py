"""Reranking in the shape of Cohere's, Jina's and vLLM's clients."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from tests.stack import Stack, ended

DOCUMENTS = ["the fox jumps", {"text": "a lazy dog"}, "!"]


def test_documents_are_ordered_by_score_and_charged_per_token(text_stack: Stack) -> None:
    caller = text_stack.caller()
    body = {"model": "tiny-rank", "query": "who jumps", "documents": DOCUMENTS}

    every = caller.http.post("/v1/rerank", json=body)
    best = caller.http.post("/v1/rerank", json={**body, "top_n": 1, "return_documents": True})

    found = every.json()
    scores = [one["relevance_score"] for one in found["results"]]
    assert sorted(one["index"] for one in found["results"]) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    cost = Decimal(found["usage"]["total_tokens"]) / 100_000_000
    assert Decimal(every.headers["x-request-cost"]) == cost > 0
    (first,) = best.json()["results"]
    texts = ["the fox jumps", "a lazy dog", "!"]
    assert first["index"] == found["results"][0]["index"]
    assert first["document"] == {"text": texts[first["index"]]}


def test_native_api_returns_the_scores(text_stack: Stack) -> None:
    caller = text_stack.caller()
    given = {"query": "who jumps", "documents": DOCUMENTS}

    accepted = caller.http.post("/v1/requests", json={"model": "tiny-rank", "input": given})

    found = ended(caller, accepted.json()["id"])
    assert found["status"] == "succeeded", found
    assert len(found["output"]["scores"]) == 3


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"documents": ["a"]}, "missing_required_parameter"),
        ({"query": "a", "documents": []}, "invalid_value"),
        ({"query": "a", "documents": ["a"] * 11}, "invalid_value"),
        ({"query": "a", "documents": [{"title": "a"}]}, "invalid_value"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "invalid_value"),
        ({"query": "fox " * 90, "documents": ["a"]}, "context_length_exceeded"),
        ({"query": "a", "documents": ["a"], "model": "tiny"}, "task_not_supported"),
    ],
)
def test_invalid_input_is_refused_and_free(
    body: dict[str, Any], code: str, text_stack: Stack
) -> None:
    caller = text_stack.caller()

    answer = caller.http.post("/v1/rerank", json={"model": "tiny-rank", **body})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    balance = caller.http.get("/v1/balance").json()
    assert (balance["posted"], balance["held"]) == ("1", "0")
