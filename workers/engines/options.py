"""The options of every torch engine, and how those of a catalog entry are read.

An engine adds its own in a subclass. Unsupported values raise ``ValueError`` with a message for the
operator; none is silently adjusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, TypeVar

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.registry import Serving
from workers.protocol.engine import Hardware

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Types of the large matrices' weights; everything else is bfloat16.
    "int8": torch.bfloat16,
    "fp8": torch.bfloat16,
}
UNQUANTIZED: Final = ("float32", "bfloat16", "float16")
DEVICES: Final = ("auto", "cpu", "cuda")


class TorchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a catalog entry, beside those of engines without torch (``registry.Serving``)."""

    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    """Values of ``dtype`` that the engine supports."""

    dtype: str = "float32"
    device: str = "auto"
    """``auto`` is CUDA if there is a device, otherwise the CPU."""
    slots: int = 8
    """Maximum number of concurrent requests."""
    threads: int | None = None
    """Torch's CPU threads in this model's steps. Default: one for a small model, otherwise
    ``OMP_NUM_THREADS`` or torch's own choice."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def hardware(self) -> Hardware:
        device = self.torch_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return Hardware(name, self.dtype)


Own = TypeVar("Own", bound=TorchOptions)


def read(spec: ModelSpec, kind: type[Own], *, counts: Iterable[str] = ()) -> Own:
    """Read the options of an entry. ``counts``: further options that must be at least 1.

    Raise ``ValueError`` if an option is unknown or not supported here.
    """
    others = set(Serving.__struct_fields__) - set(kind.__struct_fields__)
    own = {name: value for name, value in spec.options.items() if name not in others}
    try:
        options = msgspec.convert(own, kind)
    except msgspec.ValidationError as error:
        accepted = ", ".join((*kind.__struct_fields__, *sorted(others)))
        raise ValueError(f"{error}; options of the engine {spec.engine} are {accepted}") from error
    for name, names in (("dtype", kind.dtypes), ("device", DEVICES)):
        if getattr(options, name) not in names:
            raise ValueError(
                f"{name} is {getattr(options, name)!r}; one of {', '.join(names)} is accepted"
            )
    for name in ("slots", "threads", *counts):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; at least 1 is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here")
    if options.dtype == "float16" and options.torch_device.type == "cpu":
        # Measured: 0.4 to 3 GFLOP/s; the same core reaches 200 in bfloat16 and 90 in float32.
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    return options
