"""How many rows a step of independent rows has."""

from __future__ import annotations

import pytest

from workers.engines.row_pacing import RowPacing


@pytest.mark.parametrize("row_s", [0.0001, 0.002, 0.011, 0.4])
def test_steps_have_as_many_rows_as_their_time_allows(row_s: float) -> None:
    pacing = RowPacing(64, step_s=0.03)
    assert pacing.rows == 1

    for _ in range(20):
        pacing.record(pacing.rows, pacing.rows * row_s)

    assert pacing.rows == max(1, min(64, int(0.03 / row_s)))


def test_pace_follows_rows_that_become_more_expensive() -> None:
    pacing = RowPacing(64, step_s=0.03)
    for row_s in [0.001] * 10 + [0.01] * 10:
        pacing.record(pacing.rows, pacing.rows * row_s)

    assert pacing.rows == 3


def test_step_without_rows_tells_nothing() -> None:
    pacing = RowPacing(8)
    pacing.record(1, 0.001)

    pacing.record(0, 5.0)

    assert pacing.rows == 8
