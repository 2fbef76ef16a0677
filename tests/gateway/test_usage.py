"""Usage, ledger and statements over HTTP, for an account and for administrators."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

from sqlalchemy import select

from gateway.ledger.refunds import refund
from gateway.pricing import device_cost, parse_usd
from gateway.sql.database import Database
from gateway.tables.core import accounts
from tests.stack import Caller, Stack, chat, ended, order, wait_for


def spend(caller: Caller, *words: str) -> None:
    for word in words:
        assert caller.http.post(
            "/v1/chat/completions", json=chat("echo", word, metadata={"project": word})
        ).is_success


def admin(stack: Stack) -> Caller:
    return stack.caller(credit="0", scopes=("read", "admin"))


def test_usage_ledger_and_requests_agree_to_the_nano_dollar(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "one", "two words", "one")

    usage = caller.http.get("/v1/usage", params={"group_by": "tag:project"}).json()
    ledger = caller.http.get("/v1/ledger", params={"kind": "charge"}).json()["data"]
    summary = caller.http.get("/v1/requests/summary").json()
    balance = caller.http.get("/v1/balance").json()

    assert [(row["tag:project"], row["requests"]) for row in usage["data"]] == [
        ("one", 2),
        ("two words", 1),
    ]
    assert sum(entry["requests"] for entry in ledger) == summary["succeeded"] == 3
    assert usage["total"]["cost"] == summary["cost"]
    nanos = round(float(summary["cost"]) * 1e9)
    assert sum(round(float(entry["amount"]) * 1e9) for entry in ledger) == -nanos
    assert round(float(balance["posted"]) * 1e9) == 10**9 - nanos
    assert balance["lots"][0]["remaining"] == balance["posted"]


def test_a_charge_lists_its_requests(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "one")
    (entry, topup) = caller.http.get("/v1/ledger").json()["data"]

    found = caller.http.get(f"/v1/ledger/{entry['id']}").json()

    assert topup["kind"] == "topup"
    assert [each["model"] for each in found["receipts"]] == ["echo"]
    assert found["receipts"][0]["cost"] == entry["amount"].removeprefix("-")
    other = stack.caller(credit="0")
    assert other.http.get(f"/v1/ledger/{entry['id']}").status_code == 404


def test_pages_while_requests_are_settled_neither_skip_nor_repeat(stack: Stack) -> None:
    caller = stack.caller()
    ids = [order(caller, "slow", "a few words") for _ in range(12)]
    seen: list[str] = []

    def read() -> None:
        cursor = None
        while True:
            page = caller.http.get(
                "/v1/requests", params={"limit": 2} | ({"cursor": cursor} if cursor else {})
            ).json()
            seen.extend(item["id"] for item in page["data"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    reader = threading.Thread(target=read)
    reader.start()
    for request_id in ids:
        ended(caller, request_id)
    reader.join()

    assert seen == sorted(ids, reverse=True)
    oldest = caller.http.get("/v1/requests", params={"order": "asc", "limit": 1000}).json()
    assert [item["id"] for item in oldest["data"]] == sorted(ids)


def test_lists_are_filtered(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "one", "two")

    def count(**filters: str) -> int:
        return len(caller.http.get("/v1/requests", params=filters).json()["data"])

    assert count(**{"tag:project": "one"}) == 1
    assert count(model="slow") == 0
    assert count(outcome="charged", task="text-generation", status="succeeded") == 2
    assert count(**{"from": "2020-01-01T00:00:00Z", "to": "2020-01-02T00:00:00Z"}) == 0
    assert count(key=caller.secret[:10]) == 2
    assert caller.http.get("/v1/requests", params={"key": "tg_nobody"}).status_code == 400
    assert caller.http.get("/v1/requests", params={"limit": 0}).status_code == 400


def test_administrator_sees_every_account_but_no_outputs(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "a secret")
    boss = admin(stack)

    usage = boss.http.get("/v1/admin/usage").json()["data"]
    listed = boss.http.get("/v1/admin/requests", params={"limit": 1}).json()["data"]
    own = boss.http.get("/v1/usage", params={"account": str(caller.account_id)}).json()

    assert any(row["requests"] == 1 for row in usage)
    assert listed[0]["account_id"] == caller.account_id
    assert "secret" not in str(listed[0]["output"])
    assert own["total"]["requests"] == 1
    assert caller.http.get("/v1/admin/usage").status_code == 403
    assert caller.http.get("/v1/usage", params={"account": "1"}).status_code == 404


def test_requests_of_all_accounts_are_filtered(stack: Stack) -> None:
    caller, other = stack.caller(), stack.caller()
    spend(caller, "one", "two")
    spend(other, "one")
    boss = admin(stack)

    def ids(**filters: str) -> set[str]:
        listed = boss.http.get("/v1/admin/requests", params={"limit": "1000", **filters})
        assert listed.status_code == 200, listed.text
        return {item["id"] for item in listed.json()["data"]}

    mine, account = ids(key=caller.secret[:10]), str(caller.account_id)
    cost = caller.http.get("/v1/requests").json()["data"][0]["cost"]

    assert len(mine) == 2
    assert ids(account=account) == mine
    assert ids(account=account, key=caller.secret[:10]) == mine
    assert len(ids(account=account, **{"tag:project": "one"})) == 1
    assert len(mine & ids(**{"tag:project": "one"})) == 1
    assert ids(account=account, cost_min=cost, cost_max=cost, took_min="0") == mine
    assert not ids(account=account, cost_min="1")
    assert not ids(account=account, cost_max="0")
    assert not ids(account=account, took_min="1000")
    assert not ids(account=account, **{"from": "2020-01-01", "to": "2020-01-02"})
    for wrong in ({"key": "tg_nobody"}, {"account": "nobody"}, {"cost_min": "much"}):
        assert boss.http.get("/v1/admin/requests", params=wrong).status_code in (400, 404)
    assert caller.http.get("/v1/requests", params={"cost_max": "much"}).status_code == 400
    assert len(caller.http.get("/v1/requests", params={"cost_min": cost}).json()["data"]) == 2


def test_receipt_has_refunds_and_for_administrators_the_margin(
    stack: Stack,
) -> None:
    caller = stack.caller()
    spend(caller, "one")
    (request,) = caller.http.get("/v1/requests").json()["data"]
    path = f"/v1/requests/{request['id']}/receipt"
    database = Database(stack.database_url)
    with database.transaction() as connection:
        refund(connection, request["id"], 10, key=request["id"], actor="test", reason="slow")
    database.dispose()

    own = caller.http.get(path).json()
    full = admin(stack).http.get(path, params={"account": str(caller.account_id)}).json()

    assert own["refunds"][0]["amount"] == "0.00000001"
    assert own["refunds"][0]["reason"] == "slow"
    assert parse_usd(own["net_cost"]) == parse_usd(own["cost"]) - 10
    assert "operator" not in own
    operator = full["operator"]
    assert operator["worker"]
    assert (operator["attempt"], operator["device"], operator["rows"]) == (1, "cpu", 1)
    assert (operator["device_cost"], operator["upstream_cost"]) == (operator["cost"], None)
    assert parse_usd(operator["cost"]) == device_cost(full["usage"]["gpu_us"], 3_600_000_000)
    assert parse_usd(operator["margin"]) == parse_usd(own["net_cost"]) - parse_usd(operator["cost"])
    assert caller.http.get(path, params={"account": "1"}).status_code == 404


def test_margins_are_summed_by_model_and_device(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "one", "two words")
    boss = admin(stack)

    for by in ("account,model", "account,model,device"):
        report = boss.http.get("/v1/admin/margins", params={"group_by": by}).json()
        (own,) = [one for one in report["data"] if one["account"] == account_name(stack, caller)]
        assert own["requests"] == own["costed_requests"] == 2
        margin = parse_usd(own["revenue"]) - parse_usd(own["cost"])
        assert parse_usd(own["margin"]) == margin
        assert own.get("device", "cpu") == "cpu"
    assert caller.http.get("/v1/admin/margins").status_code == 403
    assert "expense" not in caller.http.get("/v1/usage").text


def account_name(stack: Stack, caller: Caller) -> str:
    database = Database(stack.database_url)
    with database.transaction() as connection:
        query = select(accounts.c.name).where(accounts.c.id == caller.account_id)
        name: str = connection.execute(query).scalar_one()
    database.dispose()
    return name


def test_the_books_are_reconciled_on_demand_and_the_result_is_a_metric(stack: Stack) -> None:
    boss = admin(stack)
    wait_for(lambda: boss.http.get("/v1/admin/reconcile").is_success, "the first reconciliation")

    found = boss.http.post("/v1/admin/reconcile").json()

    assert (found["agrees"], found["findings"]) == (True, [])
    assert "tollgate_reconcile_findings 0.0" in boss.http.get("/metrics").text


def test_an_export_can_be_checked_by_its_footer(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "one", "two words")
    params = {"from": "2026-01-01T00:00:00Z", "tz": "Asia/Kolkata", "to": now_text()}
    # A file ends ten seconds ago, and so does not have what has just been booked.
    early = caller.http.get("/v1/usage/export", params=params)
    assert len(early.text.splitlines()) == 1

    exported = caller.http.get("/v1/usage/export", params=params)
    footer = caller.http.get("/v1/usage/export/footer", params=params).json()

    assert exported.headers["content-disposition"].startswith("attachment; filename=")
    assert footer["rows"] == len(exported.text.splitlines()) - 1
    assert caller.http.get("/v1/usage/export", params={"format": "xls"}).status_code == 400
    assert caller.http.get("/v1/usage/export", params={"from": "2099-01-01"}).status_code == 400
    boss = admin(stack)
    params |= {"account": str(caller.account_id), "margins": "true"}
    of_operator = boss.http.get("/v1/usage/export", params=params)
    assert of_operator.text.splitlines()[0].endswith(',"margin_usd","margin_nanos"')
    assert "-margins.csv" in of_operator.headers["content-disposition"]
    refused = caller.http.get("/v1/usage/export", params={"margins": "true"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope")


def test_aborted_export_frees_its_slot(stack: Stack) -> None:
    caller = stack.caller()
    spend(caller, "one")
    for _ in range(8):
        with caller.http.stream("GET", "/v1/usage/export"):
            pass

    wait_for(
        lambda: all(caller.http.get("/v1/usage/export").is_success for _ in range(4)),
        "the places of those that were left",
    )


def now_text() -> str:
    return datetime.now(UTC).isoformat()


def test_a_statement_is_json_a_page_and_a_pdf(stack: Stack) -> None:
    caller, boss = stack.caller(), admin(stack)
    spend(caller, "one")
    (listed,) = caller.http.get("/v1/statements").json()["data"]
    path = f"/v1/statements/{listed['month']}"

    made = caller.http.get(path).json()
    page = caller.http.get(f"{path}.html")
    printed = caller.http.get(f"{path}.pdf")

    assert (made["draft"], made["payments"][0]["amount"]) == (True, "1")
    assert {line["unit"] for line in made["lines"]} == {"input_token", "output_token"}
    cost = parse_usd(made["sum"])
    assert parse_usd(made["closing_balance"]) == 10**9 - cost
    assert page.headers["content-type"].startswith("text/html")
    assert made["sum"] in page.text
    assert printed.content.startswith(b"%PDF")
    assert caller.http.get("/v1/statements/2026-13").status_code == 400
    assert caller.http.get(path, params={"account": "1"}).status_code == 404
    refused = boss.http.post(f"/v1/admin/periods/{listed['month']}/close")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cannot_close")
    periods = boss.http.get("/v1/admin/periods").json()["data"]
    assert (periods[-1]["month"], periods[-1]["state"]) == (listed["month"], "open")
