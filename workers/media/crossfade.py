"""Joins audio segments without clicks, and changes their speed at the same pitch.

Both process mono audio incrementally; their output does not depend on how the input is chunked.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import av
import av.filter
import numpy as np
import numpy.typing as npt

from workers.contract.media import SPEED_MAX, SPEED_MIN

Mono = npt.NDArray[np.float32]
"""``(N,)``."""

_FADE_S: Final = 0.004
"""Short enough to be inaudible as a fade, long enough to avoid a click."""
_FILTER_MIN, _FILTER_MAX = 0.5, 2.0
"""Range of speeds in which a single filter of libavfilter skips no samples."""


class Crossfader:
    """Fades each segment in and out, with a pause between two; without a pause they are crossfaded.

    ``add`` continues the current segment and ``end_segment`` ends it.
    """

    def __init__(self, rate: int, *, pause_ms: int = 0) -> None:
        self._fade = max(1, round(rate * _FADE_S))
        self._rise: Mono = ((np.arange(self._fade) + 0.5) / self._fade).astype(np.float32)
        self._pause = np.zeros(rate * pause_ms // 1000, np.float32)
        self._faded_in = 0
        """Samples of the segment that have been faded in, up to the length of a fade."""
        self._end = np.zeros(0, np.float32)
        """The last samples so far, held back because they fade out if the segment ends here."""
        self._tail: Mono | None = None
        """The faded end of the previous segment, to be mixed with the start of the next."""
        self._pausing = False

    def add(self, samples: Mono) -> Mono:
        """Add samples. Return the output that is final."""
        if not len(samples):
            return samples
        rising = self._rise[self._faded_in :][: len(samples)]
        samples = samples.astype(np.float32, copy=True)
        samples[: len(rising)] *= rising
        if self._tail is not None:
            tail = self._tail[self._faded_in :][: len(samples)]
            samples[: len(tail)] += tail
        pause = self._pause if self._pausing else self._pause[:0]
        self._pausing = False
        self._faded_in = min(self._faded_in + len(samples), self._fade)
        whole = np.concatenate((self._end, samples))
        keep = min(self._fade, len(whole))
        self._end = whole[len(whole) - keep :]
        return np.concatenate((pause, whole[: len(whole) - keep]))

    def end_segment(self) -> Mono:
        """End the current segment, if there is one. Return the output that is final."""
        if not self._faded_in:
            return self._end
        falling = self._rise[::-1][self._fade - len(self._end) :]
        faded = (self._end * falling).astype(np.float32)
        self._end, self._faded_in = self._end[:0], 0
        if len(self._pause):
            self._pausing, self._tail = True, None
            return faded
        previous = self._tail
        self._tail = faded
        # A segment shorter than a fade leaves a rest of the previous tail.
        return (
            previous[len(faded) :]
            if previous is not None and len(previous) > len(faded)
            else faded[:0]
        )

    def finish(self) -> Mono:
        """End the last segment. Return the remaining output."""
        ended = self.end_segment()
        tail, self._tail = self._tail, None
        return ended if tail is None else np.concatenate((ended, tail))


class TimeStretcher:
    """Changes the speed by a factor at the same pitch, by overlap-add of similar waveforms."""

    def __init__(self, rate: int, speed: float) -> None:
        """Raise ``ValueError`` if the speed is outside ``SPEED_MIN`` to ``SPEED_MAX``."""
        if not SPEED_MIN <= speed <= SPEED_MAX:
            raise ValueError(
                f"speed is {speed:g}; it must be between {SPEED_MIN:g} and {SPEED_MAX:g}"
            )
        self._rate = rate
        self._added = 0
        self._graph: av.filter.Graph | None = None if speed == 1 else _graph(rate, speed)

    def add(self, samples: Mono) -> Mono:
        if self._graph is None or not len(samples):
            return samples
        block = np.ascontiguousarray(samples[None], np.float32)
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._added
        frame.time_base = Fraction(1, self._rate)
        self._added += len(samples)
        self._graph.push(frame)
        return self._pull(self._graph)

    def finish(self) -> Mono:
        """Return the remaining output."""
        if self._graph is None or not self._added:
            return np.zeros(0, np.float32)
        self._graph.push(None)
        return self._pull(self._graph)

    def _pull(self, graph: av.filter.Graph) -> Mono:
        blocks = [np.zeros(0, np.float32)]
        while True:
            try:
                pulled = graph.pull()
            except (av.BlockingIOError, av.EOFError):
                return np.concatenate(blocks)
            assert isinstance(pulled, av.AudioFrame)
            blocks.append(np.asarray(pulled.to_ndarray(), np.float32)[0])


def _graph(rate: int, speed: float) -> av.filter.Graph:
    graph = av.filter.Graph()
    nodes = [graph.add_abuffer(sample_rate=rate, format="fltp", layout="mono")]
    while not _FILTER_MIN <= speed <= _FILTER_MAX:
        factor = _FILTER_MIN if speed < 1 else _FILTER_MAX
        nodes.append(graph.add("atempo", f"{factor}"))
        speed /= factor
    nodes.append(graph.add("atempo", f"{speed:.6f}"))
    nodes.append(graph.add("abuffersink"))
    graph.link_nodes(*nodes).configure()
    return graph
