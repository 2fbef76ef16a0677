"""Options of the talking-head engine in a catalog entry, validated."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read

FPS_MAX: Final = 60


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    dtypes: ClassVar = ("float32",)

    rows: int | None = None
    """Frames in a step, over all requests. Default: 64 on CUDA, 8 on the CPU."""
    side: int = 720
    """Maximum longer side of a video, in pixels; a larger portrait is scaled down."""
    pixels_max: int = 24_000_000
    """Maximum size of a portrait as sent, in pixels."""
    fps: int = 25
    """Frame rate if the request names none."""
    seconds_max: float = 60.0
    """Maximum length of a recording, if the entry has no ``limits.seconds``."""

    @property
    def step_rows(self) -> int:
        return self.rows or (64 if self.torch_device.type == "cuda" else 8)


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` if an option is unknown or not supported here."""
    options = read(spec, Options, counts=("rows", "pixels_max"))
    if "seconds" in spec.limits:
        seconds = float(spec.limits["seconds"])
        options = msgspec.structs.replace(options, seconds_max=seconds)
    if options.side < 64:
        raise ValueError(f"side is {options.side}; it must be at least 64")
    if not 1 <= options.fps <= FPS_MAX:
        raise ValueError(f"fps is {options.fps}; it must be between 1 and {FPS_MAX}")
    if options.seconds_max <= 0:
        raise ValueError(f"seconds_max is {options.seconds_max}; it must be positive")
    return options
