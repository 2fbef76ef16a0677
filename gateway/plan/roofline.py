"""Roofline model of a language model on a device: fit, upper bounds of speed, cost per token. Pure.

A roofline is an upper bound, given by memory bandwidth and by the throughput of the matrix units. A
decode step reads the weights once, and the keys and values of all sequences. Prefill takes two
operations per weight and token; those of attention, small below some ten thousand tokens, are
ignored. Of a mixture of experts, all weights are stored, those of the experts that a batch uses are
read, and those that a token uses multiply it. With several devices both bounds scale with their
number, so the share of one device stays the same; communication is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from gateway.plan.hardware import PRECISIONS, Device, check_precision
from gateway.plan.shapes import Shape
from gateway.pricing import Price

MILLION: Final = 1_000_000
MEMORY_SHARE: Final = Fraction(9, 10)
"""Share of a device's memory for weights and KV cache; the rest is for temporary data."""
EFFICIENCY: Final = Fraction(1, 2)
"""Assumed fraction of the roofline that is reached; common for good engines under load."""


@dataclass(frozen=True, slots=True)
class Load:
    """The workload that is planned for."""

    precision: str
    """Precision of the weights."""
    kv_precision: str
    context: int
    """Tokens of each sequence, prompt and answer, assumed to be full."""
    batch: int
    """Sequences that decode concurrently."""
    input_tokens: int = 1
    """Tokens of a request's prompt."""
    output_tokens: int = 1
    """Tokens of its answer; none for an embedding."""

    def __post_init__(self) -> None:
        check_precision(self.precision)
        check_precision(self.kv_precision)
        for name in ("context", "batch", "input_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory for the KV cache on the smallest number of devices that fits one sequence."""

    devices: int
    kv_room_bytes: int
    kv_room_tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Upper bounds, in tokens per second of one device; None if a figure is unknown."""

    batch: int
    """Number of sequences of ``decode``: those of the load, or as many as fit."""
    decode_one: Fraction
    decode: Fraction
    prefill: Fraction | None
    """Of a prompt as long as the context."""
    ridge: Fraction | None
    """Operations per byte read above which operations, not bandwidth, are the bound."""
    ridge_tokens: int | None
    """Tokens per forward pass from which operations are the bound, ignoring the KV cache."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a million tokens in nano-dollars, rounded up, and their price."""

    roofline_nanos: int
    expected_nanos: int
    """Cost at the assumed efficiency."""
    price_nanos: Fraction | None

    @property
    def margin_percent(self) -> float | None:
        """Margin in percent of the price, at the assumed efficiency."""
        if self.price_nanos is None:
            return None
        return float(100 * (self.price_nanos - self.expected_nanos) / self.price_nanos)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    device: Device
    fit: Fit
    speed: Speed
    request_seconds: Fraction | None
    """Time of one device that a request takes; None if a figure is unknown."""


def weight_bytes(shape: Shape, precision: str) -> int:
    return shape.parameters * PRECISIONS[precision]


def token_bytes(shape: Shape, kv_precision: str) -> int:
    """Return the bytes of the keys and values of one token, in all layers."""
    return shape.cached_numbers * PRECISIONS[kv_precision]


def step_bytes(shape: Shape, load: Load, batch: int) -> Fraction:
    """Return the bytes that one decode step of ``batch`` full sequences reads."""
    kept = batch * load.context * token_bytes(shape, load.kv_precision)
    return shape.parameters_read(batch) * PRECISIONS[load.precision] + kept


def plan(
    shape: Shape, load: Load, device: Device, *, share: Fraction = MEMORY_SHARE
) -> CapacityPlan:
    fit = _fit(shape, load, device, share=share)
    speed = _speed(shape, load, device, batch=min(load.batch, fit.sequences))
    peak, seconds = device.peak(load.precision), None
    if peak is not None:
        prefill = _prefill(shape, load, device, peak=peak, tokens=load.input_tokens)
        seconds = load.input_tokens / prefill + load.output_tokens / speed.decode
    return CapacityPlan(device, fit, speed, seconds)


def cost(
    tokens_per_second: Fraction,
    *,
    hour_nanos: int,
    efficiency: Fraction,
    price_nanos: Fraction | None,
) -> Cost:
    """Compute the cost of a million tokens on a device that costs ``hour_nanos`` per hour."""
    exact = Fraction(hour_nanos * MILLION, 3600) / tokens_per_second
    return Cost(math.ceil(exact), math.ceil(exact / efficiency), price_nanos)


def price_of_million(price: Price, unit: str) -> Fraction | None:
    """Return the price of a million units in nano-dollars, by the component without conditions."""
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
    peak, flops = device.peak(load.precision), 2 * shape.active
    ridge = None if peak is None else Fraction(peak, device.bandwidth)
    return Speed(
        batch=batch,
        decode_one=_decode(shape, load, device, 1),
        decode=_decode(shape, load, device, batch),
        prefill=(
            None if peak is None else _prefill(shape, load, device, peak=peak, tokens=load.context)
        ),
        ridge=ridge,
        ridge_tokens=(
            None
            if ridge is None
            else math.ceil(ridge * weight_bytes(shape, load.precision) / flops)
        ),
    )


def _decode(shape: Shape, load: Load, device: Device, batch: int) -> Fraction:
    peak = device.peak(load.precision)
    seconds = step_bytes(shape, load, batch) / device.bandwidth
    if peak is not None:
        seconds = max(seconds, Fraction(2 * shape.active * batch, peak))
    return batch / seconds


def _prefill(shape: Shape, load: Load, device: Device, *, peak: int, tokens: int) -> Fraction:
    """Bound the tokens per second of the prefill of one prompt."""
    operations = Fraction(2 * shape.active * tokens, peak)
    read = shape.parameters_read(tokens) * PRECISIONS[load.precision]
    return tokens / max(operations, read / device.bandwidth)
