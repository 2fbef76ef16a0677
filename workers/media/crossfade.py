"""Pieces of sound one behind the other without a click, and faster or slower at the same pitch.

Both work on mono sound that passes by, and give the same samples however it is cut into pieces.
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
"""Too short to be heard as a fade, too long to be heard as a click."""
_TEMPO_MIN, _TEMPO_MAX = 0.5, 2.0
"""Between which one filter of libavfilter keeps every sample."""


class Crossfader:
    """Fades every piece in and out, with a pause between two; without one they fade over.

    ``add`` continues the piece that has begun and ``cut`` ends it.
    """

    def __init__(self, rate: int, *, pause_ms: int = 0) -> None:
        self._fade = max(1, round(rate * _FADE_S))
        self._rise: Mono = ((np.arange(self._fade) + 0.5) / self._fade).astype(np.float32)
        self._pause = np.zeros(rate * pause_ms // 1000, np.float32)
        self._begun = 0
        """Samples of the piece that have faded in already, up to the length of a fade."""
        self._held = np.zeros(0, np.float32)
        """The end of the piece so far, which may have to fade out."""
        self._tail: Mono | None = None
        """The faded end of the piece before, to be mixed with the start of the next."""
        self._pausing = False

    def add(self, samples: Mono) -> Mono:
        """What can be heard by now."""
        if not len(samples):
            return samples
        rising = self._rise[self._begun :][: len(samples)]
        samples = samples.astype(np.float32, copy=True)
        samples[: len(rising)] *= rising
        if self._tail is not None:
            tail = self._tail[self._begun :][: len(samples)]
            samples[: len(tail)] += tail
        lead = self._pause if self._pausing else self._pause[:0]
        self._pausing = False
        self._begun = min(self._begun + len(samples), self._fade)
        whole = np.concatenate((self._held, samples))
        keep = min(self._fade, len(whole))
        self._held = whole[len(whole) - keep :]
        return np.concatenate((lead, whole[: len(whole) - keep]))

    def end_segment(self) -> Mono:
        """End a piece; nothing happens if none has begun."""
        if not self._begun:
            return self._held
        falling = self._rise[::-1][self._fade - len(self._held) :]
        faded = (self._held * falling).astype(np.float32)
        self._held, self._begun = self._held[:0], 0
        if len(self._pause):
            self._pausing, self._tail = True, None
            return faded
        left = self._tail
        self._tail = faded
        # A piece shorter than a fade leaves something of the one before it.
        return left[len(faded) :] if left is not None and len(left) > len(faded) else faded[:0]

    def finish(self) -> Mono:
        """End the last piece and return what is left of it."""
        ended = self.end_segment()
        tail, self._tail = self._tail, None
        return ended if tail is None else np.concatenate((ended, tail))


class TimeStretcher:
    """Speaks ``speed`` times as fast at the same pitch, by overlapping what resembles itself."""

    def __init__(self, rate: int, speed: float) -> None:
        """Raise ``ValueError`` for a speed outside ``SPEED_MIN`` to ``SPEED_MAX``."""
        if not SPEED_MIN <= speed <= SPEED_MAX:
            raise ValueError(f"speed is {speed:g}; accepted are {SPEED_MIN:g} to {SPEED_MAX:g}")
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
        """What is left."""
        if self._graph is None or not self._added:
            return np.zeros(0, np.float32)
        self._graph.push(None)
        return self._pull(self._graph)

    def _pull(self, graph: av.filter.Graph) -> Mono:
        found = [np.zeros(0, np.float32)]
        while True:
            try:
                pulled = graph.pull()
            except (av.BlockingIOError, av.EOFError):
                return np.concatenate(found)
            assert isinstance(pulled, av.AudioFrame)
            found.append(np.asarray(pulled.to_ndarray(), np.float32)[0])


def _graph(rate: int, speed: float) -> av.filter.Graph:
    graph = av.filter.Graph()
    places = [graph.add_abuffer(sample_rate=rate, format="fltp", layout="mono")]
    while not _TEMPO_MIN <= speed <= _TEMPO_MAX:
        part = _TEMPO_MIN if speed < 1 else _TEMPO_MAX
        places.append(graph.add("atempo", f"{part}"))
        speed /= part
    places.append(graph.add("atempo", f"{speed:.6f}"))
    places.append(graph.add("abuffersink"))
    graph.link_nodes(*places).configure()
    return graph
