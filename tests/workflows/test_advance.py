"""The next steps of a run, for any shape, any order of ends and any failures. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger.closed import Output, RequestError
from gateway.ledger.workflow_plan import PlannedStep, StepId, WorkflowPlan, combined, read_step_id
from gateway.workflows.advance import Ready, WorkflowEnded, advance
from gateway.workflows.store import StepAttempt
from workers.contract.jobs import RequestId, Usage

REQUEST = RequestId(f"req_{'0' * 32}")
NOW = datetime(2026, 3, 1, tzinfo=UTC)


@st.composite
def plans(draw: st.DrawFn) -> WorkflowPlan:
    """Steps of which each needs some of those before it, and the last one needs all."""
    count = draw(st.integers(1, 6))
    steps = []
    for place in range(count):
        earlier = [f"s{number}" for number in range(place)]
        last = place == count - 1
        needs = earlier if last else draw(st.lists(st.sampled_from(earlier or ["s0"]), unique=True))
        steps.append(
            PlannedStep(
                name=f"s{place}",
                model="m",
                task="text-to-image",
                price_id=1,
                limits=Usage(),
                input={},
                needs=tuple(needs) if place else (),
                retries=draw(st.integers(0, 2)),
            )
        )
    return WorkflowPlan(tuple(steps), f"s{count - 1}")


@given(plans(), st.data())
def test_steps_run_after_their_dependencies_and_within_their_retries(
    plan: WorkflowPlan, data: st.DataObject
) -> None:
    attempts: list[StepAttempt] = []
    while True:
        found = advance(plan, attempts, now=NOW)
        assert advance(plan, attempts, now=NOW) == found
        if isinstance(found, WorkflowEnded):
            break
        done = {each.id.name for each in attempts if each.status == "succeeded"}
        for step, number in found.steps:
            assert done.issuperset(step.needs)
            assert number <= step.retries + 1
            id = StepId(REQUEST, step.name, number)
            assert id not in {each.id for each in attempts}
            attempts.append(StepAttempt(id, "m", b"", None, None, None))
        running = [place for place, each in enumerate(attempts) if each.status is None]
        place = data.draw(st.sampled_from(running))
        code = data.draw(st.sampled_from(["", "", "upstream_error", "invalid_input"]))
        problem = RequestError(code, "It broke.") if code else None
        attempts[place] = StepAttempt(
            attempts[place].id,
            "m",
            b"",
            "failed" if code else "succeeded",
            problem,
            None if code else Output(),
        )

    names = {step.name for step in plan.steps}
    done = {each.id.name for each in attempts if each.status == "succeeded"}
    assert found.status == ("succeeded" if done == names else "failed")
    if found.status == "failed":
        assert found.error is not None
    for step in plan.steps:
        ends = [each for each in attempts if each.id.name == step.name]
        assert sum(each.status == "succeeded" for each in ends) <= 1


@pytest.mark.parametrize(("attempt", "wait_s"), [(1, 2), (2, 4), (3, 8), (6, 60), (40, 60)])
def test_backoff_doubles_up_to_one_minute(attempt: int, wait_s: float) -> None:
    step = PlannedStep("s", "m", "text-to-image", 1, Usage(), {}, retries=50, backoff_ms=2000)
    plan, id = WorkflowPlan((step,), "s"), StepId(REQUEST, "s", attempt)
    failed = StepAttempt(
        id, "m", b"", "failed", RequestError("upstream_error", "No."), None, ended_at=NOW
    )

    early = advance(plan, [failed], now=NOW + timedelta(seconds=wait_s - 0.1))
    late = advance(plan, [failed], now=NOW + timedelta(seconds=wait_s))

    assert early == Ready((), due=NOW + timedelta(seconds=wait_s))
    assert late == Ready(((step, attempt + 1),))


def test_only_step_ids_are_parsed_as_steps() -> None:
    id = StepId(REQUEST, "draw_2", 3)

    assert read_step_id(str(id)) == id
    assert read_step_id(REQUEST) is None
    assert read_step_id(f"{REQUEST}.draw") is None


def test_run_sums_usage_of_all_steps_and_delivers_that_of_the_last() -> None:
    parts = [Usage(requests=1, output_tokens=5), Usage(requests=1, images=2, steps=4)]

    whole = combined(parts, parts[1])

    assert whole == Usage(requests=1, output_tokens=5, images=2, steps=4)
