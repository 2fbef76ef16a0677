"""Peak figures of processors from data sheets: memory, bandwidth and matrix operations. Pure.

Figures are from NVIDIA's data sheets, dense (with sparsity they are twice as large), in decimal
units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

GIGA: Final = 10**9
TERA: Final = 10**12

_NOISE: Final = frozenset({"nvidia", "tensor", "core", "gpu"})
PRECISIONS: Final[Mapping[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "fp8": 1,
}
"""Bytes per number."""


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


def _gpu(
    name: str, memory_gb: int, bandwidth_gbs: int, *, fp32: float, bf16: int, int8: int, fp8: int
) -> Device:
    peaks = {"float32": fp32, "bfloat16": bf16, "float16": bf16, "int8": int8, "fp8": fp8}
    return Device(
        name,
        memory_gb * GIGA,
        bandwidth_gbs * GIGA,
        {precision: round(peak * TERA) for precision, peak in peaks.items() if peak},
    )


GPUS: Final = (
    _gpu("H100 SXM", 80, 3350, fp32=67, bf16=989, int8=1979, fp8=1979),
    _gpu("H200 SXM", 141, 4800, fp32=67, bf16=989, int8=1979, fp8=1979),
    _gpu("A100 80GB", 80, 2000, fp32=19.5, bf16=312, int8=624, fp8=0),
    _gpu("L4", 24, 300, fp32=30.3, bf16=121, int8=242, fp8=242),
)


def find_gpu(name: str) -> Device:
    """Find a GPU by one of the usual forms of its name: ``h200``, ``NVIDIA H200``, ``a100-80gb``.

    Raise ``LookupError``, listing the known ones, if it is unknown.
    """
    asked = _words(name)
    for gpu in GPUS:
        own = _words(gpu.name)
        # Words besides the model's own can only name its memory or its socket.
        if own[0] in asked and set(asked) <= {*own, "sxm", f"{gpu.memory // GIGA}gb"}:
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise LookupError(f"unknown GPU {name!r}; known are {known}")


def _words(name: str) -> list[str]:
    """Split a name into the words that identify a GPU, its model first."""
    text = re.sub(r"([0-9])\s+gb\b", r"\1gb", name.lower())
    words = re.findall(r"[a-z0-9]+", text)
    words = [re.sub(r"^sxm[0-9]$", "sxm", word) for word in words]
    return [word for word in words if word not in _NOISE and not word.startswith("hbm")]
