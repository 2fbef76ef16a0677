"""Limits as clients meet them: refusals, their messages, and automatic retries."""

from __future__ import annotations

import asyncio
import collections
import uuid
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from gateway.accounts.keys import create_key
from gateway.accounts.limits import Limit, set_limit
from gateway.sql.database import Database
from tests.databases import Databases
from tests.stack import PEPPER, Caller, Stack, chat, order, running, wait_for

HELLO: Any = [{"role": "user", "content": "hello big world"}]


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, postgres: str, valkey: str
) -> Iterator[tuple[Stack, Stack]]:
    """Two gateways of one installation; the second one's queue takes nothing."""
    directory = tmp_path_factory.mktemp("two")
    url = Databases("postgresql", directory, postgres).make()
    with running(directory / "home", url, valkey, namespace=f"t{uuid.uuid4().hex[:8]}") as first:
        second = replace(first, port=0, processes={}, clients=[])
        try:
            second.start_gateway("second")
            yield first, second
        finally:
            second.stop()


class Client(openai.OpenAI):
    """OpenAI's own client, which notes the answers that it got and waits a second at most."""

    def __init__(self, stack: Stack, caller: Caller, *, retries: int = 2) -> None:
        self.answers: list[int] = []
        self.waits: list[float] = []
        super().__init__(
            base_url=f"{stack.url}/v1",
            api_key=caller.secret,
            max_retries=retries,
            http_client=httpx.Client(event_hooks={"response": [self._note]}, timeout=40),
        )
        stack.clients.append(self)

    def _note(self, response: httpx.Response) -> None:
        self.answers.append(response.status_code)

    def _calculate_retry_timeout(self, *arguments: Any, **named: Any) -> float:
        wait: float = super()._calculate_retry_timeout(*arguments, **named)
        self.waits.append(wait)
        return min(wait, 1.0)

    def ask(self, model: str = "echo", **more: Any) -> httpx.Headers:
        headers: httpx.Headers = self.chat.completions.with_raw_response.create(
            model=model, messages=HELLO, **more
        ).headers
        return headers


def limit(stack: Stack, made: Limit) -> None:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            set_limit(connection, made)
    finally:
        database.dispose()


def another_key(stack: Stack, caller: Caller) -> Caller:
    database = Database(stack.database_url)
    try:
        with database.transaction() as connection:
            secret, info = create_key(connection, caller.account_id, pepper=PEPPER.encode())
    finally:
        database.dispose()
    http = httpx.Client(base_url=stack.url, headers={"Authorization": f"Bearer {secret}"})
    stack.clients.append(http)
    return Caller(caller.account_id, info.id, secret, http)


def test_burst_over_two_gateways_is_accepted_up_to_the_limit(
    two: tuple[Stack, Stack],
) -> None:
    caller = two[0].caller()
    limit(two[0], Limit(caller.account_id, requests_per_minute=40))
    body = {"model": "echo", "input": {"messages": HELLO}}

    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=caller.http.headers, timeout=40) as client:
            return await asyncio.gather(
                *(client.post(f"{two[n % 2].url}/v1/requests", json=body) for n in range(200))
            )

    answers = asyncio.run(burst())

    assert collections.Counter(answer.status_code for answer in answers) == {202: 40, 429: 160}
    accepted = caller.http.get("/v1/requests?limit=1000").json()["data"]
    assert len(accepted) == 40, "a refused request left a row"
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert sorted(left) == [0] * 161 + [*range(1, 40)]


def test_rate_limit_headers_report_what_remains(stack: Stack) -> None:
    caller = stack.caller(requests_per_minute=2, tokens_per_minute=1000)
    client = Client(stack, caller, retries=0)

    first = client.ask(max_tokens=50)
    assert first["x-ratelimit-limit-requests"] == "2"
    assert first["x-ratelimit-remaining-requests"] == "1"
    assert first["x-ratelimit-reset-requests"] == "1m0s"
    assert first["x-ratelimit-limit-tokens"] == "1000"
    most = 1000 - int(first["x-ratelimit-remaining-tokens"])
    assert most >= 50
    assert first["ratelimit-policy"] == '"key-requests";q=2;w=60, "key-tokens";q=1000;w=60'
    assert first["ratelimit"] == f'"key-requests";r=1;t=60, "key-tokens";r={1000 - most};t=60'

    streamed = client.chat.completions.with_raw_response.create(
        model="echo", messages=HELLO, stream=True, max_tokens=50
    )
    assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
    list(streamed.parse())

    with pytest.raises(openai.RateLimitError, match="2 requests per minute") as caught:
        client.ask()
    refused = caught.value.response.headers
    assert refused["x-ratelimit-remaining-requests"] == "0"
    assert refused["x-should-retry"] == "true"
    assert 1 <= int(refused["retry-after"]) <= 60
    assert caught.value.code == "rate_limit_exceeded"
    for wrong in ({"model": "echo"}, chat("gpt-9", "x")):
        answer = caller.http.post("/v1/chat/completions", json=wrong)
        assert answer.status_code in (400, 404)
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-requests" not in Client(stack, stack.caller()).ask()


