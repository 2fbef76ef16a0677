"""The compact super-resolution network of Real-ESRGAN (X. Wang et al., 2021), with its names.

Convolutions of one width at the low resolution, then a pixel shuffle; its result is added to the
input, upscaled by nearest neighbour. Weights have the usual names (``body.0.weight``, …), so
checkpoints are compatible in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Compact(nn.Module):
    """Maps ``(B, 3, H, W)`` from 0 to 1 to ``(B, 3, scale * H, scale * W)``.

    ``depth`` counts the layers between the first and the last.
    """

    def __init__(self, *, width: int, depth: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.reach = depth + 2
        """Receptive field: input pixels in each direction on which an output pixel depends."""
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.PReLU(width)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width)]
        self.body = nn.ModuleList([*layers, nn.Conv2d(width, 3 * scale * scale, 3, padding=1)])

    def forward(self, low: torch.Tensor) -> torch.Tensor:
        hidden = low
        for layer in self.body:
            hidden = layer(hidden)
        nearest = F.interpolate(low, scale_factor=self.scale, mode="nearest")
        return F.pixel_shuffle(hidden, self.scale) + nearest

    @classmethod
    def from_weights(cls, weights: Mapping[str, torch.Tensor]) -> Compact:
        """Raise ``ValueError`` if the weights are not those of a compact network."""
        try:
            last = max(int(name.split(".")[1]) for name in weights)
            width = weights["body.0.weight"].shape[0]
            model = cls(
                width=width,
                depth=(last - 2) // 2,
                scale=math.isqrt(weights[f"body.{last}.weight"].shape[0] // 3),
            )
            model.load_state_dict(dict(weights))
        except (LookupError, ValueError, RuntimeError) as error:
            raise ValueError("the weights are not those of a compact network") from error
        return model
