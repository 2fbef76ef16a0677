"""Plans over HTTP, with what was measured on this installation."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.accounts.roles import ROLES
from gateway.plan.measured import REQUESTS_MIN
from tests.cli.here import run_here
from tests.stack import Caller, Stack, chat, wait_for


def ask(boss: Caller, **params: Any) -> Any:
    answer = boss.http.get("/v1/admin/plan", params=params)
    assert answer.is_success, answer.text
    return answer.json()


def test_a_plan_has_a_row_for_each_gpu(stack: Stack) -> None:
    boss = stack.caller(credit="0", scopes=("admin",), role="auditor")

    some = ask(boss, model="sdxl", gpu="h200,L40S", memory=96, bandwidth=1800, tflops=400, steps=20)
    every = ask(boss, model="llama-2-70b", dtype="fp8", per_second=2)

    assert some["object"] == "plan"
    assert [row["name"] for row in some["devices"]] == ["H200 SXM", "L40S", "own GPU"]
    assert some["request"]["steps"] == 20
    assert some["measured"] == []
    assert {row["name"] for row in every["devices"]} >= {"H100 SXM", "B200", "RTX 4090"}
    assert all(row["result"]["devices"] >= 1 for row in every["devices"])


def test_measured_figures_are_beside_the_computed_ones(text_stack: Stack) -> None:
    caller = text_stack.caller()
    boss = text_stack.caller(credit="0", scopes=("admin",))
    for number in range(REQUESTS_MIN):
        sent = caller.http.post(
            "/v1/chat/completions", json=chat("tiny", f"count to {number}", max_tokens=4)
        )
        assert sent.is_success, sent.text

    def measured() -> bool:
        return bool(ask(boss, model="TINY", gpu="l4")["measured"])

    wait_for(measured, "receipts")
    made = ask(boss, model="TINY", gpu="l4", per_second=1)

    (row,) = made["measured"]
    assert (row["basis"], row["device"], row["dtype"]) == ("measured", "cpu", "float32")
    assert row["requests"] >= REQUESTS_MIN
    assert row["device_seconds"] * row["results_per_second"] == pytest.approx(1)
    assert float(row["price_usd"]) > 0
    assert row["devices"] >= 1
    assert made["devices"][0]["result"]["basis"] == "computed"
    printed = run_here(
        ("plan", "tiny", "--gpu", "l4", "--price", "1"),
        {"DATABASE_URL": text_stack.database_url, "TOLLGATE_CATALOG": str(text_stack.catalog)},
    )
    assert f"cpu, float32, {row['requests']} requests  measured" in printed.stdout, printed.output


@pytest.mark.parametrize(
    ("params", "status", "code", "said"),
    [
        ({"model": "nobody-knows-it"}, 404, "not_found", "known models are llama-2-7b"),
        ({"model": "/etc"}, 404, "not_found", "is not in the catalog"),
        ({"model": "sdxl", "gpu": "b300"}, 400, "invalid_value", "known are H100 SXM"),
        ({"model": "sdxl", "memory": 80}, 400, "invalid_value", "bandwidth, tflops is required"),
        ({"model": "sdxl", "steps": 0}, 400, "invalid_value", "steps is 0"),
        ({"model": "sdxl", "per_second": "nan"}, 400, "invalid_value", "per_second is nan"),
        ({"model": "sdxl", "guidance": "inf"}, 400, "invalid_value", "guidance is inf"),
        ({"model": "llama-2-7b", "dtype": "int3"}, 400, "invalid_value", "known are float32"),
        ({"model": "sdxl", "gpus": "h200"}, 400, "unknown_parameter", "'gpus'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    stack: Stack, params: dict[str, Any], status: int, code: str, said: str
) -> None:
    boss = stack.caller(credit="0", scopes=("admin",))

    answer = boss.http.get("/v1/admin/plan", params=params)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code
    assert said.lower() in answer.json()["error"]["message"].lower()


def test_every_administrator_reads_plans_and_no_customer(stack: Stack) -> None:
    for role in ROLES:
        ask(stack.caller(credit="0", scopes=("admin",), role=role), model="sdxl", gpu="l4")
    customer = stack.caller().http.get("/v1/admin/plan", params={"model": "sdxl"})
    assert customer.status_code == 403
