"""The options of a catalog entry that this engine understands."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import UNQUANTIZED, TorchOptions, read


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    dtypes: ClassVar = UNQUANTIZED

    tile: int | None = None
    """Side of a tile in pixels of the source; by default what a step of this network takes well."""
    overlap: int = 16
    """Pixels of the source that neighbouring tiles share."""
    step_pixels: int | None = None
    """Of the source, in a step at most, unless one tile alone has more."""
    pixels_max: int = 2_097_152
    """Of a source picture."""
    frame_pixels_max: int = 921_600
    """Of a frame of a source video."""
    frames_max: int = 3_600
    seconds_max: float = 120.0
    """Of a source video, where the entry has no ``limits.seconds``."""


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    options = read(spec, Options, counts=("pixels_max", "frame_pixels_max", "frames_max"))
    if "seconds" in spec.limits:
        seconds = float(spec.limits["seconds"])
        options = msgspec.structs.replace(options, seconds_max=seconds)
    if options.overlap < 0:
        raise ValueError(f"overlap is {options.overlap}; at least 0 is needed")
    if options.tile is not None and options.tile < 2 * max(8, options.overlap):
        least = 2 * max(8, options.overlap)
        raise ValueError(f"tile is {options.tile}; with this overlap at least {least} is needed")
    return options
