from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import Clock
from workers.runtime.step_times import Stopwatch, TokenTimes, apportion

weights = st.lists(st.floats(0, 1e12, allow_nan=False), min_size=1, max_size=300)


@given(st.integers(0, 10**15), weights)
def test_shares_sum_to_the_total_and_are_never_negative(total: int, weights: list[float]) -> None:
    shares = apportion(total, weights)

    assert sum(shares) == total
    assert min(shares) >= 0


@given(st.integers(0, 10**9), st.lists(st.integers(1, 1000), min_size=1, max_size=100))
def test_no_share_is_a_whole_unit_off_its_exact_part(total: int, weights: list[int]) -> None:
    shares = apportion(total, [float(weight) for weight in weights])

    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1.000001


@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf"), -1.0])
def test_invalid_weights_count_as_equal(odd: float) -> None:
    assert apportion(10, [odd, odd]) == [5, 5]


def test_time_outside_any_phase_belongs_to_the_rest() -> None:
    clock = Clock()
    watch = Stopwatch(clock.now_us)

    watch.start()
    clock.us += 1
    with watch.phase("transfer"):
        clock.us += 20
    with watch.phase("postprocess"):
        clock.us += 300
    with watch.phase("transfer"):
        clock.us += 4000
    spent = watch.stop(rest="forward")

    assert spent == [0, 4020, 1, 300]


def test_nested_phases_are_refused() -> None:
    watch = Stopwatch(Clock().now_us)
    watch.start()

    with watch.phase("forward"), pytest.raises(RuntimeError, match="nest"):
        watch.phase("transfer").__enter__()


def fail_within(phase: AbstractContextManager[None], clock: Clock) -> None:
    with phase:
        clock.us += 7
        raise KeyError


def test_an_error_inside_a_phase_ends_the_phase() -> None:
    clock = Clock()
    watch = Stopwatch(clock.now_us)
    watch.start()

    with pytest.raises(KeyError):
        fail_within(watch.phase("forward"), clock)
    with watch.phase("transfer"):
        clock.us += 1

    assert watch.stop(rest="preprocess") == [0, 1, 7, 0]


def test_tokens_are_timed_on_the_choice_that_started_first() -> None:
    times = TokenTimes()
    for index, count, now_us in (
        (0, 0, 50),
        (1, 1, 100),
        (0, 1, 105),
        (1, 2, 140),
        (0, 1, 500),
        (1, 1, 160),
    ):
        times.record_tokens(index, count, now_us)

    assert (times.first_us, times.tokens) == (100, 6)
    assert times.per_token_us == 20
    assert times.gap_us == 40


def test_single_token_has_no_interval() -> None:
    times = TokenTimes()
    times.record_tokens(0, 1, 100)

    assert (times.per_token_us, times.gap_us, times.tokens) == (0, 0, 1)


def test_audio_has_times_but_no_tokens() -> None:
    times = TokenTimes()
    assert not times.started

    for now_us in (10, 30, 90):
        times.record_output(0, now_us)

    assert times.started
    assert (times.first_us, times.gap_us, times.tokens, times.per_token_us) == (10, 60, 0, 0)
