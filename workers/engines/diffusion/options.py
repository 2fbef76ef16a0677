"""The options of a catalog entry that this engine understands, checked."""

from __future__ import annotations

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that are added to the denoiser's when it is loaded, for every request."""

    checkpoint: str
    """A directory or a ``.safetensors`` file; a relative one starts at the catalog's directory."""
    scale: float = 1.0


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    slots: int = 8
    """Pictures or videos that are being made at a time, whoever asked for them."""
    rows: int | None = None
    """Of one forward, at most; guidance takes two for each picture. By default twice the slots."""
    steps: int = 20
    """Where neither request nor entry says how many."""
    strength: float | None = None
    """Where neither request nor entry says how much; without it 0.6, or 1 of inpainting."""
    guidance: float | None = None
    """Where neither request nor entry says how much; without it the pipeline's own."""
    scheduler: str | None = None
    """By name, see ``schedulers``; by default the one that the checkpoint names."""
    lora: tuple[Lora, ...] = ()
    safety: bool = False
    """Whether the checkpoint's own safety checker looks at every picture; off, as in most places,
    and an error where the checkpoint has none."""
    upscaler: str | None = None
    """Which enlarges what is drawn: a directory, or in a catalog the name of another entry."""
    frames: int | None = None
    """Of a video whose length is left open."""
    fps: int = 8


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    return read(spec, Options, counts=("rows", "steps", "frames", "fps"))
