"""Whether a language model fits a device, how fast it could be, what a token would cost. Pure.

A roofline is an upper bound: nothing runs faster than bytes cross the memory's bus and operations
leave the matrix units. A decode step reads all weights once and the keys and values of everybody
who writes; reading a prompt takes two operations for each weight and token (attention's own, small
below some ten thousand tokens, are left out). All weights count as read, a mixture's too. With
several devices both bounds grow with their number, so that a device's share stays the same; what
they tell each other costs nothing here. Exact in rational arithmetic; knows no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from gateway.plan.hardware import PRECISIONS, Device
from gateway.plan.shapes import Shape
from gateway.pricing import Price

MILLION: Final = 1_000_000
MEMORY_SHARE: Final = Fraction(9, 10)
"""Of a device's memory for weights and keys and values; the rest is for what comes and goes."""
EFFICIENCY: Final = Fraction(1, 2)
"""Of the roofline; a common share of good engines under load, an assumption all the same."""


@dataclass(frozen=True, slots=True)
class Load:
    """How a model is to be run."""

    precision: str
    """Of the weights."""
    kv_precision: str
    context: int
    """Tokens of each sequence, prompt and answer; taken as full."""
    batch: int
    """Sequences that write together."""

    def __post_init__(self) -> None:
        for name in ("precision", "kv_precision"):
            if getattr(self, name) not in PRECISIONS:
                raise ValueError(
                    f"the precision {getattr(self, name)!r} is not known; "
                    f"known are {', '.join(PRECISIONS)}"
                )
        for name in ("context", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory, in bytes and tokens, on the fewest devices that hold one sequence."""

    devices: int
    kv_room_bytes: int
    kv_room_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Upper bounds, each in tokens a second for one device; None where a figure is unknown."""

    batch: int
    """Sequences that the bound is for: those asked for, or as many as there is room for."""
    decode_one: Fraction
    decode: Fraction
    prefill: Fraction | None
    ridge: Fraction | None
    """Operations for each byte read, above which operations are the bound."""
    ridge_tokens: int | None
    """Tokens in one forward from which operations are the bound, keys and values left out."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Nano-dollars for a million tokens of a kind, rounded up, beside what they are sold for."""

    roofline_nanos: int
    expected_nanos: int
    """At the efficiency that is assumed."""
    price_nanos: Fraction | None

    @property
    def margin_percent(self) -> float | None:
        """Of the price, at the efficiency that is assumed."""
        if self.price_nanos is None:
            return None
        return float(100 * (self.price_nanos - self.expected_nanos) / self.price_nanos)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    device: Device
    fit: Fit
    speed: Speed


def weight_bytes(shape: Shape, precision: str) -> int:
    return shape.parameters * PRECISIONS[precision]


def token_bytes(shape: Shape, kv_precision: str) -> int:
    """Keys and values of one token, in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * PRECISIONS[kv_precision]


def step_bytes(shape: Shape, load: Load, batch: int) -> int:
    """What one decode step of so many full sequences reads."""
    kept = batch * load.context * token_bytes(shape, load.kv_precision)
    return weight_bytes(shape, load.precision) + kept


def plan(
    shape: Shape, load: Load, device: Device, *, share: Fraction = MEMORY_SHARE
) -> CapacityPlan:
    fit = _fit(shape, load, device, share=share)
    return CapacityPlan(
        device, fit, _speed(shape, load, device, batch=min(load.batch, fit.sequences))
    )


def cost(
    tokens_per_second: Fraction,
    *,
    hour_nanos: int,
    efficiency: Fraction,
    price_nanos: Fraction | None,
) -> Cost:
    """Price a million tokens of a device that costs so much in an hour."""
    exact = Fraction(hour_nanos * MILLION, 3600) / tokens_per_second
    return Cost(math.ceil(exact), math.ceil(exact / efficiency), price_nanos)


def price_of_million(price: Price, unit: str) -> Fraction | None:
    """Nano-dollars for a million of a unit, by the line that no condition is tied to."""
    for component in price.components:
        if component.unit == unit and not component.when:
            return Fraction(component.amount_nanos * MILLION, component.per)
    return None


def _fit(shape: Shape, load: Load, device: Device, *, share: Fraction) -> Fit:
    weights, usable = weight_bytes(shape, load.precision), device.memory * share
    sequence = load.context * token_bytes(shape, load.kv_precision)
    devices = math.ceil((weights + sequence) / usable)
    room = math.floor(devices * usable) - weights
    return Fit(
        devices=devices,
        kv_room_bytes=room,
        kv_room_tokens=room // token_bytes(shape, load.kv_precision),
        sequences=room // sequence,
    )


def _speed(shape: Shape, load: Load, device: Device, *, batch: int) -> Speed:
    peak, flops = device.peak(load.precision), 2 * shape.parameters
    ridge = None if peak is None else Fraction(peak, device.bandwidth)
    return Speed(
        batch=batch,
        decode_one=_decode(shape, load, device, 1),
        decode=_decode(shape, load, device, batch),
        prefill=None if peak is None else _prefill(shape, load, device, peak),
        ridge=ridge,
        ridge_tokens=(
            None
            if ridge is None
            else math.ceil(ridge * weight_bytes(shape, load.precision) / flops)
        ),
    )


def _decode(shape: Shape, load: Load, device: Device, batch: int) -> Fraction:
    peak = device.peak(load.precision)
    seconds = Fraction(step_bytes(shape, load, batch), device.bandwidth)
    if peak is not None:
        seconds = max(seconds, Fraction(2 * shape.parameters * batch, peak))
    return batch / seconds


def _prefill(shape: Shape, load: Load, device: Device, peak: int) -> Fraction:
    """Of one prompt as long as the context."""
    operations = Fraction(2 * shape.parameters * load.context, peak)
    reading = Fraction(weight_bytes(shape, load.precision), device.bandwidth)
    return load.context / max(operations, reading)
