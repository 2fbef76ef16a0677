"""Manner of speaking: how fast a recording is spoken, and how far its pitch moves.

A small model speaks every voice at one pace and with one liveliness. Both are measured without a
transcript: syllables are the peaks of loudness that are voiced.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from workers.engines.speech.spectra import HOP, MELS, RATE, loudness

_VOWEL_BANDS: Final = slice(10, 55)
"""Bands in which vowels are louder than consonants: about 300 to 3,000 Hz."""
_PROMINENCE: Final = 0.25
"""Minimum height of a peak over the valleys beside it, in nepers."""
_AUDIBLE: Final = 3.0
"""Range below the loudest frame that counts as speech, in nepers."""
_PAUSE_FRAMES: Final = 18
"""Frames of a pause, a quarter of a second, which does not count as time of speaking."""
_HALF_CONFIDENCE: Final = 6
"""Number of syllables at which half of the difference is applied."""
_PACE: Final = (0.7, 1.5)
_SMALLEST: Final = 0.07
"""Difference of pace below which nothing is changed: sentences differ as much."""
_SPAN_RATIO: Final = (0.6, 1.8)
_HALF_CONFIDENCE_FRAMES: Final = 40


class Manner(NamedTuple):
    syllables: int
    pace: float
    """Syllables per second of speech, without pauses."""
    span: float
    """Range of the pitch in octaves, without its highest and lowest fifth."""
    voiced: int
    """Frames from which the range is measured."""


def measure_manner(frames: torch.Tensor) -> Manner:
    """Measure frames ``(T, 82)`` of ``spectra``."""
    mel, voiced = frames[:, :MELS], frames[:, -1] > 0.5
    level = loudness(mel[:, _VOWEL_BANDS]).exp().square().mean(1).log() / 2
    kernel = torch.hann_window(7, periodic=False).to(level)
    around = F.pad(level[None, None], (3, 3), mode="replicate")
    smooth = F.conv1d(around, (kernel / kernel.sum())[None, None])[0, 0]
    audible = smooth > smooth.max() - _AUDIBLE
    near = F.max_pool1d((voiced & audible).float()[None, None], 5, 1, 2)[0, 0] > 0
    syllables = sum(bool(near[at]) for at in _peaks(smooth.tolist()))
    gaps = audible.nonzero()[:, 0].diff()
    seconds = float(gaps[gaps < _PAUSE_FRAMES].sum()) * HOP / RATE
    pitch = frames[voiced, MELS]
    span = float(pitch.quantile(0.8) - pitch.quantile(0.2)) if len(pitch) else 0.0
    return Manner(syllables, syllables / max(seconds, 0.1), span, len(pitch))


def _peaks(levels: list[float]) -> list[int]:
    """Return the places of the peaks that rise and fall by ``_PROMINENCE``."""
    found: list[int] = []
    low, high, at, rising = levels[0], levels[0], 0, False
    for place, level in enumerate(levels):
        if not rising:
            low = min(low, level)
            if level > low + _PROMINENCE:
                high, at, rising = level, place, True
        elif level > high:
            high, at = level, place
        elif level < high - _PROMINENCE:
            found.append(at)
            low, rising = level, False
    return found


def speed_of(manner: Manner, usual: float) -> float:
    """Return the factor of speed that brings ``usual`` syllables per second to those of a
    recording; the fewer syllables it has, the less of the difference."""
    if not manner.syllables:
        return 1.0
    confidence = manner.syllables / (manner.syllables + _HALF_CONFIDENCE)
    low, high = _PACE
    speed = min(high, max(low, (manner.pace / usual) ** confidence))
    return 1.0 if abs(speed - 1) < _SMALLEST else speed


def match_span(frames: torch.Tensor, target: Manner) -> torch.Tensor:
    """Scale the movement of the pitch of frames ``(T, 82)`` to that of a recording."""
    own = measure_manner(frames)
    if not own.span or not target.span:
        return frames
    count = min(own.voiced, target.voiced)
    confidence = count / (count + _HALF_CONFIDENCE_FRAMES)
    low, high = _SPAN_RATIO
    ratio = min(high, max(low, target.span / own.span)) ** confidence
    pitch = frames[:, MELS]
    middle = pitch[frames[:, -1] > 0.5].median()
    moved = middle + (pitch - middle) * ratio
    return torch.cat([frames[:, :MELS], moved[:, None], frames[:, MELS + 1 :]], 1)
