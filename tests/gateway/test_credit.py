"""Accounts, keys, credit, refunds and corrections over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.pricing import parse_usd
from tests.stack import Caller, Stack, chat


def admin(stack: Stack) -> httpx.Client:
    return stack.caller(credit="0", scopes=("read", "admin")).http


def spend(caller: Caller, word: str) -> dict[str, Any]:
    answer = caller.http.post("/v1/chat/completions", json=chat("echo", word)).json()
    receipt: dict[str, Any] = caller.http.get(f"/v1/requests/{answer['id']}/receipt").json()
    return receipt


def test_account_is_created_with_credit_and_a_key(stack: Stack) -> None:
    boss = admin(stack)
    name = f"acme {boss.headers['authorization'][-8:]}"

    made = boss.post("/v1/admin/accounts", json={"name": name, "credit_limit": "1"})
    again = boss.post("/v1/admin/accounts", json={"name": name})
    path = f"/v1/admin/accounts/{made.json()['id']}"
    changed = boss.patch(path, json={"allowance": "2.5", "report_tz": "Asia/Tokyo"}).json()
    credit = {
        "kind": "grant",
        "amount": "3",
        "reference": name,
        "reason": "welcome",
        "expires_at": "2099-01-01T00:00:00Z",
    }
    booked = [boss.post(f"{path}/credit", json=credit) for _ in range(2)]
    key = boss.post(f"{path}/keys", json={"name": "ci", "spend_limit": "0.5"}).json()

    assert (made.status_code, again.status_code) == (201, 409)
    assert (changed["allowance"], changed["report_tz"]) == ("2.5", "Asia/Tokyo")
    assert [answer.status_code for answer in booked] == [201, 200]
    assert boss.post(f"{path}/credit", json=credit | {"amount": "4"}).status_code == 409
    with httpx.Client(
        base_url=stack.url, headers={"Authorization": f"Bearer {key['secret']}"}, timeout=30
    ) as own:
        assert own.get("/v1/balance").json()["lots"][0]["expires_at"] == (
            "2099-01-01T00:00:00.000000Z"
        )
        assert own.post("/v1/chat/completions", json=chat("echo", "hello")).is_success
        assert boss.delete(f"/v1/admin/keys/{key['prefix']}").is_success
        assert own.get("/v1/balance").status_code == 401
    assert boss.patch(path, json={"report_tz": "Moon"}).status_code == 400
    assert boss.patch(path, json={"credit_limit": "-1"}).status_code == 400
    assert stack.findings() == []


def test_refund_is_booked_once_per_reference(stack: Stack) -> None:
    caller, boss = stack.caller(), admin(stack)
    receipt = spend(caller, "two words")
    path = f"/v1/admin/requests/{receipt['request_id']}/refund"

    body = {"amount": "0.00000001", "reason": "slow", "reference": "a"}
    answers = [boss.post(path, json=body) for _ in range(2)]
    rest = boss.post(path, json={"reason": "all of it"})

    assert [answer.status_code for answer in answers] == [201, 200]
    assert parse_usd(rest.json()["amount"]) == parse_usd(receipt["cost"]) - 10
    more = boss.post(path, json={"reason": "more"})
    assert (more.status_code, more.json()["error"]["code"]) == (400, "not_refundable")
    assert caller.http.post(path, json={"reason": "mine"}).status_code == 403
    assert caller.http.get("/v1/balance").json()["posted"] == "1"
    assert stack.findings() == []


def test_chargeback_of_spent_credit_suspends_the_account(stack: Stack) -> None:
    caller, boss = stack.caller(credit="0.0001"), admin(stack)
    spend(caller, "a few words more")

    boss.post(
        f"/v1/admin/accounts/{caller.account_id}/chargebacks",
        json={"amount": "0.0001", "reference": f"cb{caller.account_id}", "reason": "stolen"},
    )

    balance = caller.http.get("/v1/balance").json()
    assert (balance["posted"], balance["status"]) == ("0", "suspended")
    assert float(balance["owed"]) > 0
    refused = caller.http.post("/v1/chat/completions", json=chat("echo", "more"))
    assert refused.json()["error"]["code"] == "account_suspended"
    assert stack.findings() == []


def test_correction_books_nothing_in_a_dry_run(stack: Stack) -> None:
    caller, boss = stack.caller(), admin(stack)
    receipt = spend(caller, "some words that cost")
    body = {
        "model": "echo",
        "account": str(caller.account_id),
        "from": "2026-01-01T00:00:00Z",
        "to": "2099-01-01T00:00:00Z",
        "price": [
            {"unit": "input_token", "amount": "0.01", "per": 1000000},
            {"unit": "output_token", "amount": "0.04", "per": 1000000},
        ],
        "reference": f"half {caller.account_id}",
        "reason": "the price was twice what it should have been",
    }

    planned = boss.post("/v1/admin/corrections", json=body).json()
    posted = boss.post("/v1/admin/corrections", json=body | {"dry_run": False}).json()
    again = boss.post("/v1/admin/corrections", json=body | {"dry_run": False}).json()

    assert (planned["requests"], planned["booked"]) == (1, "0")
    assert parse_usd(posted["booked"]) == parse_usd(receipt["cost"]) // 2
    assert posted["booked"] == planned["total"]
    assert (again["requests"], again["booked"]) == (0, "0")
    path = f"/v1/requests/{receipt['request_id']}/receipt"
    assert caller.http.get(path).json()["refunds"][0]["kind"] == "correction"
    dearer = [{"unit": "request", "amount": "5"}]
    assert boss.post("/v1/admin/corrections", json=body | {"price": dearer}).json()["requests"] == 0
    assert stack.findings() == []


def test_scheduled_price_can_be_cancelled(stack: Stack) -> None:
    boss, owner = admin(stack), str(stack.caller().account_id)
    scheduled = {"model": "echo", "account": owner, "from": "2099-01-01T00:00:00Z", "reason": "x"}
    priced = scheduled | {"price": [{"unit": "request", "amount": "0.5"}]}
    assert boss.post("/v1/admin/prices", json=priced).status_code == 201

    cancelled = boss.post("/v1/admin/prices/cancel", json=scheduled | {"reason": "wrong amount"})
    again = boss.post("/v1/admin/prices/cancel", json=scheduled)
    wrong = boss.post("/v1/admin/prices/cancel", json=scheduled | {"from": "soon"})
    listed = boss.get("/v1/admin/prices", params={"account": owner}).json()["data"]

    assert cancelled.status_code == 200, cancelled.text
    assert cancelled.json()["cancelled"]["reason"] == "wrong amount"
    assert listed == [cancelled.json()]
    assert (again.status_code, wrong.status_code) == (404, 400)
    assert wrong.json()["error"]["param"] == "from"


def test_administrators_read_a_receipt_without_naming_its_account(stack: Stack) -> None:
    caller, boss, other = stack.caller(), admin(stack), stack.caller()
    path = f"/v1/requests/{spend(caller, 'told')['request_id']}/receipt"

    found = boss.get(path)

    assert found.json()["cost"] == caller.http.get(path).json()["cost"]
    assert boss.get(path, params={"account": str(caller.account_id)}).json() == found.json()
    elsewhere = boss.get(path, params={"account": str(other.account_id)})
    assert (elsewhere.status_code, other.http.get(path).status_code) == (404, 404)
