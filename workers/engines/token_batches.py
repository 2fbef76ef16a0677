"""Batches of inputs of similar length from all requests, as large as fits into a short step.

A batch is computed in slices: a long input is interrupted between the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Generic, TypeVar

from workers.engines.interrupting import SlicedCall
from workers.engines.row_pacing import RowPacing

STEP_TOKENS: Final = 4096
"""Maximum tokens of a batch, including padding; a single longer input is allowed."""
_FIRST_TOKENS: Final = 512
"""Maximum tokens of the first batch, when the time of a token is not known yet."""

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class TokenBatches(Generic[RequestT, ResultT]):
    """Computes inputs, each of which is a request and the number of its input.

    ``length``: tokens of an input. ``compute``: results of a batch.
    """

    def __init__(
        self,
        length: Callable[[RequestT, int], int],
        compute: Callable[[Sequence[tuple[RequestT, int]]], ResultT],
    ) -> None:
        self._length = length
        self._compute = compute
        self._pacing = RowPacing(STEP_TOKENS, first=_FIRST_TOKENS)
        self._call: SlicedCall[Sequence[tuple[RequestT, int]], ResultT] | None = None

    def run_slice(
        self, waiting: Callable[[], Sequence[tuple[RequestT, int]]]
    ) -> tuple[Sequence[tuple[RequestT, int]], ResultT | None]:
        """Compute a batch for a slice of time. Return it, and its results if it has ended.

        ``waiting``: inputs to choose the next batch from, the oldest first.
        """
        call, self._call = self._call, None
        if call is None:
            batch = self._choose(waiting())
            if not batch:
                return (), None
            call = SlicedCall(batch, lambda: self._compute(batch))
        results = call.run_slice()
        if results is None:
            self._call = call
        else:
            longest = max(self._length(*each) for each in call.rows)
            self._pacing.record(longest * len(call.rows), call.spent_s)
        return call.rows, results

    def abandon_without(self, active: Collection[RequestT]) -> None:
        """Abandon a batch that no active request waits for."""
        if self._call is not None and not any(one in active for one, _ in self._call.rows):
            self._call.abandon()
            self._call = None

    def _choose(self, waiting: Sequence[tuple[RequestT, int]]) -> Sequence[tuple[RequestT, int]]:
        """Select the oldest input, and those closest to it in length."""
        if not waiting:
            return ()
        first, *others = waiting
        length = longest = self._length(*first)
        others.sort(key=lambda each: abs(self._length(*each) - length))
        chosen = [first]
        for each in others:
            longest = max(longest, self._length(*each))
            if longest * (len(chosen) + 1) > self._pacing.rows:
                break
            chosen.append(each)
        return chosen
