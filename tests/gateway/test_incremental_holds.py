"""Streams without a length have incremental holds."""

from __future__ import annotations

from openai import OpenAI

from gateway.pricing import parse_usd
from tests.stack import Caller, Stack, chat, wait_for

WORDS = " ".join(str(number) for number in range(80))


def stream(stack: Stack, caller: Caller, model: str = "slow") -> tuple[str, str, str | None]:
    """Read a stream to its end; give the request's id, the text and the finish reason."""
    text, finish = "", None
    with OpenAI(api_key=caller.secret, base_url=f"{stack.url}/v1", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": WORDS}], stream=True
        )
        for chunk in answer:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    return chunk.id, text, finish


def test_stream_needs_credit_for_its_output_and_not_for_the_maximum(
    stack: Stack,
) -> None:
    # The whole limit of 512 tokens would be held for with 0.00004096.
    caller = stack.caller(credit="0.000025")
    most = caller.http.post("/v1/quote", json=chat("slow", WORDS)).json()["max_cost"]

    request_id, text, finish = stream(stack, caller)

    assert (text.strip(), finish) == (WORDS, "stop")
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert float(most) > 0.000025 > float(receipt["hold"]) >= float(receipt["cost"])
    assert receipt["usage"]["output_tokens"] == 80
    assert stack.findings() == []


def test_stream_out_of_credit_is_truncated_and_charged_its_hold(stack: Stack) -> None:
    caller = stack.caller(credit="0.00001")

    request_id, text, finish = stream(stack, caller)

    assert finish == "insufficient_credit"
    assert 0 < len(text.split()) < 80
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert (receipt["outcome"], receipt["reason"]) == ("charged", "insufficient_credit")
    lines = sum(parse_usd(line["amount"]) for line in receipt["lines"])
    assert lines == parse_usd(receipt["cost"])
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_tokens_ahead_of_the_hold_are_charged(stack: Stack) -> None:
    caller = stack.caller(credit="1")

    request_id, _, finish = stream(stack, caller, model="echo")

    assert finish == "stop"
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert receipt["usage"]["output_tokens"] == 80
    assert stack.findings() == []


def test_unlimited_stream_leaves_no_hold_after_its_client_disconnects(stack: Stack) -> None:
    caller = stack.caller(credit="1")
    body = chat("slow", WORDS, stream=True)
    with caller.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > 40:
                break

    wait_for(lambda: stack.held(caller) == 0, "the hold to go")
    assert stack.findings() == []
