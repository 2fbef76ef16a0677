"""Usage and costs in OpenAI's and OpenRouter's shapes, read by their clients, equal receipts."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from openai import OpenAI

from gateway.ledger.refunds import refund
from gateway.pricing import format_usd, parse_usd
from gateway.sql.database import Database
from tests.stack import Caller, Stack, chat


def spend(caller: Caller, *words: str) -> list[str]:
    return [
        str(caller.http.post("/v1/chat/completions", json=chat("echo", word)).json()["id"])
        for word in words
    ]


def give_back(stack: Stack, request_id: str) -> None:
    database = Database(stack.database_url)
    with database.transaction() as connection:
        refund(connection, request_id, 10, key=request_id, actor="test", reason="test")
    database.dispose()


def cost(caller: Caller, *ids: str) -> int:
    receipts = [caller.http.get(f"/v1/requests/{id}/receipt").json() for id in ids]
    return sum(parse_usd(receipt["net_cost"]) for receipt in receipts)


def test_generation_equals_its_receipt(stack: Stack) -> None:
    caller = stack.caller()
    (id,) = spend(caller, "two words")
    give_back(stack, id)

    for prefix in ("/v1", "/api/v1"):
        answer = caller.http.get(f"{prefix}/generation", params={"id": id})
        data = answer.json()["data"]
        assert f'"total_cost":{format_usd(cost(caller, id))},' in answer.text
        assert (data["id"], data["model"], data["tokens_completion"]) == (id, "echo", 2)
        assert (data["finish_reason"], data["cancelled"]) == ("stop", False)
    other = stack.caller(credit="0")
    assert other.http.get("/v1/generation", params={"id": id}).status_code == 404


def test_credits_minus_usage_equal_the_balance(stack: Stack) -> None:
    caller = stack.caller(credit="0.5", spend_limit_nanos=10**6)
    ids = spend(caller, "one", "two words")
    give_back(stack, ids[0])

    credits = caller.http.get("/v1/credits").text
    key = caller.http.get("/api/v1/key").json()["data"]

    spent = cost(caller, *ids)
    assert credits == (
        f'{{"data":{{"total_credits":{format_usd(5 * 10**8)},"total_usage":{format_usd(spent)}}}}}'
    )
    assert round(key["usage"] * 1e9) == round(key["usage_daily"] * 1e9) == spent
    assert round(key["limit_remaining"] * 1e9) == 10**6 - spent
    assert (key["is_free_tier"], key["is_management_key"]) == (False, False)


def test_the_openai_client_reads_costs_and_usage(stack: Stack) -> None:
    caller, boss = stack.caller(), stack.caller(credit="0", scopes=("read", "admin"))
    ids = spend(caller, "one", "two words")
    start = int(time.time()) - 3 * 86400
    projects = [str(caller.account_id)]
    with OpenAI(
        api_key=boss.secret, admin_api_key=boss.secret, base_url=f"{stack.url}/v1"
    ) as client:
        usage = client.admin.organization.usage
        costs = usage.costs(
            start_time=start,
            project_ids=projects,
            group_by=["project_id", "api_key_id", "line_item"],
        )
        used = usage.completions(
            start_time=start, project_ids=projects, bucket_width="1h", limit=168, group_by=["model"]
        )
        minutes = usage.completions(
            start_time=int(time.time()) - 600, project_ids=projects, bucket_width="1m"
        )
        nothing = usage.moderations(start_time=start)
        images = usage.images(start_time=start, project_ids=projects)

    (result,) = [result for bucket in costs.data for result in bucket.results]
    assert result.object == "organization.costs.result"
    assert round((result.amount.value or 0) * 1e9) == cost(caller, *ids)
    assert (result.project_id, result.line_item) == (projects[0], "echo")
    assert result.api_key_id == str(caller.key_id)
    (words,) = [result for bucket in used.data for result in bucket.results]
    assert words.object == "organization.usage.completions.result"
    assert (words.output_tokens, words.num_model_requests, words.model) == (3, 2, "echo")
    assert sum(len(bucket.results) for bucket in minutes.data) in (1, 2)
    assert [bucket.results for bucket in nothing.data] == [[]] * len(nothing.data)
    assert not any(bucket.results for bucket in images.data)


def test_buckets_are_paged_and_cut_at_utc_midnight(stack: Stack) -> None:
    boss = stack.caller(credit="0", scopes=("read", "admin"))
    start = int(datetime(2026, 3, 1, 6, tzinfo=UTC).timestamp())
    end = int(datetime(2026, 3, 4, 12, tzinfo=UTC).timestamp())
    query = {"start_time": start, "end_time": end, "limit": 3}

    first = boss.http.get("/v1/organization/costs", params=query).json()
    rest = boss.http.get(
        "/v1/organization/costs", params=query | {"page": first["next_page"]}
    ).json()

    edges = [bucket["start_time"] for bucket in first["data"] + rest["data"]]
    assert edges == [start, *(start + 86400 * day - 6 * 3600 for day in (1, 2, 3))]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert rest["data"][-1]["end_time"] == end


def test_invalid_queries_are_refused(stack: Stack) -> None:
    caller, boss = stack.caller(), stack.caller(credit="0", scopes=("read", "admin"))

    def status(path: str, **params: object) -> int:
        return boss.http.get(f"/v1/organization/{path}", params=params).status_code  # type: ignore[arg-type]

    assert caller.http.get("/v1/organization/costs?start_time=1").status_code == 403
    assert status("costs") == 400
    assert status("costs", start_time=2**62) == 400
    assert status("costs", start_time=1, limit=181) == 400
    assert status("costs", start_time=1, page="x") == 400
    assert status("costs", **{"start_time": 1, "group_by[]": "moon"}) == 400
    assert status("usage/moon", start_time=1) == 404
