"""Questions asked within a while are answered by one call, and each by its own answer or error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.console.live.together import Together


class Oracle:
    """Doubles numbers; odd ones have errors of their own, and 13 spoils all."""

    def __init__(self) -> None:
        self.calls: list[Sequence[int]] = []
        self.together = Together(self._answer, within_s=0.02)

    async def _answer(self, numbers: Sequence[int]) -> Sequence[int | Exception]:
        self.calls.append(numbers)
        if 13 in numbers:
            raise ConnectionError
        return [ValueError(str(number)) if number % 2 else 2 * number for number in numbers]


async def test_questions_within_a_while_are_one_call() -> None:
    oracle = Oracle()

    first = await asyncio.gather(*(oracle.together.ask(number) for number in (2, 4, 4)))
    second = await oracle.together.ask(6)

    assert (first, second) == ([4, 8, 8], 12)
    assert oracle.calls == [[2, 4, 4], [6]]


async def test_an_error_reaches_the_one_whom_it_concerns() -> None:
    ask = Oracle().together.ask

    odd, even = await asyncio.gather(ask(3), ask(4), return_exceptions=True)

    assert isinstance(odd, ValueError)
    assert even == 8


async def test_a_call_that_fails_fails_all_and_the_next_one_answers() -> None:
    ask = Oracle().together.ask

    failed = await asyncio.gather(ask(13), ask(4), return_exceptions=True)

    assert [type(error) for error in failed] == [ConnectionError, ConnectionError]
    assert await ask(4) == 8


async def test_one_who_leaves_takes_no_answer_from_others() -> None:
    ask = Oracle().together.ask
    leaving = asyncio.create_task(ask(2))
    staying = asyncio.create_task(ask(4))
    await asyncio.sleep(0)

    leaving.cancel()

    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await staying == 8
