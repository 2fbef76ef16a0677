"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.catalog.schema import GUIDANCE_MAX
from gateway.plan.hardware import check_precision
from gateway.plan.roofline import EFFICIENCY

_AMOUNTS: Final = (
    *("batch", "context", "input_tokens", "output_tokens"),
    *("seconds", "fps", "steps", "per_second"),
)


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What a plan is asked for. None: as the entry, or the model, has it."""

    dtype: str | None = None
    kv_dtype: str | None = None
    batch: int | None = None
    context: int | None = None
    """Tokens of each sequence, for which memory is kept."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    size: str | None = None
    """Width and height in pixels, such as ``1024x1024``."""
    seconds: float | None = None
    fps: float | None = None
    steps: int | None = None
    guidance: float | None = None
    per_second: float | None = None
    """Results per second that devices are counted for."""
    efficiency: float = float(EFFICIENCY)

    def __post_init__(self) -> None:
        for precision in (self.dtype, self.kv_dtype):
            if precision is not None:
                check_precision(precision)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency:g}; it must be above 0, at most 1")
        if self.guidance is not None and not 0 <= self.guidance <= GUIDANCE_MAX:
            raise ValueError(
                f"guidance is {self.guidance:g}; it must be between 0 and {GUIDANCE_MAX:g}"
            )
        for name in _AMOUNTS:
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e12:
                raise ValueError(f"{name} is {value:g}; it must be above 0")
