"""Organisations over HTTP: accounts, budgets that refuse by name, statements, usage, exports."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.stack import Caller, Stack, chat


class Group:
    """An organisation with two accounts, and an operator."""

    def __init__(self, stack: Stack) -> None:
        self.admin = stack.caller(credit="0", scopes=("admin",))
        self.members = [stack.caller(), stack.caller()]
        self.name = f"group-{uuid.uuid4().hex[:8]}"
        self.path = f"/v1/admin/organisations/{self.name}"
        self.call("POST", "/v1/admin/organisations", {"name": self.name}, status=201)
        for each in self.members:
            self.call("PUT", f"{self.path}/accounts/{each.account_id}")

    def call(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        answer = self.admin.http.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def budget(self, limit: str, status: int = 201, **more: Any) -> Any:
        body = {"limit": limit, "window": "month", **more}
        return self.call("POST", f"{self.path}/budgets", body, status=status)


def ask(caller: Caller) -> Any:
    return caller.http.post("/v1/chat/completions", json=chat("echo", "a b c", max_tokens=50))


def test_budget_of_the_organisation_refuses_by_name_in_the_dialect_of_the_caller(
    stack: Stack,
) -> None:
    group = Group(stack)
    made = group.budget("0.000001", name="all of it")
    one, other = group.members

    refused = ask(one)
    native = other.http.post("/v1/requests", json={"model": "echo", "input": {"prompt": "a"}})

    assert (refused.status_code, native.status_code) == (402, 402)
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("budget_exceeded", "insufficient_quota")
    assert f"of the organisation {group.name!r}" in error["message"]
    assert native.json()["error"]["organisation"] == group.name
    (seen,) = one.http.get("/v1/budgets").json()["data"]
    assert (seen["id"], seen["organisation"], seen["account"]) == (made["id"], group.name, None)
    assert (seen["allotted"], seen["unallotted"]) == (None, None), "other accounts' budgets"
    group.call("PATCH", f"/v1/admin/budgets/{made['id']}", {"limit": "5"})
    assert ask(one).is_success
    group.call("DELETE", f"{group.path}/accounts/{one.account_id}")
    assert one.http.get("/v1/budgets").json()["data"] == []


def test_allotments_are_listed_and_bounded(stack: Stack) -> None:
    group = Group(stack)
    group.budget("10")
    own = {"account": str(group.members[0].account_id), "window": "month"}

    group.call("POST", "/v1/admin/budgets", {**own, "limit": "7.5"}, status=201)
    refused = group.call("POST", "/v1/admin/budgets", {**own, "limit": "2.6"}, status=409)

    assert refused["error"]["code"] == "budget_overallotted"
    (listed,) = group.call("GET", f"{group.path}/budgets")["data"]
    assert (listed["allotted"], listed["unallotted"]) == ("7.5", "2.5")
    assert group.call("GET", group.path)["budgets"] == [listed]
    everything = group.call("GET", f"/v1/admin/budgets?organisation={group.name}")
    assert everything["data"] == [listed]
    group.call("PATCH", f"/v1/admin/budgets/{listed['id']}", {"overallot": True})
    group.call("POST", "/v1/admin/budgets", {**own, "limit": "2.6"}, status=201)
    (listed,) = group.call("GET", f"{group.path}/budgets")["data"]
    assert (listed["overallot"], listed["unallotted"]) == (True, "-0.1")


def test_statement_usage_and_export_cover_the_accounts_and_no_others(stack: Stack) -> None:
    group = Group(stack)
    for caller in (*group.members, stack.caller()):
        assert ask(caller).is_success
    month = f"{datetime.now(UTC):%Y-%m}"

    made = group.call("GET", f"{group.path}/statements/{month}")
    groups = group.call("GET", f"{group.path}/usage?group_by=account,model")

    own = [caller.http.get(f"/v1/statements/{month}").json() for caller in group.members]
    assert [{**each, "account_id": None} for each in made["accounts"]] == [
        {**each, "account_id": None} for each in own
    ]
    assert float(made["sum"]) == sum(float(each["sum"]) for each in own) > 0
    assert [row["account"] for row in groups["data"]] == [each["account"] for each in own]
    assert groups["total"]["cost"] == made["sum"]
    for form, start in (("csv", b"month,"), ("html", b"<!doctype"), ("pdf", b"%PDF")):
        answer = group.admin.http.get(f"{group.path}/statements/{month}.{form}")
        assert answer.content.startswith(start), form
        assert f"{month}.{form}" in answer.headers["content-disposition"]
    assert group.admin.http.get(f"{group.path}/statements/2026-13").status_code == 400
    missing = group.admin.http.get(f"/v1/admin/organisations/none/statements/{month}")
    assert missing.json()["error"]["code"] == "organisation_not_found"
    yesterday = datetime.now(UTC).date() - timedelta(days=1)
    span = {"from": f"{yesterday}", "to": f"{yesterday}"}
    file = group.admin.http.get(f"{group.path}/usage/export", params=span)
    footer = group.call("GET", f"{group.path}/usage/export/footer?from={yesterday}&to={yesterday}")
    assert file.text.startswith('"kind","request_id"')
    assert (footer["rows"], footer["file"][:19]) == (0, "usage-organisation-")


def test_account_of_another_organisation_is_refused(stack: Stack) -> None:
    group, second = Group(stack), Group(stack)

    refused = group.call("PUT", f"{second.path}/accounts/{group.members[0].account_id}", status=409)
    taken = group.call("PATCH", second.path, {"name": group.name}, status=409)

    assert refused["error"]["code"] == "already_member"
    assert taken["error"]["code"] == "organisation_exists"
    assert [each["id"] for each in group.call("GET", group.path)["accounts"]] == [
        each.account_id for each in group.members
    ]
    names = [each["name"] for each in group.call("GET", "/v1/admin/organisations")["data"]]
    assert {group.name, second.name} <= {*names}
