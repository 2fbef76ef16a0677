"""The options that every engine with torch has, and how an entry's are read.

An engine adds its own in a subclass. Whatever cannot be met is refused with a sentence for the
operator; nothing is silently rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, TypeVar

import msgspec
import torch

from workers.contract.models import ModelSpec
from workers.engines.registry import Serving

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Of the weights of the large matrices; everything else is in bfloat16.
    "int8": torch.bfloat16,
    "fp8": torch.bfloat16,
}
UNQUANTIZED: Final = ("float32", "bfloat16", "float16")
DEVICES: Final = ("auto", "cpu", "cuda")


class TorchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the catalog entry; what engines without torch have too is in ``registry.Serving``."""

    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    """Those that this engine computes in."""

    dtype: str = "float32"
    device: str = "auto"
    """``auto`` is CUDA where there is a device, otherwise the CPU."""
    slots: int = 8
    """Requests at a time."""
    threads: int | None = None
    """Of torch, in this model's steps; without it one for a small model, otherwise torch's own
    choice, or ``OMP_NUM_THREADS``."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


Own = TypeVar("Own", bound=TorchOptions)


def read(spec: ModelSpec, kind: type[Own], *, counts: Iterable[str] = ()) -> Own:
    """Read the options of an entry; ``counts`` are those of at least 1, beside the common ones.

    Raise ``ValueError`` for one that is unknown or cannot be met here.
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
        # Measured: 0.4 to 3 GFLOP/s, where the same core does 200 in bfloat16 and 90 in float32.
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    return options
