"""Speaker encoder: embeds the voice of a recording, from frames of ``spectra``."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from workers.engines.speech.manner import Manner, measure_manner, speed_of
from workers.engines.speech.mel_statistics import MelStatistics, measure_mel_statistics
from workers.engines.speech.spectra import CHANNELS, analyse, normalize_loudness


class SpeakerProfile(NamedTuple):
    embedding: torch.Tensor
    """Speaker embedding ``(D,)`` of length 1, the model's conditioning."""
    statistics: MelStatistics
    manner: Manner
    speed: float
    """Factor of the model's usual speed."""


class SpeakerEncoder(nn.Module):
    """Maps frames ``(B, T, 82)`` with a mask ``(B, T)`` to embeddings ``(B, D)`` of length 1."""

    def __init__(self, *, width: int, size: int, syllables: float | None = None) -> None:
        """``syllables`` is the model's usual number per second; None keeps its speed."""
        super().__init__()
        self._syllables = syllables
        sizes = (CHANNELS, width, width, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(a, b, 5, stride=2, padding=2) for a, b in pairwise(sizes)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.layers)
        self.last = nn.Linear(2 * width, size)

    def forward(self, frames: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        states = frames * counts[..., None]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            counts = counts[:, ::2]
            states = F.gelu(norm(layer(states.mT).mT)) * counts[..., None]
        total = counts.sum(1, keepdim=True).clamp(min=1)
        mean = states.sum(1) / total
        spread = (states.square().sum(1) / total - mean.square()).clamp(min=1e-5).sqrt()
        return F.normalize(self.last(torch.cat([mean, spread], 1)), dim=1)

    def embed(self, samples: torch.Tensor) -> SpeakerProfile:
        """Compute the profile of mono audio ``(N,)`` at ``spectra.RATE`` Hz.

        Raise ``ValueError`` if less than half a second of it is voiced.
        """
        frames = analyse(normalize_loudness(samples.float()))
        if frames[:, -1].sum() < _VOICED_FRAMES_MIN:
            raise ValueError("it contains too little speech")
        weight = next(self.parameters())
        embedding: torch.Tensor = self(
            frames[None].to(weight), torch.ones(1, len(frames)).to(weight)
        )
        manner = measure_manner(frames)
        speed = speed_of(manner, self._syllables) if self._syllables else 1.0
        return SpeakerProfile(
            embedding[0].float().cpu(), measure_mel_statistics(frames), manner, speed
        )


_VOICED_FRAMES_MIN = 36
"""Minimum number of voiced frames: half a second."""


def read_speaker_encoder(path: Path) -> SpeakerEncoder:
    """Load the encoder. Raise ``OSError``, ``ValueError``, ``KeyError`` or ``RuntimeError``."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    model = SpeakerEncoder(
        width=config["width"], size=config["size"], syllables=config.get("syllables")
    )
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model
