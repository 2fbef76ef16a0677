"""Which tokens may come next in a window, and how a window's tokens divide into segments. Pure.

Timestamps come in pairs around each segment: the end of one, then the start of the next. They never
decrease, and the window continues after the last complete pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from workers.engines.transcription.special_tokens import SpecialTokens

TIMESTAMP_S: Final = 0.02
"""Duration of one step of the timestamps; also of one position of the encoder."""
FRAME_S: Final = 0.01
"""Duration of one frame of the features."""
STRIDE: Final = 2
"""Frames of the features in one position of the encoder."""
_NEVER: Final = -float("inf")


def constrain(
    scores: torch.Tensor, tokens: Sequence[int], special: SpecialTokens, *, timestamps: bool
) -> None:
    """Set the scores ``(vocabulary,)`` of tokens that cannot follow a window's ``tokens`` to minus
    infinity."""
    if not tokens and special.suppressed_first:
        scores[list(special.suppressed_first)] = _NEVER
    if special.suppressed:
        scores[list(special.suppressed)] = _NEVER
    if timestamps:
        _constrain_timestamps(scores, tokens, special)


def _constrain_timestamps(
    scores: torch.Tensor, tokens: Sequence[int], special: SpecialTokens
) -> None:
    begin = special.timestamp_begin
    scores[begin - 1] = _NEVER
    last_is_time = bool(tokens) and tokens[-1] >= begin
    before_is_time = len(tokens) < 2 or tokens[-2] >= begin
    if last_is_time and before_is_time:
        scores[begin:] = _NEVER
    elif last_is_time:
        scores[: special.end] = _NEVER
    latest = next((token for token in reversed(tokens) if token >= begin), None)
    if latest is not None:
        # A start may equal the end before it; nothing else repeats a timestamp.
        scores[begin : latest if last_is_time and not before_is_time else latest + 1] = _NEVER
    if not tokens:
        scores[:begin] = _NEVER
        if special.initial_timestamp_max is not None:
            scores[begin + special.initial_timestamp_max + 1 :] = _NEVER
    logs = scores.log_softmax(-1)
    if logs[begin:].logsumexp(-1) > logs[:begin].max():
        scores[:begin] = _NEVER


@dataclass(frozen=True, slots=True)
class WindowPart:
    """A segment of a window: its tokens ``[first, stop)``, timestamps included, and its times in
    seconds after the window's start."""

    first: int
    stop: int
    start_s: float
    end_s: float


def is_closed(tokens: Sequence[int], begin: int) -> bool:
    """Whether the last token completes a pair of timestamps, so that what is before it is final."""
    return len(tokens) > 1 and tokens[-1] >= begin and tokens[-2] >= begin


def divide(
    tokens: Sequence[int], frames: int, special: SpecialTokens, *, timestamps: bool
) -> tuple[list[WindowPart], int]:
    """Divide a window of so many ``frames`` into segments. Return them, and the number of frames
    after which the next window starts."""
    if not timestamps:
        return [WindowPart(0, len(tokens), 0.0, frames * FRAME_S)], frames
    begin = special.timestamp_begin
    marks = [token >= begin for token in tokens]
    ends_single = marks[-2:] == [False, True]
    cuts = [place + 1 for place in range(len(marks) - 1) if marks[place] and marks[place + 1]]
    if not cuts:
        end_s = frames // STRIDE * TIMESTAMP_S
        latest = next((token for token in reversed(tokens) if token >= begin), begin)
        if latest != begin:
            end_s = (latest - begin) * TIMESTAMP_S
        return [WindowPart(0, len(tokens), 0.0, end_s)], frames
    if ends_single:
        cuts.append(len(tokens))
    pieces, first = [], 0
    for stop in cuts:
        start_s = (tokens[first] - begin) * TIMESTAMP_S
        pieces.append(WindowPart(first, stop, start_s, (tokens[stop - 1] - begin) * TIMESTAMP_S))
        first = stop
    if ends_single:
        return pieces, frames
    return pieces, (tokens[cuts[-1] - 1] - begin) * STRIDE
