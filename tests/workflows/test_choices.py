"""A step chooses among the answers of several candidates, each of which is on the receipt."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from gateway.ledger.closed import Output, RequestError
from gateway.ledger.workflow_plan import Choice, PlannedStep, StepId, WorkflowPlan
from gateway.workflows.advance import Ready, WorkflowEnded, advance
from gateway.workflows.choices import choose, normalized
from gateway.workflows.store import StepAttempt
from tests.stack import Stack
from tests.workflows.test_workflows import finished, receipt
from workers.contract.jobs import RequestId, Usage

NAMES = ("a", "b", "c")
REQUEST = RequestId(f"req_{'0' * 32}")


def said(**texts: str) -> dict[str, Output | None]:
    return {name: Output({"choices": [{"text": text}]}) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("texts", "lost", "chosen"),
    [
        ({"a": "Yes.", "b": "no", "c": " yes"}, (), "a"),
        ({"a": "Yes.", "b": "no", "c": "**No**"}, (), "b"),
        ({"a": "x", "b": "y", "c": "z"}, (), "a"),
        ({"b": "y", "c": "y"}, ("a",), "b"),
        ({"c": "z"}, ("a", "b"), "c"),
        ({"a": "x", "b": "x"}, (), None),
        ({}, NAMES, None),
    ],
)
def test_majority_of_the_answers_that_are_left_is_chosen_once_all_have_ended(
    texts: dict[str, str], lost: tuple[str, ...], chosen: str | None
) -> None:
    assert choose(Choice("s", NAMES), said(**texts), lost) == chosen


@pytest.mark.parametrize(
    ("verdict", "lost", "chosen"),
    [
        ("2", (), "b"),
        ("Candidate 3 is better than 1.", (), "c"),
        ("10 of 10: 2", (), "b"),
        ("2, or else 3", ("b",), "c"),
        ("None of them.", ("a",), "b"),
    ],
)
def test_verdict_names_a_candidate_that_is_left(
    verdict: str, lost: tuple[str, ...], chosen: str
) -> None:
    texts = {name: name for name in NAMES if name not in lost}

    assert choose(Choice("s", NAMES, "judge"), said(**texts, judge=verdict), lost) == chosen


def test_answers_that_differ_in_form_only_are_the_same() -> None:
    same = ("Paris", "  paris.", "**PARIS**", "\uff30aris", "Paris\n")

    assert {normalized(answer) for answer in same} == {"paris"}
    assert normalized("3.5") != normalized("35")


def test_judge_waits_for_all_candidates_and_is_left_out_if_only_one_is_left() -> None:
    steps = [
        PlannedStep(name, "m", "text-generation", 1, Usage(), {}, needs=needs)
        for name, needs in (("s_1", ()), ("s_2", ()), ("s_judge", ("s_1", "s_2")), ("t", ("s",)))
    ]
    plan = WorkflowPlan(tuple(steps), "t", choices=(Choice("s", ("s_1", "s_2"), "s_judge"),))

    def next_of(**ends: str | None) -> Any:
        attempts = [
            StepAttempt(
                StepId(REQUEST, name, 1),
                "m",
                b"",
                "succeeded" if text else "failed",
                None if text else RequestError("invalid_input", "No."),
                Output({"choices": [{"text": text}]}) if text else None,
            )
            for name, text in ends.items()
        ]
        found = advance(plan, attempts, now=datetime(2026, 3, 1, tzinfo=UTC))
        return [step.name for step, _ in found.steps] if isinstance(found, Ready) else found

    assert next_of() == ["s_1", "s_2"]
    assert next_of(s_1="x") == ["s_2"]
    assert next_of(s_1="x", s_2="y") == ["s_judge"]
    assert next_of(s_1="x", s_2="y", s_judge="2") == ["t"]
    assert next_of(s_1=None) == ["s_2"]
    assert next_of(s_1=None, s_2="y") == ["t"]
    assert next_of(s_1=None, s_2="y", t="z").chosen == ("s_2",)
    for ended in (next_of(s_1=None, s_2=None), next_of(s_1="x", s_2="y", s_judge=None)):
        assert isinstance(ended, WorkflowEnded)
        assert ended.status == "failed"


def test_judge_chooses_and_each_candidate_is_on_the_receipt(stack: Stack) -> None:
    caller = stack.caller()

    found = finished(caller, "best-answer", prompt="May I?")

    assert found["status"] == "succeeded", found
    assert found["output"]["choices"][0]["text"] == "no"
    assert found["usage"]["attributes"]["chosen"] == "answer_2"
    shown = receipt(caller, found["id"])
    assert [(step["name"], step["model"]) for step in shown["steps"]] == [
        ("answer_1", "say-yes"),
        ("answer_2", "say-no"),
        ("answer_judge", "say-2"),
    ]
    costs = [Decimal(step["cost"]) for step in shown["steps"]]
    assert all(costs)
    assert sum(costs) == Decimal(found["cost"])
    assert stack.held(caller) == 0
    assert stack.findings() == []


def test_majority_flows_to_the_next_step(stack: Stack) -> None:
    caller = stack.caller()
    quoted = caller.http.post(
        "/v1/quote", json={"model": "voted-answer", "input": {"prompt": "May I?"}}
    ).json()

    found = finished(caller, "voted-answer", prompt="May I?")

    assert found["output"]["choices"][0]["text"] == "They said: no"
    assert [step["name"] for step in quoted["steps"]] == [
        *("opinion_1", "opinion_2", "opinion_3"),
        "tell",
    ]
    assert sum(Decimal(step["max_cost"]) for step in quoted["steps"]) == Decimal(quoted["max_cost"])


def test_failed_candidate_is_free_and_fails_the_run_only_if_none_is_left(stack: Stack) -> None:
    caller = stack.caller()

    found = finished(caller, "hardy-answer", prompt="May I?")
    failed = finished(caller, "hardy-answer", prompt="!fail")

    assert found["output"]["choices"][0]["text"] == "yes"
    shown = receipt(caller, found["id"])
    assert [step["status"] for step in shown["steps"]] == ["failed", "succeeded", "not_run"]
    assert [step["cost"] == "0" for step in shown["steps"]] == [True, False, True]
    assert (failed["status"], failed["cost"]) == ("failed", "0")
    assert "The step answer_" in failed["error"]["message"]
    assert stack.findings() == []
