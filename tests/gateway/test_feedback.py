"""Accounts rate their requests; operators see ratings by model and version."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.test_usage import account_name, admin, spend
from tests.stack import Caller, Stack, ended, order


def request_of(caller: Caller) -> str:
    spend(caller, "one")
    return str(caller.http.get("/v1/requests").json()["data"][0]["id"])


def rate(caller: Caller, request_id: str, **feedback: Any) -> dict[str, Any]:
    answer = caller.http.post(f"/v1/requests/{request_id}/feedback", json=feedback)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_feedback_is_replaced_shown_listed_and_deleted(stack: Stack) -> None:
    caller = stack.caller()
    first, second = request_of(caller), request_of(caller)
    path = f"/v1/requests/{first}"

    rate(caller, second, rating=5)
    once = rate(caller, first, rating=1, labels=["wrong", "long"], comment="No.")
    again = rate(caller, first, labels=["long", "rude", "long"])

    assert (once["rating"], once["labels"], once["comment"]) == (1, ["long", "wrong"], "No.")
    assert (again["rating"], again["labels"], again["comment"]) == (None, ["long", "rude"], "")
    assert again["created_at"] == once["created_at"]
    assert caller.http.get(f"{path}/feedback").json() == again
    assert caller.http.get(path).json()["feedback"] == again
    page = caller.http.get("/v1/feedback", params={"limit": 1}).json()
    assert [one["request_id"] for one in page["data"]] == [second]
    rest = caller.http.get("/v1/feedback", params={"cursor": page["next_cursor"]}).json()
    assert (rest["data"], rest["has_more"]) == ([again], False)
    labelled = caller.http.get("/v1/feedback", params={"label": "rude"}).json()["data"]
    assert labelled == [again]
    assert caller.http.get("/v1/feedback", params={"label": "rud"}).json()["data"] == []
    lines = caller.http.get("/v1/feedback/export").text.splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == [first, second]

    assert caller.http.delete(f"{path}/feedback").json()["deleted"] is True
    gone = caller.http.delete(f"{path}/feedback")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "feedback_not_found")
    assert "feedback" not in caller.http.get(path).json()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rating": 0},
        {"rating": 6},
        {"rating": "good"},
        {"labels": ["a"] * 9},
        {"labels": ["<b>"]},
        {"comment": "x" * 2001},
        {"stars": 5},
    ],
)
def test_feedback_is_bounded(stack: Stack, body: dict[str, Any]) -> None:
    caller = stack.caller()

    answer = caller.http.post(f"/v1/requests/req_{'0' * 32}/feedback", json=body)

    assert answer.status_code == 400, answer.text


def test_feedback_is_for_own_requests_that_have_ended(stack: Stack) -> None:
    caller, other = stack.caller(), stack.caller()
    running = order(caller, "slow", "one two three four five six seven eight nine ten")

    early = caller.http.post(f"/v1/requests/{running}/feedback", json={"rating": 3})
    foreign = other.http.post(f"/v1/requests/{running}/feedback", json={"rating": 3})

    assert (early.status_code, early.json()["error"]["code"]) == (409, "request_not_ended")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "request_not_found")
    ended(caller, running)
    rate(caller, running, rating=3)
    assert other.http.get(f"/v1/requests/{running}/feedback").status_code == 404
    assert other.http.get("/v1/feedback").json()["data"] == []


def test_operators_see_ratings_by_version_and_beside_margins(stack: Stack) -> None:
    caller, boss = stack.caller(), admin(stack)
    for rating in (5, 4, 4):
        rate(caller, request_of(caller), rating=rating, labels=["short"])
    rate(caller, request_of(caller), comment="Good.")
    owner = {"account": str(caller.account_id)}

    report = boss.http.get("/v1/admin/feedback", params=owner).json()
    margins = boss.http.get("/v1/admin/margins", params={"group_by": "account,served_by"}).json()[
        "data"
    ]
    exported = boss.http.get("/v1/admin/feedback/export", params=owner).text.splitlines()

    (group,) = report["data"]
    assert (group["model"], group["served_by"]) == ("echo", "echo")
    assert (group["feedback"], group["ratings"], group["mean_rating"]) == (4, 3, 4.33)
    assert group["by_rating"] == {"1": 0, "2": 0, "3": 0, "4": 2, "5": 1}
    assert group["labels"] == {"short": 3}
    (own,) = [one for one in margins if one["account"] == account_name(stack, caller)]
    assert (own["requests"], own["ratings"], own["mean_rating"]) == (4, 3, 4.33)
    lines = [json.loads(line) for line in exported]
    assert [line["rating"] for line in lines] == [5, 4, 4, None]
    assert {(line["served_by"], line["account_id"]) for line in lines} == {
        ("echo", caller.account_id)
    }
    assert caller.http.get("/v1/admin/feedback").status_code == 403
    unknown = boss.http.get("/v1/admin/feedback", params={"group_by": "device"})
    assert unknown.status_code == 400
