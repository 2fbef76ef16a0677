"""Statistics of a voice: mean and deviation of each mel band over its vowels.

A small model renders a new voice close to an average one; filtering its output to match these
statistics brings it closer to the recording.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from workers.engines.speech.spectra import MELS

_LOUDNESS_RANGE: Final = 1.2
"""Range below the loudest frame, in units of ``spectra``; softer frames are not vowels."""
_HALF_CONFIDENCE_FRAMES: Final = 40
"""Frames, half a second, at which half of the difference is applied."""
_SPREAD_RATIO: Final = (0.7, 1.6)
"""Limits of the ratio of deviations."""


class MelStatistics(NamedTuple):
    """``mean`` and ``spread`` are ``(80,)``; ``frames`` is the number of frames they are from."""

    mean: torch.Tensor
    spread: torch.Tensor
    frames: int

    def to(self, device: torch.device) -> MelStatistics:
        return MelStatistics(self.mean.to(device), self.spread.to(device), self.frames)


def measure_mel_statistics(frames: torch.Tensor) -> MelStatistics:
    """Compute the statistics of frames ``(T, 82)`` of ``spectra``."""
    mel, voiced = frames[:, :MELS], frames[:, -1] > 0.5
    level = mel.mean(1).masked_fill(~voiced, -torch.inf)
    loud = mel[level > level.max() - _LOUDNESS_RANGE]
    if len(loud) < 2:
        return MelStatistics(torch.zeros(MELS).to(mel), torch.ones(MELS).to(mel), 0)
    return MelStatistics(loud.mean(0), loud.std(0).clamp(min=1e-3), len(loud))


def match_mel_statistics(frames: torch.Tensor, target: MelStatistics) -> torch.Tensor:
    """Filter frames ``(T, 82)`` to match other statistics; only partly if either has few frames."""
    own = measure_mel_statistics(frames)
    frame_count = min(own.frames, target.frames)
    confidence = frame_count / (frame_count + _HALF_CONFIDENCE_FRAMES)
    spread_ratio = _smooth((target.spread / own.spread).clamp(*_SPREAD_RATIO).log(), 5)
    mel = frames[:, :MELS]
    # Pauses and sibilants are much softer; their deviation must not be scaled.
    deviation = torch.maximum(mel - own.mean, -2 * own.spread)
    shifted = (
        mel
        + deviation * ((confidence * spread_ratio).exp() - 1)
        + confidence * _smooth(target.mean - own.mean, 3)
    )
    return torch.cat([shifted, frames[:, MELS:]], 1)


def _smooth(bands: torch.Tensor, width: int) -> torch.Tensor:
    around = F.avg_pool1d(bands[None, None], width, 1, width // 2, count_include_pad=False)
    return around[0, 0]
