"""The options of every torch engine, and how those of a catalog entry are read.

An engine adds its own in a subclass. Unsupported values raise ``ValueError`` with a message for the
operator; none is silently adjusted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import msgspec
import torch

from workers import devices
from workers.contract.models import ModelSpec
from workers.engines import registry
from workers.engines.quantized.formats import read_format
from workers.engines.registry import Serving
from workers.protocol.engine import Hardware

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # Types of the large matrices' weights; everything else is bfloat16.
    "int8": torch.bfloat16,
    "fp8": torch.bfloat16,
    "int4": torch.bfloat16,
}
UNQUANTIZED: Final = ("float32", "bfloat16", "float16")
_STORED: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Value of ``dtype`` by the name of a type in the header of a safetensors file."""


class TorchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a catalog entry, beside those of engines without torch (``registry.Serving``)."""

    dtypes: ClassVar[tuple[str, ...]] = (*UNQUANTIZED, "int8", "fp8")
    """Values of ``dtype`` that the engine supports."""

    dtype: str = "auto"
    """``auto`` is the checkpoint's own type on CUDA, and float32 on a CPU, where weights of four
    bits stay what they are; ``read`` replaces it."""
    device: str = "auto"
    """``auto`` is CUDA if there is a device, otherwise the CPU. The first one of a list."""
    slots: int = 8
    """Maximum number of concurrent requests."""
    threads: int | None = None
    """Torch's CPU threads in this model's steps. Default: one for a small model, otherwise
    ``OMP_NUM_THREADS`` or torch's own choice."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES["float32" if self.dtype == "auto" else self.dtype]

    @property
    def torch_device(self) -> torch.device:
        name = devices.parse(self.device)[0]
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device("cuda:0" if name == "cuda" else name)

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
    if spec.engine == "diffusion":
        own = {"slots": registry.default_slots(spec)} | own
    try:
        options = msgspec.convert(own, kind)
    except msgspec.ValidationError as error:
        accepted = ", ".join((*kind.__struct_fields__, *sorted(others)))
        raise ValueError(f"{error}; options of the engine {spec.engine} are {accepted}") from error
    if options.dtype not in ("auto", *kind.dtypes):
        raise ValueError(
            f"dtype is {options.dtype!r}; one of auto, {', '.join(kind.dtypes)} is accepted"
        )
    for name in ("slots", "threads", *counts):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; at least 1 is needed")
    device = options.torch_device
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {options.device}, but torch finds {_found()} here")
    stored = None if spec.checkpoint is None else read_format(Path(spec.checkpoint))
    keeps = None if stored is None else stored.keeps
    if options.dtype == "auto":
        dtype = "float32"
        if keeps in kind.dtypes and (device.type == "cuda" or keeps == "int4"):
            dtype = keeps
        elif device.type == "cuda" and spec.checkpoint is not None:
            dtype = stored_dtype(Path(spec.checkpoint))
            # A type that the engine cannot use is not one of its own weights.
            dtype = dtype if dtype in kind.dtypes else "float32"
        options = msgspec.structs.replace(options, dtype=dtype)
    if options.dtype == "int4" != keeps:
        raise ValueError(
            "dtype is int4, but the weights are not stored in four bits; use a GPTQ or AWQ "
            "checkpoint of the model, or int8"
        )
    if options.dtype == "float16" and device.type == "cpu":
        # Measured: 0.4 to 3 GFLOP/s; the same core reaches 200 in bfloat16 and 90 in float32.
        raise ValueError("float16 is many times slower than bfloat16 on a CPU; use that or float32")
    return options


def stored_dtype(checkpoint: Path) -> str:
    """Return the type of most of a checkpoint's weights: float32, bfloat16 or float16.

    ``checkpoint`` is a directory, whose subdirectories count as well, or a file. Weights in types
    of eight bits, and files that are not safetensors, count as bfloat16 if there is nothing else.
    """
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.glob("**/*.safetensors"))
    weights: Counter[str] = Counter()
    for file in files:
        try:
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            for name, tensor in header.items():
                if name != "__metadata__" and (stored := _STORED.get(tensor["dtype"])):
                    weights[stored] += math.prod(tensor["shape"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue  # the loader reports what is wrong with the file
    return weights.most_common(1)[0][0] if weights else "bfloat16"


def _found() -> str:
    count = torch.cuda.device_count()
    if not count and torch.version.cuda is None and torch.version.hip is None:
        return "no CUDA device, because it was built without CUDA,"
    names = ", ".join(f"cuda:{index}" for index in range(count))
    return names or "no CUDA device"
