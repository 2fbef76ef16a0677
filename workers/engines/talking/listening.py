"""From a recording to what a mouth does in each frame: loudness by bands, heard by a network.

Loudness is told relative to how loud the recording is, so that a quiet one opens the mouth as much;
but one in which nobody says anything is not made louder.
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
_QUIET_DB: Final = -55.0
"""Of full scale: a recording that is never louder is silent."""
_RANGE_DB: Final = 60.0


def loudness(samples: npt.NDArray[np.float32]) -> torch.Tensor:
    """Mono sound at ``RATE`` as bands ``(40, T)``: 1 is as loud as the recording is, 0 is 60 dB
    below that."""
    wave = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    # As many rows as hops, each around its hop's middle.
    rows = max(1, -(-len(wave) // HOP))
    around = _FFT // 2 - HOP // 2
    wave = F.pad(wave, (around, rows * HOP - len(wave) + around + _FFT))
    window = torch.zeros(_FFT)
    inside = (_FFT - _WINDOW) // 2
    window[inside : inside + _WINDOW] = torch.hann_window(_WINDOW)
    pieces = wave.unfold(0, _FFT, HOP)[:rows] * window
    power = torch.fft.rfft(pieces, dim=1).abs().square() / window.square().sum() / _FFT * 2
    bands = power @ _filters().T
    whole = 10 * torch.log10(bands.sum(1) + 1e-10)
    loud = max(float(torch.quantile(whole, 0.95)), _QUIET_DB)
    told = 10 * torch.log10(bands + 1e-10) - loud
    return (1 + told / _RANGE_DB).clamp(0, 1.5).T


def mouths_of(
    ear: MouthPredictor, bands: torch.Tensor, *, fps: Fraction, frames: int
) -> npt.NDArray[np.float32]:
    """How the mouth is in each frame: ``(frames, 4)``."""
    device = next(ear.parameters()).device
    with torch.inference_mode():
        heard = ear(bands[None].to(device))[0].cpu().numpy()
    step = RATE / HOP
    # A frame shows the mouth over its time, not at an instant.
    count = max(1, math.floor(step / float(fps)))
    kernel = np.ones(count) / count
    edges = ((count - 1) // 2, count // 2)
    mean = [np.convolve(np.pad(row, edges, mode="edge"), kernel, "valid") for row in heard]
    times = (np.arange(frames) + 0.5) / float(fps) * step - 0.5
    rows = np.arange(heard.shape[1])
    return np.stack([np.interp(times, rows, row) for row in mean], axis=1).astype(np.float32)


@functools.cache
def _filters() -> torch.Tensor:
    """Triangles evenly spaced on the mel scale: ``(40, 257)``."""

    def mel(hz: float) -> float:
        return 2595 * math.log10(1 + hz / 700)

    marks = torch.linspace(mel(_LOWEST), mel(_HIGHEST), BANDS + 2)
    hz = 700 * (10 ** (marks / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, _FFT // 2 + 1)[None]
    rising = (bins - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling = (hz[2:, None] - bins) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)
