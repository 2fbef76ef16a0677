"""Peak figures of processors: memory, bandwidth and matrix operations. Pure.

Those of GPUs are in ``gpus.yaml``, with their sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import yaml

GIGA: Final = 10**9
TERA: Final = 10**12

_FILE: Final = Path(__file__).with_name("gpus.yaml")
_NOISE: Final = frozenset({"nvidia", "tensor", "core", "gpu", "geforce"})
PRECISIONS: Final[Mapping[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "fp8": 1,
}
"""Bytes per number."""
OWN: Final = ("memory", "bandwidth", "tflops")
"""Figures that describe a GPU."""


def check_precision(name: str) -> None:
    """Raise ``ValueError`` unless a precision is known."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}")


@dataclass(frozen=True, slots=True)
class Device:
    """One processor: bytes of memory, bytes per second, operations per second by precision."""

    name: str
    memory: int
    bandwidth: int
    peaks: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None
    """Source of the figures, if not the table."""

    def peak(self, precision: str) -> int | None:
        """Return operations per second; None if unknown. A device without fp8 widens fp8 weights to
        bfloat16."""
        if precision == "fp8" and "fp8" not in self.peaks:
            return self.peaks.get("bfloat16")
        return self.peaks.get(precision)


class _Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    memory_gb: int
    bandwidth_gbs: int
    tflops: dict[str, float]


@cache
def gpus() -> tuple[Device, ...]:
    """Return the known GPUs."""
    rows = msgspec.convert(yaml.safe_load(_FILE.read_text(encoding="utf-8")), list[_Figures])
    return tuple(
        Device(
            row.name,
            row.memory_gb * GIGA,
            row.bandwidth_gbs * GIGA,
            {
                precision: round(peak * TERA)
                for precision, peak in {"float16": row.tflops["bfloat16"], **row.tflops}.items()
            },
        )
        for row in rows
    )


def own_gpu(figures: Mapping[str, float | None]) -> Device | None:
    """Return a GPU by its ``OWN`` figures; None if there are none.

    ``memory`` is in GB, ``bandwidth`` in GB/s, ``tflops`` at the precision that is planned. Raise
    ``ValueError`` if one is missing.
    """
    given = {name: value for name, value in figures.items() if value is not None}
    if not given:
        return None
    if missing := [name for name in OWN if name not in given]:
        raise ValueError(f"to describe a GPU, {', '.join(missing)} is required as well")
    for name, value in given.items():
        if not 0 < value < 1e9:
            raise ValueError(f"{name} is {value:g}; it must be above 0")
    return Device(
        "own GPU",
        max(1, round(given["memory"] * GIGA)),
        max(1, round(given["bandwidth"] * GIGA)),
        dict.fromkeys(PRECISIONS, max(1, round(given["tflops"] * TERA))),
        note="figures as given, with the same peak at every precision",
    )


def choose_devices(
    names: Sequence[str], described: Mapping[str, float | None]
) -> tuple[Device, ...]:
    """Return the GPUs of some names, and the one that is described by its figures, if one is.

    Raise ``LookupError`` if a name is unknown, ``ValueError`` if a GPU is described in part.
    """
    own = own_gpu(described)
    found = tuple(find_gpu(name) for name in names)
    return found if own is None else (*found, own)


def find_gpu(name: str) -> Device:
    """Find a GPU by one of the usual forms of its name: ``h200``, ``NVIDIA H200``, ``a100-80gb``.

    Raise ``LookupError``, listing the known ones, if it is unknown.
    """
    asked = set(_words(name))
    for gpu in gpus():
        own = _words(gpu.name)
        model = next(word for word in own if any(sign.isdigit() for sign in word))
        # Words besides the model's own can only name its memory or its socket.
        if model in asked and asked <= {*own, "sxm", f"{gpu.memory // GIGA}gb"}:
            return gpu
    known = ", ".join(gpu.name for gpu in gpus())
    raise LookupError(
        f"unknown GPU {name!r}; known are {known}; describe any other by {', '.join(OWN)}"
    )


def _words(name: str) -> list[str]:
    """Split a name into the words that identify a GPU."""
    text = re.sub(r"([0-9])\s+gb\b", r"\1gb", name.lower())
    text = re.sub(r"\brtx(?=[0-9])", "rtx ", text)
    words = re.findall(r"[a-z0-9]+", text)
    words = [re.sub(r"^sxm[0-9]$", "sxm", word) for word in words]
    return [word for word in words if word not in _NOISE and not word.startswith("hbm")]
