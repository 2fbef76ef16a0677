"""Options of the upscaling engine in a catalog entry, validated."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import UNQUANTIZED, TorchOptions, read


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    dtypes: ClassVar = UNQUANTIZED

    tile: int | None = None
    """Side of a tile, in source pixels. Default: by the size of the network and the device."""
    overlap: int = 16
    """Source pixels shared by neighbouring tiles."""
    step_pixels: int | None = None
    """Maximum source pixels in a step; a single larger tile is allowed."""
    pixels_max: int = 2_097_152
    """Maximum size of a source image, in pixels."""
    frame_pixels_max: int = 921_600
    """Maximum size of a source video's frame, in pixels."""
    frames_max: int = 3_600
    seconds_max: float = 120.0
    """Maximum length of a source video, if the entry has no ``limits.seconds``."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    options = read(spec, Options, counts=("pixels_max", "frame_pixels_max", "frames_max"))
    if "seconds" in spec.limits:
        seconds = float(spec.limits["seconds"])
        options = msgspec.structs.replace(options, seconds_max=seconds)
    if options.overlap < 0:
        raise ValueError(f"overlap is {options.overlap}; it must be at least 0")
    if options.tile is not None and options.tile < 2 * max(8, options.overlap):
        least = 2 * max(8, options.overlap)
        raise ValueError(f"tile is {options.tile}; with this overlap it must be at least {least}")
    return options
