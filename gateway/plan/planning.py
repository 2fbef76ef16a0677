"""Makes the plan of a model: memory, speed, cost and margin on each device, as its view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import msgspec

from gateway.catalog.picking.typical import typical_orders, typical_usage
from gateway.catalog.schema import GUIDANCE_MAX, CatalogEntry
from gateway.ledger.expenses import NO_RATES, ExpenseRates
from gateway.plan.generation import plan_generation
from gateway.plan.generators import Generator, ResultOrder
from gateway.plan.hardware import PRECISIONS, Device
from gateway.plan.measured import Measured
from gateway.plan.roofline import (
    EFFICIENCY,
    MEMORY_SHARE,
    CapacityPlan,
    Load,
    cost,
    plan,
    price_of_million,
    token_bytes,
    weight_bytes,
)
from gateway.plan.shapes import Shape
from gateway.plan.subjects import Subject
from gateway.plan.views import (
    MeasuredView,
    MediaOrderView,
    MillionView,
    PlannedDeviceView,
    PlanView,
    ResultView,
    TextSpeedView,
)
from gateway.pricing import NANOS_PER_USD, Unbookable, UnpricedUsage, format_usd, quote
from workers.contract.jobs import Usage

CONTEXT: Final = 8192
"""Default sequence length in tokens, if neither the entry nor the question sets it."""
BATCH: Final = 8
SECONDS: Final = 5.0
FPS: Final = 16.0
GUIDANCE: Final = 5.0
DAY_S: Final = 86_400
_AMOUNTS: Final = ("seconds", "fps", "steps", "per_second")


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
        for name in ("dtype", "kv_dtype"):
            if (precision := getattr(self, name)) not in (None, *PRECISIONS):
                raise ValueError(
                    f"unknown precision {precision!r}; known are {', '.join(PRECISIONS)}"
                )
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency:g}; it must be above 0, at most 1")
        if self.guidance is not None and not 0 <= self.guidance <= GUIDANCE_MAX:
            raise ValueError(
                f"guidance is {self.guidance:g}; it must be between 0 and {GUIDANCE_MAX:g}"
            )
        for name in ("batch", "context", "input_tokens", "output_tokens", *_AMOUNTS):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e12:
                raise ValueError(f"{name} is {value:g}; it must be above 0")


@dataclass(frozen=True, slots=True)
class _Terms:
    """What every row of a plan needs: prices, efficiency and load."""

    rates: ExpenseRates
    price_nanos: Fraction | None
    """Price of one result."""
    efficiency: Fraction
    per_second: Fraction | None

    def hour_of(self, device: Device) -> int | None:
        """Return the price of an hour. The price of any device is that of a GPU, not of a CPU."""
        named = ExpenseRates(hours=self.rates.hours).hour_of(device.name)
        return self.rates.hour_nanos if named is None and device.peaks else named

    def result(self, seconds: Fraction, device: Device, devices: int) -> ResultView:
        return _result(
            seconds / self.efficiency,
            hour_nanos=self.hour_of(device),
            price_nanos=self.price_nanos,
            per_second=self.per_second,
            together=devices,
        )


def make_plan(
    subject: Subject,
    question: PlanQuestion,
    devices: Sequence[Device],
    *,
    rates: ExpenseRates = NO_RATES,
    measured: Sequence[Measured] = (),
) -> PlanView:
    """Return the plan of a model, a row for each device.

    Raise ``ValueError`` if the question does not fit the model.
    """
    if isinstance(subject.model, Shape):
        return _plan_text(subject, subject.model, question, devices, rates, measured)
    return _plan_media(subject, subject.model, question, devices, rates, measured)


# --- Language models ------------------------------------------------------------------------------


def _plan_text(
    subject: Subject,
    shape: Shape,
    question: PlanQuestion,
    devices: Sequence[Device],
    rates: ExpenseRates,
    measured: Sequence[Measured],
) -> PlanView:
    load = _load(subject, shape, question)
    usage = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
    terms = _terms(subject.entry, question, rates, usage)
    made = [plan(shape, load, device) for device in devices]
    return {
        "object": "plan",
        "model": subject.name,
        "task": subject.task,
        "source": shape.source,
        "parameters": shape.parameters,
        "weight_bytes": weight_bytes(shape, load.precision),
        "shape": {
            "parameters": shape.parameters,
            "active_parameters": shape.active,
            "layers": shape.layers,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "experts": shape.experts,
            "experts_used": shape.experts_used,
            "context": shape.context,
        },
        "parts": None,
        "request": {
            "dtype": load.precision,
            "kv_dtype": load.kv_precision,
            "batch": load.batch,
            "context": load.context,
            "input_tokens": load.input_tokens,
            "output_tokens": load.output_tokens,
            "kv_bytes_per_token": token_bytes(shape, load.kv_precision),
        },
        "results_per_second": question.per_second,
        "devices": [_text_row(subject.entry, one, terms) for one in made],
        "measured": _measured(measured, terms),
        "assumptions": [
            *_assumptions(devices, terms, load.precision),
            *_text_assumptions(shape, load),
        ],
    }


def _load(subject: Subject, shape: Shape, question: PlanQuestion) -> Load:
    """Fill in what the question leaves out from the entry, then from the model."""
    entry, typical = subject.entry, typical_orders()[subject.task]
    options = {} if entry is None else entry.options
    limits = None if entry is None else entry.limits
    precision = question.dtype or options.get("dtype") or shape.precision or "bfloat16"
    asked = (question.input_tokens or 0) + (question.output_tokens or 0)
    context = (
        question.context
        or (limits and limits.context_tokens)
        or max(asked, min(CONTEXT, shape.context or CONTEXT))
    )
    if question.context is None and question.input_tokens and question.output_tokens:
        context = asked
    output = question.output_tokens or min(
        typical.output_tokens or 0,
        (limits and limits.output_tokens) or context,
        max(1, context - (question.input_tokens or 1)),
    )
    if subject.task == "text-embedding":
        output = 0
    tokens = question.input_tokens or min(typical.input_tokens or 1, max(1, context - output))
    if tokens + output > context:
        raise ValueError(
            f"a request of {tokens} and {output} tokens is longer than the context of {context}"
        )
    return Load(
        precision=precision,
        # With 8-bit weights, keys and values are computed and cached in bfloat16.
        kv_precision=question.kv_dtype or (precision if precision == "float32" else "bfloat16"),
        context=context,
        batch=question.batch or options.get("slots") or BATCH,
        input_tokens=tokens,
        output_tokens=output,
    )


def _text_row(entry: CatalogEntry | None, made: CapacityPlan, terms: _Terms) -> PlannedDeviceView:
    device, fit, speed, hour = made.device, made.fit, made.speed, terms.hour_of(made.device)

    def of(tokens_per_second: Fraction | None, unit: str) -> MillionView | None:
        if hour is None or tokens_per_second is None:
            return None
        sold = None if entry is None else price_of_million(entry.selling_price, unit)
        found = cost(
            tokens_per_second, hour_nanos=hour, efficiency=terms.efficiency, price_nanos=sold
        )
        return {
            "roofline": _usd(Fraction(found.roofline_nanos)),
            "expected": _usd(Fraction(found.expected_nanos)),
            "catalog": None if sold is None else _usd(sold),
            "margin_percent": found.margin_percent,
        }

    text: TextSpeedView = {
        "kv_room_bytes": fit.kv_room_bytes,
        "kv_room_tokens": fit.kv_room_tokens,
        "sequences": fit.sequences,
        "decode_tokens_per_s_batch_1": float(speed.decode_one),
        "decode_batch": speed.batch,
        "decode_tokens_per_s": float(speed.decode),
        "prefill_tokens_per_s": None if speed.prefill is None else float(speed.prefill),
        "ridge_operations_per_byte": None if speed.ridge is None else float(speed.ridge),
        "ridge_tokens": speed.ridge_tokens,
        "usd_per_million_output_tokens": of(speed.decode, "output_token"),
        "usd_per_million_input_tokens": of(speed.prefill, "input_token"),
    }
    seconds = made.request_seconds
    result = None if seconds is None else terms.result(seconds, device, fit.devices)
    return _row(device, fit.devices, hour, text, result)


def _text_assumptions(shape: Shape, load: Load) -> list[str]:
    found = ["Sequences have full length."]
    if shape.context is not None and load.context > shape.context:
        found.append(f"The model supports {shape.context:,} positions, not {load.context:,}.")
    if shape.experts and shape.active_parameters:
        found.append(
            f"A token uses {shape.experts_used} of {shape.experts} experts, chosen at random: all "
            "are stored, and a batch reads those that its tokens use."
        )
    elif shape.experts:
        found.append(
            f"The model has {shape.experts} experts, all of which count as read and computed, "
            "because its configuration does not tell how many a token uses."
        )
    return found


# --- Pictures, video, speech and music ------------------------------------------------------------


def _plan_media(
    subject: Subject,
    model: Generator,
    question: PlanQuestion,
    devices: Sequence[Device],
    rates: ExpenseRates,
    measured: Sequence[Measured],
) -> PlanView:
    options = {} if subject.entry is None else subject.entry.options
    order, batch = _order(subject, model, question), question.batch or 1
    precision = question.dtype or options.get("dtype") or model.precision or "bfloat16"
    parts = model.parts(order, subject.task)
    parameters = sum(part.parameters for part in parts)
    milliseconds = round(order.seconds * 1000)
    is_video = "video" in subject.task or subject.task == "talking-head"
    usage = {
        "video_ms": milliseconds if is_video else 0,
        "audio_ms": milliseconds if not is_video and "image" not in subject.task else 0,
        "steps": order.steps,
    }
    terms = _terms(subject.entry, question, rates, usage)
    rows = []
    for device in devices:
        made = plan_generation(parts, precision, device, batch=batch)
        result = None if made.seconds is None else terms.result(made.seconds, device, made.devices)
        rows.append(_row(device, made.devices, terms.hour_of(device), None, result))
    return {
        "object": "plan",
        "model": subject.name,
        "task": subject.task,
        "source": model.source,
        "parameters": parameters,
        "weight_bytes": parameters * PRECISIONS[precision],
        "shape": None,
        "parts": [
            {
                "name": part.name,
                "parameters": part.parameters,
                "operations": part.operations,
                "runs": part.runs,
            }
            for part in parts
        ],
        "request": _order_view(order, precision, batch),
        "results_per_second": question.per_second,
        "devices": rows,
        "measured": _measured(measured, terms),
        "assumptions": [
            *_assumptions(devices, terms, precision),
            "Activations take memory, too; they are not counted.",
            *(
                f"The time of {part.name} is not counted: its operations cannot be computed from "
                "its configuration."
                for part in parts
                if part.operations is None
            ),
        ],
    }


def _order(subject: Subject, model: Generator, question: PlanQuestion) -> ResultOrder:
    """Fill in what the question leaves out: from the entry, the model, then typical orders."""
    entry, known, typical = subject.entry, model.order, typical_orders()[subject.task]
    default = None if entry is None else entry.default_parameters
    quality = None
    if entry is not None and entry.qualities:
        assert default is not None
        quality = entry.qualities.get(default.quality or next(iter(entry.qualities)))
    size = question.size or (entry.sizes[0] if entry and entry.sizes else known.get("size"))
    width, height = _read_size(size or "512x512")

    def first(name: str, otherwise: Any) -> Any:
        sources = (question, quality, default)
        found = (getattr(source, name, None) for source in sources)
        return next((value for value in found if value is not None), known.get(name, otherwise))

    usual = typical.video_seconds or typical.audio_seconds or SECONDS
    seconds = first("seconds", usual)
    if entry is not None and entry.limits.seconds and question.seconds is None:
        seconds = min(seconds, entry.limits.seconds)
    return ResultOrder(
        width=width,
        height=height,
        seconds=seconds,
        fps=first("fps", FPS),
        steps=first("steps", typical.steps or 1),
        guidance=first("guidance", GUIDANCE),
    )


def _read_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and len(text) <= 11):
        raise ValueError(f"size is {text!r}; write width and height, such as 1024x1024")
    return int(width), int(height)


def _order_view(order: ResultOrder, precision: str, batch: int) -> MediaOrderView:
    return {
        "dtype": precision,
        "batch": batch,
        "width": order.width,
        "height": order.height,
        "seconds": order.seconds,
        "frames": order.frames,
        "steps": order.steps,
        "guidance": order.guidance,
    }


# --- Both -----------------------------------------------------------------------------------------


def _terms(
    entry: CatalogEntry | None, question: PlanQuestion, rates: ExpenseRates, usage: dict[str, int]
) -> _Terms:
    load = question.per_second
    return _Terms(
        rates,
        None if entry is None else _price_of_result(entry, usage),
        Fraction(str(question.efficiency)),
        None if load is None else Fraction(str(load)),
    )


def _price_of_result(entry: CatalogEntry, quantities: dict[str, int]) -> Fraction | None:
    """Return the entry's price of one result; None if it depends on what a plan does not know."""
    usage: Usage = msgspec.structs.replace(typical_usage(entry, entry.task), **quantities)
    try:
        return Fraction(quote(entry.selling_price, usage).total_nanos)
    except (Unbookable, UnpricedUsage):
        return None


