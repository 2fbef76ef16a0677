"""When each word of a window is spoken, by aligning its tokens with the audio.

The cross-attention of certain heads follows the audio. Dynamic time warping finds the monotonic
path through it that has the most attention, which gives each token a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from workers.engines.transcription.constraints import TIMESTAMP_S

_INCOMPLETE: Final = "\ufffd"
_JOINED_BEFORE: Final = "\"'.。,，!！?？:：”)]}、%"  # noqa: RUF001
"""Punctuation that belongs to the word before it."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word and its times, in seconds after the window's start."""

    text: str
    start_s: float
    end_s: float


def token_times(attention: torch.Tensor, positions: int, median_width: int) -> list[float]:
    """Return the time of each token from the attention ``(heads, tokens, positions)``, of which
    only the first ``positions`` are audio, in seconds after the window's start."""
    weights = attention[..., :positions]
    if not weights.numel():
        return [0.0] * attention.shape[1]
    std = weights.std(dim=-2, keepdim=True, unbiased=False)
    weights = (weights - weights.mean(dim=-2, keepdim=True)) / std
    weights = _median(weights, median_width).mean(dim=0)
    tokens, places = align(-np.nan_to_num(weights.double().numpy()))
    jumps = np.diff(tokens, prepend=-1).astype(bool)
    return [float(place) * TIMESTAMP_S for place in places[jumps]]


def _median(weights: torch.Tensor, width: int) -> torch.Tensor:
    reach = width // 2
    if weights.shape[-1] <= reach:
        return weights
    padded = F.pad(weights, (reach, reach), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., reach]


def align(costs: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the cheapest monotonic path through a matrix: its rows and its columns.

    Computed by diagonals, whose cells do not depend on each other.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    step = np.full((rows + 1, columns + 1), 2, dtype=np.int8)
    step[:, 0] = 1
    step[0] = 2
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = (
            total[row - 1, column - 1],
            total[row - 1, column],
            total[row, column - 1],
        )
        is_both = (both < down) & (both < right)
        is_down = ~is_both & (down < both) & (down < right)
        best = np.where(is_both, both, np.where(is_down, down, right))
        total[row, column] = costs[row - 1, column - 1] + best
        step[row, column] = np.where(is_both, 0, np.where(is_down, 1, 2))
    path = []
    row_at, column_at = rows, columns
    while row_at > 0 or column_at > 0:
        path.append((row_at - 1, column_at - 1))
        move = step[row_at, column_at]
        row_at -= move != 2
        column_at -= move != 1
    found = np.array(path[::-1], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def to_words(
    tokens: Sequence[int],
    times: Sequence[float],
    end_s: float,
    decode: Callable[[Sequence[int]], str],
) -> list[Word]:
    """Group a segment's text tokens into words. A word ends where the next one begins, or at the
    segment's end."""
    found: list[tuple[str, float]] = []
    pending: list[int] = []
    start_s = 0.0
    for token, time_s in zip(tokens, times, strict=True):
        if not pending:
            start_s = time_s
        pending.append(token)
        text = decode(pending)
        if text.endswith(_INCOMPLETE):
            continue
        pending = []
        is_word = not found or text[:1].isspace()
        if is_word and text.strip() not in _JOINED_BEFORE:
            found.append((text, start_s))
        elif found:
            found[-1] = (found[-1][0] + text, found[-1][1])
    ends = [*(start_s for _, start_s in found), end_s][1:]
    return [
        Word(text.strip(), start_s, max(start_s, stop_s))
        for (text, start_s), stop_s in zip(found, ends, strict=True)
        if text.strip()
    ]
