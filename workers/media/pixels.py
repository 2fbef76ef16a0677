"""Decoded images, videos and audio, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""``(H, W, 3)`` or, with alpha, ``(H, W, 4)``, in sRGB; for a video ``(T, H, W, 3)``."""
Weights: TypeAlias = npt.NDArray[np.float32]
"""``(H, W)`` from 0 to 1."""


class MediaError(ValueError):
    """Media that cannot be used. The message is a sentence for the client."""


@dataclass(frozen=True, slots=True)
class Audio:
    """``samples``: ``(channels, N)`` float32 from -1 to 1; ``rate`` in Hz."""

    samples: npt.NDArray[np.float32]
    rate: int

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1] / self.rate)


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """Frames at a constant rate, ``(T, H, W, 3)`` uint8, and the audio track."""

    frames: Pixels
    fps: Fraction
    audio: Audio | None = None

    @property
    def seconds(self) -> float:
        return float(len(self.frames) / self.fps)
