"""Options of the diffusion engine in a catalog entry, validated."""

from __future__ import annotations

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights merged into the denoiser when it is loaded, for all requests."""

    checkpoint: str
    """A directory or a ``.safetensors`` file, relative to the catalog's directory."""
    scale: float = 1.0


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    slots: int = 8
    """Maximum images or videos generated at a time, over all requests."""
    rows: int | None = None
    """Maximum rows of a forward; guidance takes two per image. Default: twice the slots."""
    steps: int = 20
    """Steps if the request names none."""
    strength: float | None = None
    """Strength if the request names none. Default: 0.6, for inpainting 1."""
    guidance: float | None = None
    """Guidance if the request names none. Default: the pipeline's own."""
    scheduler: str | None = None
    """Name of a scheduler, see ``schedulers``. Default: the checkpoint's own."""
    lora: tuple[Lora, ...] = ()
    safety: bool = False
    """Whether the checkpoint's safety checker checks every image; an error if it has none."""
    upscaler: str | None = None
    """Checkpoint of an upscaler: a directory or, in a catalog, the name of another entry."""
    frames: int | None = None
    """Frames of a video if the request names no length."""
    fps: int = 8


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    return read(spec, Options, counts=("rows", "steps", "frames", "fps"))
