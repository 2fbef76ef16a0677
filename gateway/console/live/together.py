"""Questions of many viewers that are answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """Answers all questions that are asked within a while by one call.

    ``answer`` returns an answer to each question in turn, or the error that concerns it alone. An
    error that it raises concerns all of them.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Q]], Awaitable[Sequence[A | Exception]]],
        *,
        within_s: float,
    ) -> None:
        self._answer = answer
        self._within_s = within_s
        self._asked: list[tuple[Q, asyncio.Future[A]]] = []
        self._answering: set[asyncio.Task[None]] = set()

    async def ask(self, question: Q) -> A:
        if not self._asked:
            task = asyncio.create_task(self._run())
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked.append((question, future))
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(self._within_s)
        asked, self._asked = self._asked, []
        answers: Sequence[A | Exception]
        try:
            answers = await self._answer([question for question, _ in asked])
        except Exception as error:  # a boundary: raised to those who asked
            answers = [error] * len(asked)
        for (_, future), answer in zip(asked, answers, strict=True):
            if future.done():  # its asker has left
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
