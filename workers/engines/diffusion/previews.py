"""Previews: decodes intermediate latents to an image or, for a video, to one frame.

Latents have the scheduler's layout, and are decoded at the same batch point as final ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def decode_image(pipeline: Any, latents: torch.Tensor, height: int, width: int) -> np.ndarray:
    """Decode the latents of an image: ``(H, W, 3)`` from 0 to 1."""
    if hasattr(pipeline, "_unpack_latents_with_ids"):
        return _decode(pipeline.vae, _flux2_latents(pipeline, latents, height, width))
    if hasattr(pipeline, "_unpack_latents"):
        latents = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    return _decode(pipeline.vae, latents)


def decode_middle_frame(
    pipeline: Any, latents: torch.Tensor, height: int, width: int
) -> np.ndarray:
    """Decode only the middle latent frame of a video: ``(H, W, 3)`` from 0 to 1.

    Latents are ``(1, C, T, h, w)``, or tokens of these, or ``(1, T * C, h, w)`` of our own model.
    """
    vae = pipeline.vae
    if latents.ndim == 3:
        compression = pipeline.vae_spatial_compression_ratio
        sides = (height // compression, width // compression)
        patches = (
            pipeline.transformer_spatial_patch_size,
            pipeline.transformer_temporal_patch_size,
        )
        area = sides[0] * sides[1] // patches[0] ** 2
        frames = latents.shape[1] // area * patches[1]
        latents = pipeline._unpack_latents(latents, frames, *sides, *patches)
    if latents.ndim == 4:
        frames = latents.reshape(-1, vae.config.latent_channels, *latents.shape[2:])
        return _decode(vae, frames[len(frames) // 2][None])
    if type(vae).__name__ == "AutoencoderKLCogVideoX":  # its frames come before the channels
        latents = latents.transpose(1, 2)
    middle = latents.shape[2] // 2
    return _decode(vae, latents[:, :, middle : middle + 1])


def _flux2_latents(pipeline: Any, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Unpack ``(1, h * w, C)`` and undo the normalisation of patches."""
    side = 2 * pipeline.vae_scale_factor
    latents = tokens.transpose(1, 2).reshape(1, -1, height // side, width // side)
    norm, epsilon = pipeline.vae.bn, pipeline.vae.config.batch_norm_eps
    mean, variance = (one.view(1, -1, 1, 1) for one in (norm.running_mean, norm.running_var))
    latents = latents * torch.sqrt(variance + epsilon).to(latents) + mean.to(latents)
    unpacked: torch.Tensor = pipeline._unpatchify_latents(latents)
    return unpacked


def _decode(vae: Any, latents: torch.Tensor) -> np.ndarray:
    config = vae.config
    extra: dict[str, Any] = {}
    if getattr(config, "timestep_conditioning", False):
        extra["temb"] = torch.zeros(1, device=latents.device, dtype=vae.dtype)
    unscaled = _unscale(vae, latents).to(vae.dtype)
    decoded = vae.decode(unscaled, return_dict=False, **extra)[0]
    image = decoded[0] if decoded.ndim == 4 else decoded[0, :, 0]
    result: np.ndarray = (image.float() / 2 + 0.5).permute(1, 2, 0).cpu().numpy()
    return result


def _unscale(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation of latents for the denoiser: restore mean and deviation."""
    config, buffers = vae.config, dict(vae.named_buffers())
    scale = getattr(config, "scaling_factor", None) or 1.0
    mean, spread = (
        buffers.get(name, getattr(config, name, None)) for name in ("latents_mean", "latents_std")
    )
    if mean is None or spread is None:
        return latents / scale + (getattr(config, "shift_factor", None) or 0.0)
    shape = (1, -1, *[1] * (latents.ndim - 2))
    mean, spread = (torch.as_tensor(one).view(shape).to(latents) for one in (mean, spread))
    return latents * spread / scale + mean
