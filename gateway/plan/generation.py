"""Roofline model of pictures, video and audio on a device. Pure.

A network's pass takes as long as its operations, or as reading its weights if that is longer; a
batch shares the reading. The time of a result is the sum over all passes, as an upper bound of
speed. Activations and communication are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gateway.plan.generators import NetworkPart
from gateway.plan.hardware import PRECISIONS, Device
from gateway.plan.roofline import MEMORY_SHARE


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    device: Device
    devices: int
    """Number of devices that hold the weights."""
    seconds: Fraction | None
    """Time of one device for one result; None if no operations are known."""


def plan_generation(
    parts: Sequence[NetworkPart], precision: str, device: Device, *, batch: int
) -> GenerationPlan:
    size = sum(part.parameters for part in parts) * PRECISIONS[precision]
    devices = math.ceil(size / (device.memory * MEMORY_SHARE))
    peak = device.peak(precision)
    known = [part for part in parts if part.operations is not None]
    if peak is None or not known:
        return GenerationPlan(device, devices, None)
    seconds = sum(
        part.runs
        * max(
            Fraction(part.operations or 0, peak),
            Fraction(part.parameters * PRECISIONS[precision], device.bandwidth * batch),
        )
        for part in known
    )
    return GenerationPlan(device, devices, Fraction(seconds))
