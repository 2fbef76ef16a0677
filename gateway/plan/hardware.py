"""What processors can do at most: memory, bandwidth and matrix operations, from data sheets. Pure.

Figures are NVIDIA's data sheets', dense (those with sparsity are twice as large), in decimal units.
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
"""Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes of memory, bytes a second, operations a second by precision; one processor of many."""

    name: str
    memory: int
    bandwidth: int
    peaks: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None
    """Where the figures come from, if not from the table."""

    def peak(self, precision: str) -> int | None:
        """Operations a second. A device without fp8 widens such weights to bfloat16; None is
        unknown."""
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
    """Find a GPU by a name as people write it: ``h200``, ``NVIDIA H200``, ``a100-80gb``.

    Raise ``LookupError`` with those that are known.
    """
    asked = _words(name)
    for gpu in GPUS:
        own = _words(gpu.name)
        # What stands beside the model's own word is a choice of memory or of socket.
        if own[0] in asked and set(asked) <= {*own, "sxm", f"{gpu.memory // GIGA}gb"}:
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise LookupError(f"the GPU {name!r} is not known; known are {known}")


def _words(name: str) -> list[str]:
    """The words that tell one GPU from another, its model first."""
    text = re.sub(r"([0-9])\s+gb\b", r"\1gb", name.lower())
    words = re.findall(r"[a-z0-9]+", text)
    told = [re.sub(r"^sxm[0-9]$", "sxm", word) for word in words]
    return [word for word in told if word not in _NOISE and not word.startswith("hbm")]
