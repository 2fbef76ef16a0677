"""Many waits with one limit: each fails in its time, and those that are done stay as they are."""

from __future__ import annotations

import asyncio

import pytest

from gateway.time_limit import TimeLimit


async def test_futures_fail_when_their_time_is_up_and_done_ones_are_left_alone() -> None:
    limit = TimeLimit(0.02)
    loop = asyncio.get_running_loop()
    answered, cancelled, late = (limit.apply(loop.create_future()) for _ in range(3))
    answered.set_result("answer")
    cancelled.cancel()

    with pytest.raises(TimeoutError):
        await late

    assert await answered == "answer"
    assert cancelled.cancelled()


async def test_a_limit_applies_again_after_all_earlier_waits_have_ended() -> None:
    limit = TimeLimit(0.02)
    loop = asyncio.get_running_loop()

    for _ in range(2):
        with pytest.raises(TimeoutError):
            await limit.apply(loop.create_future())


async def test_later_futures_keep_their_own_time() -> None:
    limit = TimeLimit(0.05)
    loop = asyncio.get_running_loop()
    first = limit.apply(loop.create_future())
    await asyncio.sleep(0.02)
    second = limit.apply(loop.create_future())

    with pytest.raises(TimeoutError):
        await first

    assert not second.done()
    with pytest.raises(TimeoutError):
        await second
