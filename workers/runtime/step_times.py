"""Measures the time of a step and apportions it, to the microsecond.

Pure arithmetic over an injected clock; knows neither engines nor requests. Invariant: the shares
sum exactly to the measured time, so that all shares together are the busy time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, get_args

from workers.protocol.engine import Phase

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_INDEX: Final = {name: index for index, name in enumerate(PHASES)}


class Stopwatch(AbstractContextManager[None]):
    """A ``PhaseClock`` over one call into an engine.

    Time outside any phase belongs to the phase named at the start, so the phases always sum to the
    duration of the call. It is the context manager of all its phases, because a step can be shorter
    than creating an object.
    """

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self.alone = False
        self._spent = [0] * len(PHASES)
        self._running = False
        self._started_us = 0
        self._index = 0
        """Index of the current phase."""
        self._began_us = 0
        """Start of the current phase."""

    def start(self) -> None:
        self._spent = [0] * len(PHASES)
        self._running = False
        self._started_us = self._now_us()

    def stop(self, *, rest: Phase) -> list[int]:
        """Return the time of each of ``PHASES``; what no phase claimed is added to ``rest``."""
        total = self._now_us() - self._started_us
        self._spent[_INDEX[rest]] += total - sum(self._spent)
        return self._spent

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        if self._running:
            raise RuntimeError("phases do not nest")
        self._index = _INDEX[name]
        return self

    def __enter__(self) -> None:
        self._running = True
        self._began_us = self._now_us()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._running = False
        self._spent[self._index] += self._now_us() - self._began_us


class TokenTimes:
    """Times of the tokens of one request, measured on the choice that produced the first token.

    The other choices are decoded in the same steps. Times in microseconds of one clock.
    """

    __slots__ = ("_index", "_indexed_tokens", "_last_us", "first_us", "gap_us", "tokens")

    def __init__(self) -> None:
        self.first_us = 0
        self.gap_us = 0
        self.tokens = 0
        """Number of tokens of all choices."""
        self._index: int | None = None
        self._indexed_tokens = 0
        self._last_us = 0

    def record_tokens(self, index: int, count: int, now_us: int) -> None:
        """Record ``count`` new tokens of a choice."""
        if not count:
            return
        self.tokens += count
        self.record_output(index, now_us)
        if index == self._index:
            self._indexed_tokens += count

    def record_output(self, index: int, now_us: int) -> None:
        """Record output that has no tokens, such as an audio chunk."""
        if self._index is None:
            self._index, self.first_us, self._last_us = index, now_us, now_us
        if index == self._index:
            self.gap_us = max(self.gap_us, now_us - self._last_us)
            self._last_us = now_us

    @property
    def started(self) -> bool:
        """Whether anything was recorded."""
        return self._index is not None

    @property
    def per_token_us(self) -> int:
        """Mean time between two tokens; 0 with fewer than two."""
        if self._indexed_tokens < 2:
            return 0
        return round((self._last_us - self.first_us) / (self._indexed_tokens - 1))


def apportion_phases(
    spent: Sequence[int], weights: Sequence[float], preprocess: Sequence[float] = ()
) -> Iterator[tuple[int, list[int]]]:
    """Yield the index of each phase that took time, and its shares.

    ``preprocess``: weights of that phase, if any of them is positive.
    """
    for index, phase_us in enumerate(spent):
        if phase_us:
            is_own = PHASES[index] == "preprocess" and any(preprocess)
            yield index, apportion(phase_us, preprocess if is_own else weights)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` by weights into whole units, rounding up the largest remainders.

    The shares sum to ``total``. Weights that are negative, not finite or all zero count as equal,
    because the time was spent and must be accounted for.
    """
    count = len(weights)
    if count == 1:
        return [total]
    whole = sum(weights)
    if not 0.0 < whole < float("inf") or min(weights) < 0.0:
        weights, whole = [1.0] * count, float(count)
    exact = [total * weight / whole for weight in weights]
    shares = [int(share) for share in exact]
    missing = total - sum(shares)
    if missing > 0:
        largest = sorted(range(count), key=lambda index: shares[index] - exact[index])
        for turn in range(missing):
            shares[largest[turn % count]] += 1
    elif missing < 0:  # a share that a float rounded up
        shares[shares.index(max(shares))] += missing
    return shares
