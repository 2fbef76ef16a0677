"""Decides which suspended calls run next, and how many of them as one batch.

Pure but for the times that it is told. A batch that takes as long as its calls one by one gains
nothing: all of its runs would end as late as the last. So rows are added only while they make a row
cheaper, as measured, and the run with the fewest calls left comes first: the shortest remaining
work, which has the lowest mean time to completion. A call that is passed over gains on the others,
so that every run ends, however many short ones arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Final

AGEING: Final = 0.25
"""Calls by which a run's remaining work counts as less, at least as none, for every batch that
passed it over."""
GAIN_MIN: Final = 0.9
"""A larger batch is worth its wait if a row takes at most this share of the time it takes in a
smaller one."""
RETRY: Final = 64
"""Every so many batches of a shape, one is as large as it can be, since times change."""
MEASURED_MIN: Final = 8
"""Batches of a size whose times must be known before it counts."""
SHAPES_MAX: Final = 256
"""Shapes that are remembered. Some calls have one of their own for each step."""
_RECENT: Final = 0.3
"""Weight of the latest measurement in the moving average."""


class BatchSizes:
    """Time of a batch by its rows, for each shape of a call."""

    def __init__(self) -> None:
        self._row_s: dict[Hashable, dict[int, float]] = {}
        """Shape → rows → moving average of the time of one row."""
        self._counts: dict[Hashable, Counter[int]] = {}
        """Shape → rows → number of batches."""

    def record(self, shape: Hashable, rows: int, seconds: float) -> None:
        """Record the duration of a batch."""
        if shape not in self._row_s and len(self._row_s) >= SHAPES_MAX:
            oldest = next(iter(self._row_s))
            del self._row_s[oldest], self._counts[oldest]
        known = self._row_s.setdefault(shape, {})
        latest = seconds / rows
        before = known.get(rows, latest)
        known[rows] = before + _RECENT * (latest - before)
        self._counts.setdefault(shape, Counter())[rows] += 1

    def rows_max(self, shape: Hashable, rows_max: int) -> int:
        """Return the rows beyond which a batch gains nothing, and at most ``rows_max``."""
        counts = self._counts.get(shape, Counter[int]())
        known = {
            rows: self._row_s[shape][rows]
            for rows, count in counts.items()
            if count >= MEASURED_MIN
        }
        if not known or counts.total() % RETRY == 0:
            return rows_max
        best_s = min(known.values())
        enough = min(rows for rows, row_s in known.items() if row_s * GAIN_MIN <= best_s)
        # More rows than were ever measured may be cheaper still.
        return rows_max if enough == max(known) else enough


def urgency(calls_left: int, passed_over: int) -> float:
    """Return a run's place in the order; the lowest is next."""
    return max(calls_left - AGEING * passed_over, 0.0)
