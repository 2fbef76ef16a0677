"""Decides how many rows a step computes, so that streams on the same device do not notice it.

Pure: measured times come in, a number of rows goes out. For engines whose rows are independent, as
the frames of a video or the tokens of texts are.
"""

from __future__ import annotations

from typing import Final

STEP_S: Final = 0.03
"""Longest step, as far as measured. With a decode step of a stream, less than 50 ms."""
_LATEST: Final = 0.5
"""Weight of the latest step in the average of a row's time."""


class RowPacing:
    """``rows_max``: maximum rows of a step; ``first``: those of the first step."""

    def __init__(self, rows_max: int, *, first: int = 1, step_s: float = STEP_S) -> None:
        self._rows_max = rows_max
        self._first = first
        self._step_s = step_s
        self._row_s: float | None = None

    @property
    def rows(self) -> int:
        if self._row_s is None:
            return self._first
        fitting = int(self._step_s / self._row_s) if self._row_s else self._rows_max
        return max(1, min(self._rows_max, fitting))

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        if rows:
            latest = seconds / rows
            before = latest if self._row_s is None else self._row_s
            self._row_s = before + _LATEST * (latest - before)
