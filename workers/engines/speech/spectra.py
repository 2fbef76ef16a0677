"""The acoustic features of the pocket speech model: frames of 82 numbers.

80 are a log-mel spectrogram, one is the pitch, one whether the frame is voiced.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F

RATE: Final = 22_050
HOP: Final = 300
WINDOW: Final = 1024
MELS: Final = 80
CHANNELS: Final = MELS + 2
PITCH_MIN: Final = 55.0
PITCH_MAX: Final = 450.0
_PITCH_UNIT: Final = 150.0
_FLOOR: Final = 1e-5
_LEVEL: Final = 0.1
_WIDTH_MIN: Final = 200.0
"""Minimum half width of a band, in Hz. Narrower bands resolve single harmonics, which a small model
cannot follow; it would predict their mean."""
_CENTRE: Final = -5.0
_SPREAD: Final = 2.5


def analyse(samples: torch.Tensor) -> torch.Tensor:
    """Compute frames ``(T, 82)`` float32 of audio ``(N,)`` at ``RATE`` Hz; T is N // HOP + 1."""
    pitch, voiced = pitch_of(samples)
    rest = torch.stack([torch.log2(pitch / _PITCH_UNIT), voiced], 1)
    return torch.cat([mel_of(samples), rest], 1)


def normalize_loudness(samples: torch.Tensor) -> torch.Tensor:
    """Scale audio to the level of the training data; pauses are not counted."""
    if len(samples) < WINDOW:
        return samples
    power = samples.unfold(0, WINDOW, HOP).square().mean(1)
    audible = power[power > power.max() / 300].mean()
    result: torch.Tensor = samples * (_LEVEL / audible.sqrt().clamp(min=1e-5))
    return result


def mel_of(samples: torch.Tensor) -> torch.Tensor:
    """Compute the log-mel spectrogram ``(T, 80)``, around 0 and mostly between -2 and 2."""
    power = magnitudes(samples[None], WINDOW, HOP)[0].T.square() @ mel_filters(_WIDTH_MIN)
    return (torch.log(power.clamp(min=_FLOOR**2)) / 2 - _CENTRE) / _SPREAD


def magnitudes(samples: torch.Tensor, window: int, hop: int) -> torch.Tensor:
    """Compute magnitudes ``(B, window / 2 + 1, T)``."""
    result = torch.stft(samples, window, hop, window=hann(window), return_complex=True)
    return result.abs()


def loudness(mel: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation of a log-mel spectrogram. Return nepers."""
    return mel * _SPREAD + _CENTRE


def pitch_in_hertz(channel: torch.Tensor) -> torch.Tensor:
    return (_PITCH_UNIT * 2**channel).clamp(PITCH_MIN / 1.2, PITCH_MAX * 1.2)


def pitch_of(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the pitch in Hz, interpolated where unvoiced, and voicing: each ``(T,)``.

    By autocorrelation, divided by the window's; among similar peaks the shortest lag is chosen.
    """
    padded = F.pad(samples[None], (WINDOW // 2, WINDOW // 2))[0]
    frames = padded.unfold(0, WINDOW, HOP)
    frames = (frames - frames.mean(1, keepdim=True)) * hann(WINDOW)
    power = torch.fft.rfft(frames, 2 * WINDOW).abs() ** 2
    own = torch.fft.irfft(torch.fft.rfft(hann(WINDOW), 2 * WINDOW).abs() ** 2)
    shortest, longest = int(RATE / PITCH_MAX), int(RATE / PITCH_MIN) + 1
    correlation = torch.fft.irfft(power)
    correlation = correlation / correlation[:, :1].clamp(min=1e-6) * (own[0] / own.clamp(min=1e-6))
    lags = correlation[:, shortest : longest + 1]
    peaks = F.max_pool1d(lags[:, None], 5, 1, 2)[:, 0] == lags
    best = lags.masked_fill(~peaks, 0).amax(1)
    candidates = peaks & (lags > 0.85 * best[:, None])
    place = candidates.int().argmax(1)
    rows = torch.arange(len(lags))
    left = lags[rows, (place - 1).clamp(min=0)]
    right = lags[rows, (place + 1).clamp(max=lags.shape[1] - 1)]
    bend = left - 2 * lags[rows, place] + right
    shift = ((left - right) / (2 * bend.clamp(max=-1e-6))).clamp(-0.5, 0.5)
    pitch = RATE / (shortest + place + shift)
    loud = frames.square().mean(1).sqrt() > 2e-3
    voiced = (best > 0.5) & loud
    if not voiced.any():
        return torch.full_like(pitch, _PITCH_UNIT), voiced.float()
    return _interpolate_log(pitch, voiced), voiced.float()


def _interpolate_log(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Interpolate the logarithm linearly between valid values."""
    places = valid.nonzero()[:, 0].float()
    logs = values[valid].log()
    positions = torch.arange(len(values)).float()
    after = torch.searchsorted(places, positions).clamp(max=len(places) - 1)
    before = (after - 1).clamp(min=0)
    span = (places[after] - places[before]).clamp(min=1)
    part = ((positions - places[before]) / span).clamp(0, 1)
    return torch.exp(logs[before] + (logs[after] - logs[before]) * part)


@cache
def hann(size: int) -> torch.Tensor:
    return torch.hann_window(size)


@cache
def mel_filters(width_min: float = 0.0) -> torch.Tensor:
    """Build triangular filters ``(513, 80)``, evenly spaced in mel, each with sum 1."""
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, float(top), MELS + 2) / 2595) - 1)
    centres = edges[1:-1]
    rise = (bins[:, None] - centres) / (centres - edges[:-2]).clamp(min=width_min)
    fall = (centres - bins[:, None]) / (edges[2:] - centres).clamp(min=width_min)
    result = (1 + torch.minimum(rise, fall)).clamp(min=0)
    return result / result.sum(0, keepdim=True).clamp(min=1e-6)
