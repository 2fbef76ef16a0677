"""Predicts the mouth shape in each video frame from a recording: band loudness, then a network.

Loudness is relative to the level of the recording, so that a quiet one opens the mouth as much. A
silent recording is not amplified.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from workers.engines.talking.networks import BANDS, MouthPredictor

RATE: Final = 16_000
HOP: Final = 160
_WINDOW: Final = 400
_FFT: Final = 512
_LOWEST, _HIGHEST = 60.0, 7600.0
_SILENCE_DB: Final = -55.0
"""Level relative to full scale below which a recording counts as silent."""
_RANGE_DB: Final = 60.0


def loudness(samples: npt.NDArray[np.float32]) -> torch.Tensor:
    """Compute the loudness of mono audio at ``RATE`` Hz in bands ``(40, T)``.

    1 is the level of the recording, 0 is 60 dB below it.
    """
    wave = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    # One row per hop, centred on the middle of the hop.
    rows = max(1, -(-len(wave) // HOP))
    margin = _FFT // 2 - HOP // 2
    wave = F.pad(wave, (margin, rows * HOP - len(wave) + margin + _FFT))
    window = torch.zeros(_FFT)
    inside = (_FFT - _WINDOW) // 2
    window[inside : inside + _WINDOW] = torch.hann_window(_WINDOW)
    frames = wave.unfold(0, _FFT, HOP)[:rows] * window
    power = torch.fft.rfft(frames, dim=1).abs().square() / window.square().sum() / _FFT * 2
    bands = power @ _filters().T
    level_db = 10 * torch.log10(bands.sum(1) + 1e-10)
    reference_db = max(float(torch.quantile(level_db, 0.95)), _SILENCE_DB)
    relative_db = 10 * torch.log10(bands + 1e-10) - reference_db
    return (1 + relative_db / _RANGE_DB).clamp(0, 1.5).T


def predict_mouths(
    mouth_predictor: MouthPredictor, bands: torch.Tensor, *, fps: Fraction, frames: int
) -> npt.NDArray[np.float32]:
    """Predict the mouth shape of each frame: ``(frames, 4)``."""
    device = next(mouth_predictor.parameters()).device
    with torch.no_grad():
        mouths = mouth_predictor(bands[None].to(device))[0].cpu().numpy()
    step = RATE / HOP
    # A frame shows the mean shape over its duration.
    count = max(1, math.floor(step / float(fps)))
    kernel = np.ones(count) / count
    edges = ((count - 1) // 2, count // 2)
    mean = [np.convolve(np.pad(row, edges, mode="edge"), kernel, "valid") for row in mouths]
    times = (np.arange(frames) + 0.5) / float(fps) * step - 0.5
    rows = np.arange(mouths.shape[1])
    return np.stack([np.interp(times, rows, row) for row in mean], axis=1).astype(np.float32)


@functools.cache
def _filters() -> torch.Tensor:
    """Build triangular filters, evenly spaced on the mel scale: ``(40, 257)``."""

    def mel(hz: float) -> float:
        return 2595 * math.log10(1 + hz / 700)

    marks = torch.linspace(mel(_LOWEST), mel(_HIGHEST), BANDS + 2)
    hz = 700 * (10 ** (marks / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, _FFT // 2 + 1)[None]
    rising = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)
