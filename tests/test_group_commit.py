"""Group commit: every item is answered, in batches, and one bad item fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy.exc import OperationalError

from gateway.group_commit import GroupCommit


async def ask(group: GroupCommit[int, int], number: int) -> int:
    return await group.submit(number)


async def test_items_that_arrive_during_a_commit_form_the_next_batch() -> None:
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


async def test_cancelled_caller_does_not_stop_the_others() -> None:
    async def write(batch: Sequence[int]) -> list[int]:
        await asyncio.sleep(0.01)
        return list(batch)

    group = GroupCommit(write)
    leaving, staying = (asyncio.create_task(ask(group, number)) for number in (1, 2))
    await asyncio.sleep(0)
    leaving.cancel()

    assert await staying == 2
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_an_outage_fails_the_batch_after_one_try() -> None:
    tries: list[int] = []

    async def write(batch: Sequence[int]) -> list[int]:
        tries.append(len(batch))
        await asyncio.sleep(0.01)
        raise OperationalError("COMMIT", {}, Exception("away"))

    group = GroupCommit(write)

    answers = await asyncio.gather(
        *(group.submit(number) for number in range(100)), return_exceptions=True
    )

    assert all(isinstance(answer, OperationalError) for answer in answers)
    assert tries == [100]


async def test_outage_during_single_writes_fails_the_rest() -> None:
    tries: list[int] = []

    async def write(batch: Sequence[int]) -> list[int]:
        tries.append(len(batch))
        await asyncio.sleep(0)
        if len(batch) > 1:
            raise ValueError("one of them")
        raise OperationalError("COMMIT", {}, Exception("away"))

    group = GroupCommit(write)

    answers = await asyncio.gather(
        *(group.submit(number) for number in range(6)), return_exceptions=True
    )

    assert all(isinstance(answer, OperationalError) for answer in answers)
    assert tries == [6, 1]


async def test_item_of_a_cancelled_caller_is_not_written() -> None:
    written: list[int] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    async def write(batch: Sequence[int]) -> list[int]:
        begun.set()
        await ended.wait()
        written.extend(batch)
        return list(batch)

    group = GroupCommit(write)
    first = asyncio.create_task(ask(group, 1))
    await begun.wait()
    leaving, staying = (asyncio.create_task(ask(group, number)) for number in (2, 3))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    ended.set()

    assert await asyncio.gather(first, staying) == [1, 3]
    assert written == [1, 3]


async def test_writer_with_too_few_answers_fails_the_batch() -> None:
    async def write(batch: Sequence[int]) -> list[int]:
        return [] if batch[0] == 1 else list(batch)

    group = GroupCommit(write)

    async with asyncio.timeout(30):
        answers = await asyncio.gather(group.submit(1), group.submit(2), return_exceptions=True)
        later = await group.submit(3)

    assert all(isinstance(answer, ValueError) for answer in answers)
    assert later == 3


async def test_batch_waits_for_as_many_items_as_the_one_before() -> None:
    batches: list[int] = []

    async def write(batch: Sequence[int]) -> list[int]:
        batches.append(len(batch))
        await asyncio.sleep(0)
        return list(batch)

    group = GroupCommit(write, gather_s=60)
    await asyncio.gather(*(group.submit(number) for number in range(3)))
    first = asyncio.gather(group.submit(1), group.submit(2))
    await asyncio.sleep(0.02)
    assert batches == [3]

    third = group.submit(3)
    await asyncio.gather(first, third)

    assert batches == [3, 3]


async def test_batch_does_not_wait_longer_than_it_may() -> None:
    batches: list[int] = []

    async def write(batch: Sequence[int]) -> list[int]:
        batches.append(len(batch))
        await asyncio.sleep(0)
        return list(batch)

    group = GroupCommit(write, gather_s=0.05)
    await asyncio.gather(*(group.submit(number) for number in range(3)))

    assert await group.submit(1) == 1
    assert batches == [3, 1]


async def test_batch_long_after_another_does_not_wait() -> None:
    async def write(batch: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(batch)

    group = GroupCommit(write, gather_s=60)
    await asyncio.gather(*(group.submit(number) for number in range(3)))
    group._written_at -= 60

    async with asyncio.timeout(30):
        assert await group.submit(1) == 1


async def test_items_that_follow_one_another_never_wait() -> None:
    async def write(batch: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(batch)

    group = GroupCommit(write, gather_s=60)

    async with asyncio.timeout(30):
        for number in range(5):
            assert await group.submit(number) == number
