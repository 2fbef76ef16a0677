"""How much of a prompt a step prefills depends on measured time, and only while others decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.llm.checkpoints import Reference, make_engine
from tests.workers.llm.driver import Driver, job, texts
from tests.workers.llm.test_engine import LONG, QUESTIONS
from workers.contract.jobs import RequestId
from workers.engines.llm.scheduling.blocks import BlockPool
from workers.engines.llm.scheduling.pacing import STEP_US, PrefillPacing
from workers.engines.llm.scheduling.scheduler import STEP_TOKENS, Scheduler

BLOCK = 64


class _Device:
    """A device with constant times, on which steps are as large as the pacing allows."""

    def __init__(self, *, token_us: float, decode_us: float, forward_us: float = 0.0) -> None:
        self.token_us, self.decode_us, self.forward_us = token_us, decode_us, forward_us
        self.pacing = PrefillPacing(block_tokens=BLOCK)

    def step(self) -> float:
        """Prefill beside a decoding request; return the time of the step."""
        tokens = self.pacing.tokens_max
        spent_us = self.decode_us + self.forward_us + tokens * self.token_us
        self.pacing.record(decodes=1, prefill_tokens=tokens, spent_us=spent_us)
        return spent_us

    def decode(self) -> None:
        self.pacing.record(decodes=1, prefill_tokens=0, spent_us=self.decode_us)


def test_first_step_beside_a_decoding_request_prefills_one_block() -> None:
    assert PrefillPacing(block_tokens=BLOCK).tokens_max == BLOCK


@given(
    st.floats(1.0, 2_000.0),
    st.floats(100.0, 200_000.0),
    st.floats(0.0, 5_000.0),
)
def test_steps_stay_short_and_become_as_large_as_that_allows(
    token_us: float, decode_us: float, forward_us: float
) -> None:
    device = _Device(token_us=token_us, decode_us=decode_us, forward_us=forward_us)
    device.decode()

    steps_us = [device.step() for _ in range(50)]

    least_us = decode_us + forward_us + BLOCK * token_us
    most_us = max(STEP_US, 1.5 * decode_us, least_us)
    assert max(steps_us) <= most_us * 1.001
    # Whole blocks, and an average that still contains the smaller steps of the beginning.
    assert steps_us[-1] >= min(most_us, 0.7 * most_us - BLOCK * token_us - forward_us)


def test_pace_follows_a_prompt_whose_tokens_become_more_expensive() -> None:
    device = _Device(token_us=20.0, decode_us=5_000.0)
    device.decode()
    for _ in range(20):
        device.step()
    fast = device.pacing.tokens_max

    for _ in range(60):
        device.token_us *= 1.02
        assert device.step() < 1.15 * STEP_US

    assert device.pacing.tokens_max < fast / 2


def test_one_step_in_which_the_machine_was_busy_is_soon_forgotten() -> None:
    device = _Device(token_us=20.0, decode_us=5_000.0)
    device.decode()
    for _ in range(20):
        device.step()
    usual = device.pacing.tokens_max

    device.pacing.record(decodes=1, prefill_tokens=usual, spent_us=30e6)
    assert device.pacing.tokens_max >= usual // 2
    for _ in range(12):
        device.step()

    assert device.pacing.tokens_max >= usual - BLOCK


def test_steps_without_prompts_tell_nothing_of_their_cost() -> None:
    pacing = PrefillPacing(block_tokens=BLOCK)
    pacing.record(decodes=0, prefill_tokens=2048, spent_us=20_480.0)
    before = pacing.tokens_max

    pacing.record(decodes=0, prefill_tokens=0, spent_us=1e9)

    assert pacing.tokens_max == before == STEP_US // 10 // BLOCK * BLOCK


@pytest.mark.parametrize("decoding", [False, True])
def test_scheduler_bounds_prompts_only_beside_decoding_sequences(decoding: bool) -> None:
    scheduler = Scheduler(BlockPool(100), slots=4, block_tokens=BLOCK)
    if decoding:
        first = scheduler.add(RequestId("a"), prompt_tokens=10, choices=1)
        scheduler.advance(scheduler.plan(BLOCK))
        scheduler.append(first.sequences[0], 1)
    scheduler.add(RequestId("b"), prompt_tokens=4000, choices=1)

    plan = scheduler.plan(2 * BLOCK)

    assert len(plan.decodes) == decoding
    prefilled = sum(chunk.stop - chunk.start for chunk in plan.prefills)
    assert prefilled == (2 * BLOCK if decoding else STEP_TOKENS)


def test_answers_beside_a_long_prompt_are_those_of_the_library(
    checkpoint: Callable[[str], Path],
) -> None:
    path = checkpoint("qwen3")
    driver, reference = Driver(make_engine(path)), Reference(path)
    driver.admit(job("short", QUESTIONS[0], max_tokens=30))
    driver.step()
    driver.step()

    driver.admit(job("long", LONG, max_tokens=4))
    driver.finish("short", "long")

    assert texts(driver.outcomes["short"]) == [reference.generate(QUESTIONS[0], 30)[2]]
    assert texts(driver.outcomes["long"]) == [reference.generate(LONG, 4)[2]]
