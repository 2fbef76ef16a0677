"""The options of a catalog entry that this engine understands."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.registry import Serving

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``registry.Serving``."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    slots: int = 8
    """Requests at a time."""
    threads: int | None = None
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

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    others = set(Serving.__struct_fields__) - set(Options.__struct_fields__)
    own = {name: value for name, value in spec.options.items() if name not in others}
    if "seconds" in spec.limits:
        own["seconds_max"] = float(spec.limits["seconds"])
    try:
        options = msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        accepted = ", ".join((*Options.__struct_fields__, *sorted(others)))
        raise ValueError(f"{error}; options of the engine upscale are {accepted}") from error
    for name in ("slots", "pixels_max", "frame_pixels_max", "frames_max"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; at least 1 is needed")
    if options.overlap < 0:
        raise ValueError(f"overlap is {options.overlap}; at least 0 is needed")
    if options.tile is not None and options.tile < 2 * max(8, options.overlap):
        least = 2 * max(8, options.overlap)
        raise ValueError(f"tile is {options.tile}; with this overlap at least {least} is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here")
    if options.torch_dtype is torch.float16 and options.torch_device.type == "cpu":
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    return options