def _row(
    device: Device,
    devices: int,
    hour_nanos: int | None,
    text: TextSpeedView | None,
    result: ResultView | None,
) -> PlannedDeviceView:
    return {
        "name": device.name,
        "memory_bytes": device.memory,
        "bandwidth_bytes_per_s": device.bandwidth,
        "hour_usd": None if hour_nanos is None else format_usd(hour_nanos),
        "fits": devices == 1,
        "devices_needed": devices,
        "text": text,
        "result": result,
    }


def _measured(measured: Sequence[Measured], terms: _Terms) -> list[MeasuredView]:
    return [
        {
            **_result(
                one.device_seconds,
                hour_nanos=terms.rates.hour_of(one.device),
                price_nanos=one.price_nanos,
                per_second=terms.per_second,
            ),
            "basis": "measured",
            "device": one.device,
            "dtype": one.dtype,
            "requests": one.requests,
        }
        for one in measured
    ]


def _result(
    seconds: Fraction,
    *,
    hour_nanos: int | None,
    price_nanos: Fraction | None,
    per_second: Fraction | None,
    together: int = 1,
) -> ResultView:
    """Return the view of a result that takes ``seconds`` of one device.

    ``together`` is the number of devices that hold the model, in multiples of which they come.
    """
    paid = None if hour_nanos is None else seconds * hour_nanos / 3600
    margin = None
    if paid is not None and price_nanos:
        margin = round(float(100 * (price_nanos - paid) / price_nanos), 1)
    return {
        "basis": "computed",
        "device_seconds": float(seconds),
        "results_per_second": float(1 / seconds),
        "cost_usd": None if paid is None else _usd(Fraction(math.ceil(paid))),
        "price_usd": None if price_nanos is None else _usd(price_nanos),
        "margin_percent": margin,
        "devices": (
            None if per_second is None else math.ceil(per_second * seconds / together) * together
        ),
    }


def _assumptions(devices: Sequence[Device], terms: _Terms, precision: str) -> list[str]:
    percent, reached = float(100 * MEMORY_SHARE), float(100 * terms.efficiency)
    found = [
        "Computed figures of results are rooflines, upper bounds of speed, of which "
        f"{reached:g} % is assumed to be reached; measured ones are of this installation's "
        "receipts.",
        f"{percent:g} % of the memory is for weights and what is cached.",
        "Devices of one model share its work perfectly; an hour that is paid is used in full.",
    ]
    if precision == "fp8" and any(gpu.peaks and "fp8" not in gpu.peaks for gpu in devices):
        found.append("A device without fp8 computes such weights in bfloat16.")
    return found + [f"{device.name}: {device.note}." for device in devices if device.note]


def _usd(nanos: Fraction) -> str:
    """Format with four decimals; an amount below $0.001 with nine."""
    usd = float(nanos / NANOS_PER_USD)
    return f"{usd:.4f}" if usd >= 0.001 else f"{usd:.9f}".rstrip("0").rstrip(".") or "0"
