"""Bounds the memory of an autoencoder: rows one by one, and large outputs in tiles.

Its activations grow with the pixels of a batch, and at a megapixel exceed the denoiser's weights.
Rows are independent, so that one by one they give the same. Tiles overlap and are blended by the
library; they change the result slightly, which depends on the size alone and not on the load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def bound(
    vae: Any, function: Callable[..., Any], tiling: int | None, *, decodes: bool
) -> Callable[..., Any]:
    """Wrap ``encode`` or ``decode`` to cast to the weights' precision and to bound its memory.

    ``tiling``: pixels of one image, or of all frames of a video, above which it works in tiles, and
    of a batch, above which its rows are computed one by one.
    """
    factor = _factor(vae) if decodes else (1, 1)

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_tensor(first) and first.is_floating_point():
            first = first.to(vae.dtype)
        if tiling is not None and torch.is_tensor(first):
            pixels = _pixels(first, factor)
            if hasattr(vae, "enable_tiling"):
                vae.use_tiling = pixels > tiling
            if hasattr(vae, "enable_slicing"):
                vae.use_slicing = pixels * len(first) > tiling
        return function(first, *args, **kwargs)

    return call


def _pixels(tensor: torch.Tensor, factor: tuple[int, int]) -> int:
    """Return the pixels of one row of images ``(B, C, H, W)`` or videos ``(B, C, T, H, W)``."""
    frames = (tensor.shape[2] - 1) * factor[0] + 1 if tensor.ndim == 5 else 1
    return frames * int(tensor.shape[-2]) * int(tensor.shape[-1]) * factor[1] ** 2


def _factor(vae: Any) -> tuple[int, int]:
    """Return how many frames and how many pixels per side one latent stands for."""
    config = vae.config

    def find(*names: str) -> Any:
        for name in names:
            if (found := getattr(config, name, None) or vae.__dict__.get(name)) is not None:
                return found
        return None

    frames = find("temporal_compression_ratio", "scale_factor_temporal") or 1
    side = find("spatial_compression_ratio", "scale_factor_spatial")
    if side is None:
        blocks = find("block_out_channels", "encoder_block_out_channels")
        side = 2 ** (len(blocks) - 1) if blocks else 8
    return int(frames), int(side)