def test_unused_tokens_are_returned_after_the_request(stack: Stack) -> None:
    caller = stack.caller(tokens_per_minute=1000)
    client = Client(stack, caller)

    answer = client.chat.completions.create(model="echo", messages=HELLO, max_tokens=400)
    assert answer.usage is not None
    used = answer.usage.total_tokens

    def left() -> int:
        wrong = caller.http.post("/v1/chat/completions", json={})
        return int(wrong.headers["x-ratelimit-remaining-tokens"])

    assert used < 400
    wait_for(lambda: left() == 1000 - used, "unused tokens to be given back")


def test_requests_refused_for_other_reasons_do_not_count(stack: Stack) -> None:
    caller = stack.caller(credit="0.00000001", requests_per_minute=5, tokens_per_minute=1000)

    for _ in range(7):
        answer = caller.http.post("/v1/chat/completions", json=chat("echo", "a", max_tokens=400))
        assert (answer.status_code, answer.json()["error"]["code"]) == (402, "insufficient_credit")
        assert answer.headers["x-ratelimit-remaining-requests"] == "5"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "1000"


def test_limits_of_account_and_model_cover_all_keys_together(stack: Stack) -> None:
    caller = stack.caller()
    other = another_key(stack, caller)
    limit(stack, Limit(caller.account_id, None, "slow", requests_per_minute=2))
    limit(stack, Limit(caller.account_id, requests_per_minute=3))
    keys = [Client(stack, each, retries=0) for each in (caller, other)]

    for client in keys:
        client.ask("slow", max_tokens=1)
    for client in keys:
        with pytest.raises(openai.RateLimitError, match="account, for slow, is limited to 2"):
            client.ask("slow", max_tokens=1)
    keys[0].ask()
    for client in keys:
        with pytest.raises(openai.RateLimitError, match="account is limited to 3 requests"):
            client.ask()


def test_openai_client_retries_a_rate_limit_only_if_that_can_succeed(stack: Stack) -> None:
    client = Client(stack, stack.caller(requests_per_minute=1))
    client.ask()
    with pytest.raises(openai.RateLimitError):
        client.ask()
    assert client.answers == [200, 429, 429, 429]
    assert all(50 < wait <= 60 for wait in client.waits)

    tight = Client(stack, stack.caller(tokens_per_minute=100))
    with pytest.raises(openai.RateLimitError, match="it can never be accepted"):
        tight.ask(max_tokens=200)
    assert tight.answers == [429]


def test_openai_client_retries_if_credit_is_held_but_not_if_it_is_spent(stack: Stack) -> None:
    poor = Client(stack, stack.caller(credit="0.00000001"))
    with pytest.raises(openai.APIStatusError) as caught:
        poor.ask()
    assert poor.answers == [402]
    assert (caught.value.code, caught.value.type) == ("insufficient_credit", "insufficient_quota")

    busy = stack.caller(credit="0.00008")
    order(busy, "slow", "word " * 40)
    client = Client(stack, busy, retries=30)
    client.ask()
    assert client.answers[0] == 429
    assert client.answers[-1] == 200
    assert set(client.waits) == {1.0}


def test_openai_client_waits_for_a_running_request_to_end(stack: Stack) -> None:
    caller = stack.caller()
    limit(stack, Limit(caller.account_id, None, "slow", concurrent_max=1))
    order(caller, "slow", "word " * 40)
    client = Client(stack, caller, retries=30)

    client.ask("slow")

    assert client.answers[0] == 429
    assert client.answers[-1] == 200
    body = Client(stack, caller, retries=0)
    order(caller, "slow", "word " * 40)
    with pytest.raises(openai.RateLimitError) as caught:
        body.ask("slow")
    assert caught.value.code == "too_many_concurrent"
    assert caught.value.response.headers["retry-after"] == "1"


def test_requests_refused_by_a_full_queue_do_not_count(two: tuple[Stack, Stack]) -> None:
    stack = replace(two[0], port=0, processes={}, clients=[])
    try:
        stack.start_gateway("full", environment={"TOLLGATE_QUEUE_MAX": "0"})
        caller = stack.caller(requests_per_minute=5, tokens_per_minute=1000)
        client = Client(stack, caller)
        with pytest.raises(openai.RateLimitError) as caught:
            client.ask(max_tokens=100)
        assert client.answers == [429] * 3
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "5"
        assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "5"
        left = caller.http.post("/v1/chat/completions", json={}).headers
        assert left["x-ratelimit-remaining-requests"] == "5"
        assert left["x-ratelimit-remaining-tokens"] == "1000"
        assert stack.held(caller) == 0
    finally:
        stack.stop()


