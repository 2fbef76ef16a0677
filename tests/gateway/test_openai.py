"""The unmodified OpenAI client: answers, streams, and the exceptions that its users catch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from decimal import Decimal

import openai
import pytest

from gateway.accounts.keys import revoke_key
from gateway.sql.database import Database
from tests.stack import Caller, Stack, chat, ended, order, wait_for

HELLO = [{"role": "user", "content": "hello big world"}]
COST = Decimal("0.0000003")
"""Three tokens in at $0.02 and three out at $0.08 a million."""


def client(stack: Stack, caller: Caller) -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=caller.secret, max_retries=0)
    stack.clients.append(made)
    return made


def test_a_chat_is_answered_and_charged_to_the_digit(stack: Stack) -> None:
    caller = stack.caller()

    raw = client(stack, caller).chat.completions.with_raw_response.create(
        model="echo", messages=HELLO
    )

    answer = raw.parse()
    assert answer.choices[0].message.content == "hello big world"
    assert answer.choices[0].finish_reason == "stop"
    body = json.loads(raw.text, parse_float=Decimal)
    assert body["usage"]["cost"] == COST == Decimal(raw.headers["x-request-cost"])
    receipt = caller.http.get(f"/v1/requests/{raw.headers['x-request-id']}/receipt").json()
    assert Decimal(receipt["cost"]) == COST
    assert sum(Decimal(line["amount"]) for line in receipt["lines"]) == COST
    assert receipt["timings"]["total_us"] >= receipt["timings"]["queue_us"] > 0
    balance = caller.http.get("/v1/balance").json()
    assert Decimal(balance["posted"]) == 1 - COST
    assert balance["held"] == "0"
    usage = caller.http.get("/v1/usage?group_by=model,key&tz=Asia/Kathmandu").json()
    assert Decimal(usage["total"]["cost"]) == COST
    assert usage["data"][0]["model"] == "echo"


def test_stream_has_the_same_text_and_ends_with_its_cost(stack: Stack) -> None:
    caller = stack.caller()

    chunks = list(
        client(stack, caller).chat.completions.create(
            model="slow", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "hello big world"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert Decimal(str(chunks[-1].usage.cost)) == COST  # type: ignore[attr-defined]  # our own field


def test_a_stream_without_the_option_has_its_usage_on_the_last_choice(stack: Stack) -> None:
    caller = stack.caller()

    chunks = list(
        client(stack, caller).chat.completions.create(
            model="echo", messages=HELLO, stream=True, n=2
        )
    )

    assert all(chunk.choices for chunk in chunks)
    assert chunks[-1].usage is not None
    assert {c.index for chunk in chunks for c in chunk.choices} == {0, 1}


def test_models_are_listed_with_prices(stack: Stack) -> None:
    listed = {model.id: model for model in client(stack, stack.caller()).models.list()}

    assert set(listed) == {"echo", "slow", "brief", "Veo3"}
    assert listed["echo"].model_extra is not None
    assert listed["echo"].model_extra["pricing"]["completion"] == "0.00000008"
    assert client(stack, stack.caller()).models.retrieve("Veo3").id == "Veo3"


def test_bad_input_is_a_bad_request_that_names_the_field(stack: Stack) -> None:
    caller = stack.caller()

    for body, param in (
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"n": 5}, "n"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"extra_body": {"stop": [""]}}, "stop"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client(stack, caller).chat.completions.create(
                model="echo",
                messages=HELLO,
                **body,  # type: ignore[arg-type]  # wrong on purpose
            )
        assert caught.value.param == param

    assert caller.http.get("/v1/balance").json()["posted"] == "1"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", b"null"])
def test_invalid_body_is_never_an_internal_error(body: bytes, stack: Stack) -> None:
    answer = stack.caller().http.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_wrong_key_is_not_authenticated(stack: Stack) -> None:
    caller = stack.caller()
    with pytest.raises(openai.AuthenticationError):
        client(stack, dataclasses.replace(caller, secret="tg_wrong")).models.list()


def test_revoked_key_is_refused_immediately(stack: Stack) -> None:
    caller = stack.caller()
    client(stack, caller).chat.completions.create(model="echo", messages=HELLO)

    database = Database(stack.database_url)
    with database.transaction() as connection:
        revoke_key(connection, str(caller.key_id))
    database.dispose()

    with pytest.raises(openai.AuthenticationError, match="revoked"):
        client(stack, caller).chat.completions.create(model="echo", messages=HELLO)


def test_a_key_without_the_scope_is_refused(stack: Stack) -> None:
    caller = stack.caller(scopes=("read",))

    with pytest.raises(openai.PermissionDeniedError, match="requires the scope inference"):
        client(stack, caller).chat.completions.create(model="echo", messages=HELLO)


def test_account_without_credit_is_refused(stack: Stack) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client(stack, stack.caller(credit="0")).chat.completions.create(
            model="echo", messages=HELLO
        )

    assert (caught.value.status_code, caught.value.code) == (402, "insufficient_credit")


def test_key_at_its_spend_limit_is_refused(stack: Stack) -> None:
    caller = stack.caller(spend_limit_nanos=100)

    with pytest.raises(openai.APIStatusError) as caught:
        client(stack, caller).chat.completions.create(model="echo", messages=HELLO)

    assert (caught.value.status_code, caught.value.code) == (402, "key_spend_limit")


def test_an_unknown_model_is_not_found(stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client(stack, stack.caller()).chat.completions.create(model="gpt-9", messages=HELLO)

    assert caught.value.code == "model_not_found"


def test_idempotency_key_with_another_body_is_a_conflict(stack: Stack) -> None:
    caller = stack.caller()
    headers = {"Idempotency-Key": "order 1"}
    ask = client(stack, caller).chat.completions.create
    first = ask(model="echo", messages=HELLO, extra_headers=headers)

    again = ask(model="echo", messages=HELLO, extra_headers=headers)
    with pytest.raises(openai.ConflictError):
        ask(model="echo", messages=HELLO, max_tokens=7, extra_headers=headers)

    assert again.id == first.id
    assert again.choices[0].message.content == "hello big world"
    assert Decimal(caller.http.get("/v1/balance").json()["posted"]) == 1 - COST


def test_credit_in_use_and_limits_per_minute_are_rate_limits(stack: Stack) -> None:
    caller = stack.caller(credit="0.00008")
    busy = order(caller, "slow", "word " * 40)
    with pytest.raises(openai.RateLimitError) as caught:
        client(stack, caller).chat.completions.create(model="echo", messages=HELLO)
    assert caught.value.code == "credit_in_use"
    assert "retry-after" in caught.value.response.headers
    assert ended(caller, busy)["status"] == "succeeded"

    limited = stack.caller(requests_per_minute=2)
    ask: Callable[[], object] = lambda: client(stack, limited).chat.completions.create(  # noqa: E731
        model="echo", messages=HELLO
    )
    ask()
    ask()
    with pytest.raises(openai.RateLimitError, match="2 requests per minute"):
        ask()


def test_an_upstream_without_its_credential_is_unavailable(stack: Stack) -> None:
    caller = stack.caller()

    answer = caller.http.post("/v1/requests", json={"model": "Veo3", "input": {"prompt": "x"}})

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "upstream_not_configured"
    quote = caller.http.post("/v1/quote", json={"model": "Veo3", "input": {"prompt": "x"}}).json()
    assert quote["max_cost"] == "0.4"
    with pytest.raises(openai.InternalServerError):
        client(stack, caller).post(
            "/requests", body={"model": "Veo3", "input": {"prompt": "x"}}, cast_to=object
        )


def test_disconnecting_from_a_stream_cancels_it_and_charges_what_was_produced(stack: Stack) -> None:
    caller = stack.caller()
    body = chat("slow", "word " * 200, stream=True)

    with caller.http.stream("POST", "/v1/chat/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        for line in response.iter_lines():
            if '"content":"word' in line:
                break

    found = ended(caller, request_id)
    assert found["status"] == "cancelled"
    assert 0 < found["usage"]["output_tokens"] < 200
    receipt = caller.http.get(f"/v1/requests/{request_id}/receipt").json()
    assert receipt["outcome"] == "charged"
    assert Decimal(receipt["cost"]) < Decimal(receipt["hold"])
    assert stack.held(caller) == 0


def test_disconnecting_from_an_unstreamed_chat_is_not_charged(stack: Stack) -> None:
    caller = stack.caller()

    with pytest.raises(openai.APITimeoutError):
        client(stack, caller).with_options(timeout=0.5).chat.completions.create(
            model="slow", messages=[{"role": "user", "content": "word " * 200}]
        )

    wait_for(lambda: stack.held(caller) == 0, "the hold to be released")
    assert caller.http.get("/v1/balance").json()["posted"] == "1"


def test_failed_worker_is_reported_as_not_to_be_retried(stack: Stack) -> None:
    caller = stack.caller()

    with pytest.raises(openai.APIStatusError) as caught:
        client(stack, caller).chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "!fail"}]
        )

    assert (caught.value.status_code, caught.value.code) == (424, "engine_error")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caller.http.get("/v1/balance").json()["posted"] == "1"
