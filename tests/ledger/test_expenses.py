"""What requests cost the operator: computed once, at settlement, and never part of a charge."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gateway.ledger.expenses import (
    NO_RATES,
    NO_RECORD,
    ExpenseRates,
    RunRecord,
    cost_of_steps,
    run_record,
    with_cost,
)
from gateway.pricing import Component, Price
from workers.contract.attempts import RunDetails
from workers.contract.jobs import Usage

HOUR = 3_600_000_000
RATES = ExpenseRates(
    {"film": Price((Component("video_second", 280_000_000),))},
    {"H100": 2 * HOUR, "H100 NVL": 3 * HOUR, "A10": 4 * HOUR, "cpu": HOUR // 10},
    HOUR,
)


def cost(model: str, usage: Usage, **run: Any) -> int | None:
    return with_cost(RunRecord(**run), RATES, model, usage)[1]


@pytest.mark.parametrize(
    ("device", "nanos"),
    [
        ("NVIDIA H100 80GB HBM3", 2_000_000),
        ("NVIDIA H100 NVL", 3_000_000),
        ("cpu", 100_000),
        ("NVIDIA L4", 1_000_000),
        ("NVIDIA A10", 4_000_000),
        ("NVIDIA A100-SXM4-80GB", 1_000_000),
        ("", 1_000_000),
    ],
)
def test_device_time_is_priced_by_its_device(device: str, nanos: int) -> None:
    assert cost("chat", Usage(requests=1, gpu_us=1_000_000), device=device) == nanos


@pytest.mark.parametrize(
    ("model", "usage", "run", "nanos"),
    [
        ("film", Usage(requests=1, video_ms=10_000), {"endpoint": "gmi"}, 2_800_000_000),
        # Nothing was measured that the upstream charges by.
        ("film", Usage(requests=1), {"endpoint": "gmi"}, None),
        # It failed, or never ran.
        ("film", Usage(), {"endpoint": "gmi"}, 0),
        ("film", Usage(), {}, 0),
        # The entry does not state what its upstream charges.
        ("song", Usage(requests=1, audio_ms=1000), {"endpoint": "gmi"}, None),
        ("chat", Usage(), {}, 0),
    ],
)
def test_cost_of_an_upstream_is_known_or_none(
    model: str, usage: Usage, run: dict[str, Any], nanos: int | None
) -> None:
    assert cost(model, usage, **run) == nanos


def test_time_on_a_device_without_a_price_has_no_known_cost() -> None:
    usage = Usage(requests=1, gpu_us=5)

    assert with_cost(NO_RECORD, NO_RATES, "chat", usage)[1] is None


def test_workflow_costs_the_sum_of_its_steps() -> None:
    steps = [
        ("chat", Usage(requests=1, gpu_us=1_000_000)),
        ("film", Usage(requests=1, video_ms=1000)),
    ]

    record, total = cost_of_steps(NO_RECORD, RATES, steps)

    assert (record.device_nanos, record.upstream_nanos) == (1_000_000, 280_000_000)
    assert total == 281_000_000
    assert cost_of_steps(NO_RECORD, RATES, [*steps, ("song", Usage(requests=1))])[1] is None


def test_record_of_an_old_worker_has_its_name_and_attempt_alone() -> None:
    details = RunDetails("NVIDIA L4", "bfloat16", 3, "")

    assert run_record("w1", 2, None) == RunRecord("w1", 2)
    assert run_record("w1", 1, details) == RunRecord("w1", 1, "NVIDIA L4", "bfloat16", 3)


def test_cost_is_computed_in_microseconds_of_an_hour() -> None:
    second = timedelta(seconds=1) // timedelta(microseconds=1)

    assert cost("chat", Usage(requests=1, gpu_us=second), device="cpu") == 100_000
