"""Subscriptions to notices, and what was sent, over HTTP and on the command line."""

from __future__ import annotations

import uuid

from tests.stack import Stack, wait_for

SUBSCRIPTIONS = "/v1/admin/notices/subscriptions"


def test_test_notice_is_sent_and_listed_for_its_account_only(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",)).http
    caller, other = stack.caller(credit="0"), stack.caller(credit="0")
    body = {
        "account": str(caller.account_id),
        "url": "http://127.0.0.1:9/hook?token=1",
        "kinds": ["budget.passed"],
    }

    made = admin.post(SUBSCRIPTIONS, json=body).json()
    again = admin.post(SUBSCRIPTIONS, json=body)
    told = admin.post(f"{SUBSCRIPTIONS}/{made['id']}/test").json()

    assert (made["account_id"], made["secret"]) == (caller.account_id, None)
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "subscription_exists"

    def attempts() -> list[dict[str, object]]:
        (found,) = caller.http.get("/v1/notices").json()["data"]
        assert found["id"] == told["id"]
        return list(found["deliveries"][0]["attempts"])

    wait_for(lambda: len(attempts()) > 0, "the first attempt")
    assert attempts()[0]["error"] == "connect"
    assert other.http.get("/v1/notices").json()["data"] == []
    account = {"account": str(caller.account_id)}
    assert other.http.get("/v1/notices", params=account).status_code == 404
    listed = admin.get("/v1/admin/notices", params={**account, "kind": "test"}).json()
    assert [one["id"] for one in listed["data"]] == [told["id"]]
    assert admin.delete(f"{SUBSCRIPTIONS}/{made['id']}").json()["id"] == made["id"]
    assert admin.get(SUBSCRIPTIONS, params=account).json()["data"] == []
    audit = admin.get("/v1/admin/audit", params={"subject": f"subscription {made['id']}"})
    acts = [event["act"] for event in audit.json()["data"]]
    # SQLite gives the number of a removed subscription to the next one.
    assert acts[:3] == ["notice.unsubscribe", "notice.test", "notice.subscribe"]
    assert "token" not in audit.text, "a URL can contain a secret"


def test_operator_gets_the_secret_of_its_webhook(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",)).http

    made = admin.post(SUBSCRIPTIONS, json={"url": f"http://127.0.0.1:9/{uuid.uuid4().hex}"}).json()
    removed = admin.delete(f"{SUBSCRIPTIONS}/{made['id']}")

    assert made["account_id"] is None
    assert made["secret"].startswith("whsec_")
    assert "secret" not in removed.json()


def test_invalid_subscriptions_are_refused(stack: Stack) -> None:
    admin = stack.caller(credit="0", scopes=("admin",)).http
    account = str(stack.caller(credit="0").account_id)

    for body, code in (
        ({"account": account}, "invalid_value"),
        ({"url": "http://127.0.0.1:9/", "email": "a@example.com"}, "invalid_value"),
        ({"account": account, "email": "a@example.com"}, "mail_not_configured"),
        ({"account": account, "url": "ftp://example.com"}, "invalid_value"),
        (
            {"account": account, "url": "http://a.example", "kinds": ["reconciliation.failed"]},
            "invalid_value",
        ),
        ({"url": "http://a.example", "kinds": ["key.expired"]}, "invalid_value"),
        ({"url": "http://a.example", "kinds": ["nonsense"]}, "invalid_value"),
        ({"account": "nobody-here", "url": "http://a.example"}, "account_not_found"),
    ):
        answer = admin.post(SUBSCRIPTIONS, json=body)
        assert answer.json()["error"]["code"] == code, answer.text
    for path in (f"{SUBSCRIPTIONS}?cursor=x", "/v1/admin/notices?cursor=x"):
        assert admin.get(path).status_code == 400
    assert admin.post(f"{SUBSCRIPTIONS}/999999/test").status_code == 404