def test_budget_refuses_until_its_reset_and_can_be_changed_and_ended(stack: Stack) -> None:
    admin = stack.caller(scopes=("admin", "read"))
    caller = stack.caller()
    body = {"account": str(caller.account_id), "window": "day", "name": "daily"}
    made = admin.http.post("/v1/admin/budgets", json={**body, "limit": "0.00000005"})
    assert made.status_code == 201, made.text
    budget = made.json()
    client = Client(stack, caller)

    with pytest.raises(openai.APIStatusError, match="the budget 'daily'") as caught:
        client.ask()

    assert client.answers == [402]
    refused: Any = caught.value.body
    assert (refused["code"], refused["type"]) == ("budget_exceeded", "insufficient_quota")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert refused["budget_id"] == budget["id"]
    assert refused["resets_at"] == budget["ends_at"].replace(".000000", "")
    assert refused["resets_at"] in refused["message"]

    place = f"/v1/admin/budgets/{budget['id']}"
    assert admin.http.patch(place, json={"limit": "0.5", "hard": False}).json()["hard"] is False
    assert "x-budget-exceeded" not in client.ask()
    [seen] = caller.http.get("/v1/budgets").json()["data"]
    spent = Decimal(seen["spent"])
    assert 0 < spent == Decimal("0.5") - Decimal(seen["remaining"])
    assert (seen["held"], seen["exceeded"], seen["account"]) == ("0", False, budget["account"])

    admin.http.patch(place, json={"limit": "0"})
    assert client.ask()["x-budget-exceeded"] == "daily"
    [seen] = caller.http.get("/v1/budgets").json()["data"]
    assert seen["exceeded"] is True
    assert Decimal(seen["spent"]) == 2 * spent

    assert admin.http.delete(place).status_code == 200
    assert admin.http.delete(place).status_code == 404
    assert caller.http.get("/v1/budgets").json()["data"] == []
    assert "tollgate_soft_budgets_passed_total" in caller.http.get("/metrics").text
    assert stack.findings() == []


def test_rate_limits_are_set_and_removed(stack: Stack) -> None:
    admin = stack.caller(scopes=("admin", "read"))
    caller = stack.caller()
    whose = {"account": caller.account_id, "key": caller.key_id}

    answer = admin.http.put("/v1/admin/rate-limits", json={**whose, "requests_per_minute": 1})

    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["key"], made["model"], made["requests_per_minute"]) == (caller.key_id, None, 1)
    assert caller.http.get("/v1/rate-limits").json()["data"] == [made]
    everything = admin.http.get("/v1/admin/rate-limits").json()["data"]
    assert made in everything
    client = Client(stack, caller, retries=0)
    client.ask()
    with pytest.raises(openai.RateLimitError):
        client.ask()
    assert admin.http.delete("/v1/admin/rate-limits", params=whose).json() == made
    assert caller.http.get("/v1/rate-limits").json()["data"] == []


def test_only_an_admin_reads_or_sets_limits_of_other_accounts(stack: Stack) -> None:
    mine, other = stack.caller(), stack.caller()
    admin = stack.caller(scopes=("admin", "read"))

    for path in ("/v1/budgets", "/v1/rate-limits"):
        named = f"{path}?account={other.account_id}"
        assert mine.http.get(named).status_code == 404
        assert mine.http.get(f"{path}?account={mine.account_id}").status_code == 200
        assert admin.http.get(named).status_code == 200
        assert mine.http.get(path.replace("/v1", "/v1/admin")).status_code == 403
        assert (
            mine.http.delete(f"/v1/admin/rate-limits?account={mine.account_id}").status_code == 403
        )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"limit": 25}, 400, "an amount must be a string"),
        ({"limit": "a lot"}, 400, "is not a valid amount"),
        ({"limit": "-1"}, 400, "cannot be negative"),
        ({"account": "nobody"}, 404, "Unknown account 'nobody'"),
        ({"window": "week"}, 400, "'hour', 'day', 'month' or 'total'"),
        ({"tz": "Europe/Atlantis"}, 400, "Unknown time zone 'Europe/Atlantis'"),
        ({"model": "gpt-9"}, 404, "'gpt-9' does not exist"),
        ({"key": 999999}, 404, "has no key 999999"),
    ],
)
def test_invalid_budget_is_refused_with_the_reason(
    stack: Stack, body: dict[str, Any], status: int, message: str
) -> None:
    admin = stack.caller(scopes=("admin",))
    whole = {"account": str(admin.account_id), "limit": "25", "window": "day", **body}

    answer = admin.http.post("/v1/admin/budgets", json=whole)

    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
