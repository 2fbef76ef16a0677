"""Group commit: items that arrive while one batch is being written form the next batch.

A single item is written immediately, and under load batches fill by themselves. Where a batch costs
much more than an item, the one that directly follows a batch may wait a moment to become as large:
most callers that were just answered come back with their next item.

If a batch fails because of its data, its items are written one by one, so that one bad item does
not fail the others; the writing function must therefore be idempotent. An outage fails the whole
batch immediately. An item whose future is cancelled before it is written is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from gateway.errors import Unavailable
from gateway.sql.outages import OUTAGE

Item = TypeVar("Item")
Answer = TypeVar("Answer")

BATCH_MAX: Final = 128
PENDING_MAX: Final = 10_000


class GroupCommit(Generic[Item, Answer]):
    """Calls ``write(batch)`` for one batch at a time; it returns answers in the batch's order."""

    def __init__(
        self,
        write: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        *,
        batch_max: int = BATCH_MAX,
        gather_s: float = 0.0,
    ) -> None:
        """``gather_s``: the longest wait of a batch for as many items as the one before had."""
        self._write = write
        self._batch_max = batch_max
        self._gather_s = gather_s
        self._pending: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._last = 0
        """Number of items in the last batch."""
        self._written_at = 0.0
        self._gathered: asyncio.Future[None] | None = None
        self.batches = self.items = 0
        """Number of batches that were written, and of the items in them."""

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Write an item together with others. The future has its answer, or the error of its write.

        A caller that is cancelled while awaiting the future cancels it. Then an item that is being
        written is not undone, and one that waits for the next batch is dropped.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if len(self._pending) >= PENDING_MAX:
            message = "Too many concurrent requests; nothing was accepted."
            answer.set_exception(Unavailable("overloaded", message, retry_after_s=1))
            return answer
        self._pending.append((item, answer))
        if self._writer is None:
            self._writer = asyncio.create_task(self._drain())
        elif self._gathered is not None and len(self._pending) >= self._last:
            _end(self._gathered)
        return answer

    async def _drain(self) -> None:
        try:
            while self._pending:
                if len(self._pending) < self._last:
                    await self._gather()
                count = min(len(self._pending), self._batch_max)
                taken = (self._pending.popleft() for _ in range(count))
                batch = [entry for entry in taken if not entry[1].done()]
                self._last = len(batch)
                if batch:
                    self.batches, self.items = self.batches + 1, self.items + len(batch)
                    try:
                        await self._commit(batch)
                    except Exception as error:
                        # A bug, such as too few answers: report it to the callers of this batch,
                        # and continue with the next one.
                        for _, future in batch:
                            _resolve(future, error)
                    except BaseException:
                        for _, future in batch:
                            future.cancel()
                        raise
                    self._written_at = asyncio.get_running_loop().time()
        finally:
            self._writer = None

    async def _gather(self) -> None:
        """Wait for as many items as the last batch had, but only if it has just been written."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._written_at >= self._gather_s:
            return
        self._gathered = loop.create_future()
        timer = loop.call_later(self._gather_s, _end, self._gathered)
        try:
            await self._gathered
        finally:
            timer.cancel()
            self._gathered = None

    async def _commit(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._write([item for item, _ in batch])
        except OUTAGE as error:
            for _, future in batch:
                _resolve(future, error)
            return
        except Exception as error:  # a boundary: any error is raised to the caller
            if len(batch) == 1:
                _resolve(batch[0][1], error)
                return
            await self._one_by_one(batch)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _one_by_one(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        for place, (item, future) in enumerate(batch):
            if future.done():
                continue
            try:
                (answer,) = await self._write([item])
            except OUTAGE as error:
                for _, other in batch[place:]:
                    _resolve(other, error)
                return
            except Exception as error:  # a boundary: any error is raised to the caller
                _resolve(future, error)
            else:
                if not future.done():
                    future.set_result(answer)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _resolve(future: asyncio.Future[Answer], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
