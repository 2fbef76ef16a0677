"""Each administrative route admits the roles of its area, as the table of roles says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gateway.accounts.roles import AREAS, ROLES, Role, area_of, may
from tests.gateway.test_audit_log import CALLS, admin_routes
from tests.stack import Caller, Stack, wait_for


def test_every_administrative_route_declares_an_area(tmp_path: Path) -> None:
    for _, handler in admin_routes(tmp_path):
        assert handler.opt.get("area") in AREAS, handler.operation_id


def test_the_area_of_a_route_is_that_of_its_act(tmp_path: Path) -> None:
    areas = {handler.operation_id: handler.opt["area"] for _, handler in admin_routes(tmp_path)}
    for name, calls in CALLS.items():
        for act, _ in calls:
            expected = area_of(act)
            # Finance changes the terms of an account; the handler checks the other fields.
            assert areas[name] == ("terms" if name == "ChangeAccount" else expected), name


@pytest.mark.parametrize("role", ROLES)
def test_every_route_admits_the_roles_of_its_area(stack: Stack, tmp_path: Path, role: Role) -> None:
    caller = stack.caller(credit="0", scopes=("admin",), role=role)

    for template, handler in admin_routes(tmp_path):
        for method in handler.http_methods - {"OPTIONS"}:
            path = re.sub(r"\{[^}]*\}", "999999999", template)
            if handler.operation_id == "Reconcile":
                continue
            answer = caller.http.request(method, path)
            allowed = may(role, handler.opt["area"], write=method not in ("GET", "HEAD"))
            refused = answer.status_code == 403
            assert refused != allowed, f"{role} {method} {path}: {answer.text}"
            if refused:
                assert answer.json()["error"]["code"] == "role_not_allowed"


def test_finance_changes_the_terms_of_an_account_and_nothing_else(stack: Stack) -> None:
    finance = stack.caller(credit="0", scopes=("admin",), role="finance")
    path = f"/v1/admin/accounts/{stack.caller(credit='0').account_id}"

    terms = finance.http.patch(path, json={"credit_limit": "5", "allowance": "1"})
    status = finance.http.patch(path, json={"credit_limit": "6", "status": "closed"})

    assert terms.status_code == 200, terms.text
    assert status.status_code == 403
    assert status.json()["error"]["code"] == "role_not_allowed"


def test_a_role_reads_the_acts_of_its_areas(stack: Stack) -> None:
    path = "/v1/admin/audit"
    account = str(stack.caller(credit="0").account_id)
    admin = stack.caller(credit="0", scopes=("admin",))
    admin.http.patch(f"/v1/admin/accounts/{account}", json={"credit_limit": "5"})
    key = admin.http.post(f"/v1/admin/accounts/{account}/keys", json={"name": "its"})
    assert key.is_success, key.text
    finance = stack.caller(credit="0", scopes=("admin",), role="finance")

    def acts(caller: Caller) -> set[str]:
        listed = caller.http.get(path, params={"account": account}).json()["data"]
        exported = caller.http.get(f"{path}/export", params={"account": account}).text
        found = {each["act"] for each in listed}
        assert found == {json.loads(line)["act"] for line in exported.splitlines()}
        return found

    assert acts(admin) >= {"account.change", "key.create"}
    assert "account.change" in acts(finance)
    assert "key.create" not in acts(finance)
    refused = finance.http.get(path, params={"act": "key.create"})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "role_not_allowed"


def test_refused_administrative_calls_are_recorded(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",))
    auditor = stack.caller(credit="0", scopes=("admin",), role="auditor")
    customer = stack.caller(credit="0", scopes=("inference", "read"))

    for path in ("999", "998"):
        assert auditor.http.patch(f"/v1/admin/accounts/{path}", json={}).status_code == 403
    assert customer.http.get("/v1/admin/audit").status_code == 403
    # Without a valid key, there is no author.
    assert admin.http.get("/v1/admin/audit", headers={"Authorization": "x"}).status_code == 401

    def refusals(caller: Caller) -> list[dict[str, int]]:
        params = {"act": "access.refuse", "actor": caller.secret[:10]}
        found = admin.http.get("/v1/admin/audit", params=params).json()["data"]
        return [each["after"]["calls"] for each in found]

    wait_for(lambda: bool(refusals(auditor) and refusals(customer)), "refusals")
    assert refusals(customer) == [{"GET /v1/admin/audit": 1}]
    # The second call is in the same event, or in the one of the next minute.
    assert [set(calls) for calls in refusals(auditor)] == [{"PATCH /v1/admin/accounts/{account}"}]
    assert refusals(admin) == []


def test_role_is_shown_with_the_key(stack: Stack) -> None:
    caller = stack.caller(credit="0", scopes=("admin", "read"), role="auditor")

    assert caller.http.get("/v1/keys/self").json()["role"] == "auditor"


def test_a_role_without_webhooks_does_not_read_those_of_other_accounts(stack: Stack) -> None:
    other = stack.caller(credit="0")
    finance = stack.caller(credit="0", scopes=("admin", "read"), role="finance")
    auditor = stack.caller(credit="0", scopes=("admin", "read"), role="auditor")
    path, params = "/v1/webhooks/deliveries", {"account": str(other.account_id)}

    refused = finance.http.get(path, params=params)

    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "role_not_allowed"
    assert auditor.http.get(path, params=params).is_success
    assert finance.http.get(path).is_success, "its own account's"
