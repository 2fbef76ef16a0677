"""A source-filter vocoder: filters an excitation of pulses, in voiced frames, and noise.

Frames of ``spectra`` contain loudness and pitch. A small network predicts the balance of pulses and
noise at each frequency, and the detail that mel bands blur. The filter has minimum phase, like a
resonance. The network does not model waveforms, so that it trains in minutes on one core.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from workers.engines.speech.spectra import (
    CHANNELS,
    HOP,
    MELS,
    RATE,
    WINDOW,
    hann,
    loudness,
    mel_filters,
    pitch_in_hertz,
)

_BINS: Final = WINDOW // 2 + 1
_NOISE_LEVEL: Final = 0.5 * math.log(3 / 8 * WINDOW)
"""Level of white noise of deviation 1 in a frame, in nepers."""
_SHIFT_MAX: Final = 3.0
"""Maximum change of a frequency's level by the network, in nepers."""


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        mixed = self.norm(self.mix(states).transpose(1, 2))
        result: torch.Tensor = states + self.down(F.gelu(self.up(mixed))).transpose(1, 2)
        return result


class SourceFilterVocoder(nn.Module):
    """Maps ``(B, T, 82)`` or ``(T, 82)`` to ``(B, T * HOP)`` or ``(T * HOP,)``."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(CHANNELS, width, 3, padding=1)
        self.blocks = nn.Sequential(*[_Block(width) for _ in range(depth)])
        self.last = nn.Conv1d(width, 2 * _BINS, 1)
        nn.init.zeros_(self.last.weight)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        frames = spectrogram if spectrogram.ndim == 3 else spectrogram[None]
        raw_shift = self.last(self.blocks(self.first(frames.to(self.first.weight.dtype).mT)))
        audio = _synthesize(frames.float(), raw_shift.float())
        return audio if spectrogram.ndim == 3 else audio[0]


def _synthesize(frames: torch.Tensor, raw_shift: torch.Tensor) -> torch.Tensor:
    level = loudness(frames[..., :MELS]) @ _band_weights().to(frames) - _NOISE_LEVEL
    shift = _SHIFT_MAX * torch.tanh(raw_shift.mT / _SHIFT_MAX)
    voiced = frames[..., MELS + 1 :].clamp(0, 1)
    pulses = level + shift[..., :_BINS] + torch.log(voiced + 1e-4)
    noise = level + shift[..., _BINS:] - 4 * voiced
    pitch = pitch_in_hertz(frames[..., MELS])
    return _apply_filter(pulses, _pulses(pitch)) + _apply_filter(
        noise, torch.randn(len(frames), frames.shape[1] * HOP, device=frames.device)
    )


def _apply_filter(level: torch.Tensor, excitation: torch.Tensor) -> torch.Tensor:
    """Filter audio ``(B, T * HOP)`` by log magnitudes ``(B, T, 513)``."""
    window = hann(WINDOW).to(excitation)
    spectrum = torch.stft(excitation, WINDOW, HOP, window=window, return_complex=True)
    result = spectrum[..., : level.shape[1]] * _minimum_phase(level).mT
    return torch.istft(result, WINDOW, HOP, window=window, length=excitation.shape[1])


def _minimum_phase(level: torch.Tensor) -> torch.Tensor:
    """Compute the minimum-phase filter of log magnitudes, by folding the cepstrum."""
    cepstrum = torch.fft.irfft(level, WINDOW)
    fold = torch.zeros(WINDOW, device=level.device)
    fold[0] = fold[WINDOW // 2] = 1
    fold[1 : WINDOW // 2] = 2
    return torch.exp(torch.fft.rfft(cepstrum * fold, WINDOW))


def _pulses(pitch: torch.Tensor) -> torch.Tensor:
    """Generate all harmonics below Nyquist, in phase: ``(B, T)`` Hz to ``(B, T * HOP)``.

    Each has the power of white noise of deviation 1 in a band as wide as the pitch.
    """
    each = F.interpolate(pitch[:, None], scale_factor=HOP, mode="linear")[:, 0]
    phase = torch.cumsum((each / RATE).double(), 1)
    phase = 2 * torch.pi * (phase - phase.floor()).float()
    count = torch.floor(RATE / 2 / each)
    half = phase / 2
    below = torch.sin(half)
    below = torch.where(below.abs() < 1e-4, torch.full_like(below, 1e-4), below)
    summed = torch.sin((2 * count + 1) * half) / (2 * below) - 0.5
    exact = torch.where(below.abs() <= 2e-4, count, summed)
    return exact * torch.sqrt(4 * each / RATE)


def _band_weights() -> torch.Tensor:
    """Return each frequency's weights of the bands around it: ``(80, 513)``."""
    filters = mel_filters()
    shares = filters / filters.sum(1, keepdim=True).clamp(min=1e-9)
    peaks = filters.argmax(0)
    shares[: int(peaks[0]) + 1] = F.one_hot(torch.tensor(0), MELS).float()
    shares[int(peaks[-1]) :] = F.one_hot(torch.tensor(MELS - 1), MELS).float()
    return shares.T


def read_source_filter_vocoder(path: Path) -> SourceFilterVocoder:
    """Load the vocoder. Raise ``OSError``, ``ValueError``, ``KeyError`` or ``RuntimeError``."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    vocoder = SourceFilterVocoder(width=config["width"], depth=config["depth"])
    vocoder.load_state_dict(load_file(path / "model.safetensors"))
    return vocoder
