"""The options of a catalog entry that this engine understands, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.registry import Serving

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Of the weights of the denoiser's large matrices; everything else is in bfloat16.
    "int8": torch.bfloat16,
    "fp8": torch.bfloat16,
}
DEVICES: Final = ("auto", "cpu", "cuda")


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that are added to the denoiser's when it is loaded, for every request."""

    checkpoint: str
    """A directory or a ``.safetensors`` file; a relative one starts at the catalog's directory."""
    scale: float = 1.0


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what every engine has in common is in ``registry.Serving``."""

    dtype: str = "float32"
    device: str = "auto"
    """``auto`` is CUDA where there is a device, otherwise the CPU."""
    slots: int = 8
    """Pictures or videos that are being made at a time, whoever asked for them."""
    rows: int | None = None
    """Of one forward, at most; guidance takes two for each picture. By default twice the slots."""
    threads: int | None = None
    steps: int = 20
    """Where neither request nor entry says how many."""
    strength: float = 0.6
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

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


def read_options(spec: ModelSpec) -> Options:
    """Raise ``ValueError`` for an option that is unknown or cannot be met here."""
    others = set(Serving.__struct_fields__) - set(Options.__struct_fields__)
    own = {name: value for name, value in spec.options.items() if name not in others}
    try:
        options = msgspec.convert(own, Options)
    except msgspec.ValidationError as error:
        accepted = ", ".join((*Options.__struct_fields__, *sorted(others)))
        raise ValueError(f"{error}; options of the engine diffusion are {accepted}") from error
    for name, accepted_names in (("dtype", DTYPES), ("device", DEVICES)):
        if getattr(options, name) not in accepted_names:
            raise ValueError(
                f"{name} is {getattr(options, name)!r}; accepted: {', '.join(accepted_names)}"
            )
    for name in ("slots", "rows", "threads", "steps", "frames", "fps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; at least 1 is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here")
    if options.dtype == "float16" and options.torch_device.type == "cpu":
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    return options
