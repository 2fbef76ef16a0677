"""Masks: inside, an image is regenerated; outside, every pixel stays as it is.

Inpainting pipelines receive the mask. For other pipelines, the latents outside are reset after each
step to the source at the same noise level (blended latent diffusion, arXiv 2206.02779), so that the
generated area continues its surroundings. In both cases the pixels outside are restored at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from workers.media.pixels import Pixels, Weights


class Blend:
    """Resets the latents of one run outside its mask. Created and called within the run."""

    def __init__(self, pipeline: Any, source: Image.Image, mask: Weights, seed: int) -> None:
        vae, device = pipeline.vae, pipeline._execution_device
        pixels = pipeline.image_processor.preprocess(source).to(device, vae.dtype)
        encoded = vae.encode(pixels)
        latents = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.mode()
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        self._scheduler = pipeline.scheduler
        self._source: torch.Tensor = (latents - shift) * vae.config.scaling_factor
        # Same generator as the pipeline's, so that outside it removes exactly the noise it added.
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(self._source.shape, generator=generator).to(self._source)
        # A latent pixel may change if any of its pixels may.
        weights = torch.from_numpy(mask)[None, None].to(self._source)
        self._weights = F.adaptive_max_pool2d(weights, self._source.shape[-2:])

    def keep(self, latents: torch.Tensor, timestep: Any) -> torch.Tensor:
        """Blend the latents after ``timestep`` with the source at the next step's noise level."""
        outside = self._noisy(timestep)
        return (self._weights * latents + (1 - self._weights) * outside).to(latents.dtype)

    def _noisy(self, timestep: Any) -> torch.Tensor:
        steps = self._scheduler.timesteps
        next_step = getattr(self._scheduler, "step_index", None)
        if next_step is None:
            next_step = int((steps == timestep).nonzero()[0]) + 1
        if next_step == len(steps):
            return self._source
        add = getattr(self._scheduler, "scale_noise", None)
        if add is not None:
            noisy: torch.Tensor = add(self._source, steps[next_step : next_step + 1], self._noise)
        else:
            noisy = self._scheduler.add_noise(
                self._source, self._noise, steps[next_step : next_step + 1]
            )
        return noisy


def as_image(mask: Weights) -> Image.Image:
    return Image.fromarray((mask * 255).round().astype(np.uint8))


def keep_outside(pixels: Pixels, source: Image.Image, mask: Weights) -> Pixels:
    """Restore what the mask protects from the source. All three have the same size."""
    weight = mask[:, :, None]
    outside = np.asarray(source, dtype=np.float32)
    return (pixels * weight + outside * (1 - weight)).round().astype(np.uint8)
