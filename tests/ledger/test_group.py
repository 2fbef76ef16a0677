"""Group commit: everybody is answered, in batches, and nobody pays for a neighbour's mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.ledger.group import GroupCommit


async def test_what_arrives_during_a_commit_goes_into_the_next() -> None:
    batches: list[list[int]] = []

    async def write(batch: Sequence[int]) -> list[int]:
        batches.append(list(batch))
        await asyncio.sleep(0.01)
        return [item * 2 for item in batch]

    group = GroupCommit(write, batch_max=4)

    answers = await asyncio.gather(*(group.submit(number) for number in range(10)))

    assert answers == [number * 2 for number in range(10)]
    assert [len(batch) for batch in batches] == [4, 4, 2]


async def test_one_bad_item_fails_alone() -> None:
    async def write(batch: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        if 3 in batch:
            raise ValueError("three")
        return list(batch)

    group = GroupCommit(write)

    answers = await asyncio.gather(
        *(group.submit(number) for number in range(6)), return_exceptions=True
    )

    assert [answer for answer in answers if not isinstance(answer, ValueError)] == [0, 1, 2, 4, 5]


async def test_a_caller_that_leaves_does_not_stop_the_others() -> None:
    async def write(batch: Sequence[int]) -> list[int]:
        await asyncio.sleep(0.01)
        return list(batch)

    group = GroupCommit(write)
    leaving = asyncio.create_task(group.submit(1))
    staying = asyncio.create_task(group.submit(2))
    await asyncio.sleep(0)
    leaving.cancel()

    assert await staying == 2
    with pytest.raises(asyncio.CancelledError):
        await leaving
