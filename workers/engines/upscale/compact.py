"""The compact super-resolution network of Real-ESRGAN (X. Wang et al., 2021), with its names.

Convolutions of one width at the low resolution, then one shuffle of channels into pixels, on top of
the picture as it is. Weights are named as everywhere else (``body.0.weight``, …), so checkpoints go
both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


class Compact(nn.Module):
    """``(B, 3, H, W)`` from 0 to 1 becomes ``(B, 3, scale * H, scale * W)``.

    ``depth`` counts the layers between the first and the last.
    """

    def __init__(self, *, width: int, depth: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.reach = depth + 2
        """Pixels of the input, in each direction, that an output pixel depends on."""
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.PReLU(width)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width)]
        self.body = nn.ModuleList([*layers, nn.Conv2d(width, 3 * scale * scale, 3, padding=1)])

    def forward(self, low: torch.Tensor) -> torch.Tensor:
        hidden = low
        for layer in self.body:
            hidden = layer(hidden)
        upright = F.interpolate(low, scale_factor=self.scale, mode="nearest")
        return F.pixel_shuffle(hidden, self.scale) + upright

    @classmethod
    def from_weights(cls, weights: Mapping[str, torch.Tensor]) -> Compact:
        """Raise ``ValueError`` if the weights are of another shape."""
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
