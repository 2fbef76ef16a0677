"""Requests repeated after a broken connection: charged once, answered once."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
from openai import OpenAI

from tests.stack import Caller, Stack, chat, wait_for

WORDS = " ".join(str(number) for number in range(30))
"""1.5 s of the slow model."""


def listed(caller: Caller) -> list[dict[str, object]]:
    data: list[dict[str, object]] = caller.http.get("/v1/requests").json()["data"]
    return data


def ask_and_go(caller: Caller, content: str, *, after_s: float = 0.3) -> None:
    with contextlib.suppress(httpx.TimeoutException):
        caller.http.post(
            "/v1/chat/completions", json=chat("slow", content), timeout=httpx.Timeout(after_s)
        )
        raise AssertionError("the answer came before the client went")


def test_client_that_retries_after_a_broken_connection_is_charged_once(stack: Stack) -> None:
    caller = stack.caller()
    ask_and_go(caller, WORDS)

    answer = caller.http.post("/v1/chat/completions", json=chat("slow", WORDS))

    assert answer.json()["choices"][0]["message"]["content"] == WORDS
    assert [request["id"] for request in listed(caller)] == [answer.json()["id"]]
    assert stack.findings() == []


def test_late_answer_is_returned_to_the_retry(stack: Stack) -> None:
    caller = stack.caller()
    ask_and_go(caller, "only a few words to say")
    wait_for(lambda: stack.held(caller) == 0, "the request to end")

    answer = caller.http.post("/v1/chat/completions", json=chat("slow", "only a few words to say"))

    assert answer.json()["choices"][0]["message"]["content"] == "only a few words to say"
    assert len(listed(caller)) == 1


def test_openai_client_with_a_short_timeout_is_charged_once(stack: Stack) -> None:
    caller = stack.caller()
    with OpenAI(
        api_key=caller.secret, base_url=f"{stack.url}/v1", max_retries=6, timeout=0.8
    ) as client:
        answer = client.chat.completions.create(
            model="slow", messages=[{"role": "user", "content": WORDS}]
        )

    assert answer.choices[0].message.content == WORDS
    assert [request["id"] for request in listed(caller)] == [answer.id]
    assert stack.findings() == []


def test_client_that_does_not_reconnect_is_not_charged(stack: Stack) -> None:
    caller = stack.caller()
    ask_and_go(caller, f"{WORDS} {WORDS} {WORDS}")

    wait_for(lambda: stack.held(caller) == 0, "the hold to go")

    (request,) = listed(caller)
    assert (request["status"], request["cost"]) == ("cancelled", "0")


def test_same_body_after_a_delivered_answer_is_a_new_request(stack: Stack) -> None:
    caller = stack.caller()
    for _ in range(2):
        caller.http.post("/v1/chat/completions", json=chat("echo", "again"))

    assert len(listed(caller)) == 2


def test_same_body_after_a_cancellation_is_a_new_request(stack: Stack) -> None:
    caller = stack.caller()
    content = f"{WORDS} {WORDS} {WORDS}"
    ask_and_go(caller, content)
    (request,) = listed(caller)
    caller.http.post(f"/v1/requests/{request['id']}/cancel")
    wait_for(lambda: stack.held(caller) == 0, "the request to end")

    answer = caller.http.post("/v1/chat/completions", json=chat("slow", content))

    assert answer.json()["id"] != request["id"]
    assert answer.json()["choices"][0]["message"]["content"] == content


async def test_concurrent_equal_requests_are_answered_separately(stack: Stack) -> None:
    caller = stack.caller()
    async with httpx.AsyncClient(headers=caller.http.headers, base_url=stack.url) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=chat("echo", "dice")) for _ in range(8))
        )

    assert len({answer.json()["id"] for answer in answers}) == 8


def test_same_body_under_another_key_is_a_separate_request(stack: Stack) -> None:
    caller, other = stack.caller(), stack.caller()
    ask_and_go(caller, WORDS)

    answer = other.http.post("/v1/chat/completions", json=chat("slow", WORDS))

    assert answer.is_success
    assert listed(other)[0]["id"] != listed(caller)[0]["id"]
