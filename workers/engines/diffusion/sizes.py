"""The sizes that a pipeline supports."""

from __future__ import annotations

from typing import Any


def native_side(pipeline: Any) -> int:
    """Return the side of the square images that a model was trained on."""
    default = getattr(pipeline, "default_sample_size", None)
    if default is None:
        denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
        default = getattr(denoiser.config, "sample_size", None)
    if default is None and type(pipeline).__name__.startswith("ZImage"):
        default = 128  # its pipeline has 1024 pixels as a literal
    if isinstance(default, list | tuple):
        default = default[0]
    return int(default or 64) * int(getattr(pipeline, "vae_scale_factor", 8))


def side_multiple(pipeline: Any) -> int:
    """Return the number of which both sides must be multiples."""
    processor = getattr(pipeline, "image_processor", None)
    processor = processor or getattr(pipeline, "video_processor", None)
    # The factor of a processor includes the 2 by 2 patches into which some pipelines pack latents.
    processed: Any = getattr(getattr(processor, "config", None), "vae_scale_factor", 1)
    scale: Any = getattr(pipeline, "vae_scale_factor", None)
    scale = scale or getattr(pipeline, "vae_scale_factor_spatial", 1)
    denoiser = getattr(pipeline, "transformer", None)
    patch: Any = getattr(getattr(denoiser, "config", None), "patch_size", 1) or 1
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    return max(int(processed), int(scale) * int(patch))
