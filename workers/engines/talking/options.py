"""The options of a catalog entry that this engine understands."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from workers.contract.models import ModelSpec
from workers.engines.options import TorchOptions, read

FPS_MAX: Final = 60


class Options(TorchOptions, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``TorchOptions``."""

    dtypes: ClassVar = ("float32",)

    rows: int | None = None
    """Frames in a step, of all requests; by default what the device takes well."""
    side: int = 720
    """Of the longer side of a video; a larger portrait is made smaller."""
    pixels_max: int = 24_000_000
    """Of a portrait as it is sent."""
    fps: int = 25
    """Where neither request nor entry says."""
    seconds_max: float = 60.0
    """Of a recording, where the entry has no ``limits.seconds``."""

    @property
    def step_rows(self) -> int:
        return self.rows or (64 if self.torch_device.type == "cuda" else 8)


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    options = read(spec, Options, counts=("rows", "pixels_max"))
    if "seconds" in spec.limits:
        seconds = float(spec.limits["seconds"])
        options = msgspec.structs.replace(options, seconds_max=seconds)
    if options.side < 64:
        raise ValueError(f"side is {options.side}; at least 64 is needed")
    if not 1 <= options.fps <= FPS_MAX:
        raise ValueError(f"fps is {options.fps}; accepted are 1 to {FPS_MAX}")
    if options.seconds_max <= 0:
        raise ValueError(f"seconds_max is {options.seconds_max}; more than 0 is needed")
    return options
