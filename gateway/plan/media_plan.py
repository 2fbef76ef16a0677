"""Plans of models of pictures, video, speech and music."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.catalog.picking.typical import typical_orders
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.generation import plan_generation
from gateway.plan.generators import Generator, NetworkPart, ResultOrder
from gateway.plan.hardware import PRECISIONS, Device, check_precision
from gateway.plan.measured import Measured
from gateway.plan.question import PlanQuestion
from gateway.plan.subjects import Subject
from gateway.plan.terms import common_assumptions, device_row, measured_rows, read_terms
from gateway.plan.views import MediaOrderView, PlanView

SECONDS: Final = 5.0
FPS: Final = 16.0
GUIDANCE: Final = 5.0


def plan_media(
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
    check_precision(precision)
    parts = model.parts(order, subject.task)
    parameters = sum(part.parameters for part in parts)
    milliseconds = round(order.seconds * 1000)
    is_video = "video" in subject.task or subject.task == "talking-head"
    usage = {
        "video_ms": milliseconds if is_video else 0,
        "audio_ms": milliseconds if not is_video and "image" not in subject.task else 0,
        "steps": order.steps,
    }
    terms = read_terms(subject.entry, question, rates, usage)
    rows = []
    for device in devices:
        made = plan_generation(parts, precision, device, batch=batch)
        result = None if made.seconds is None else terms.result(made.seconds, device, made.devices)
        rows.append(device_row(device, made.devices, terms.hour_of(device), None, result))
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
        "measured": measured_rows(measured, terms),
        "assumptions": [
            *common_assumptions(devices, terms, precision),
            "Activations take memory, too; they are not counted.",
            *(
                f"The time of {part.name} is not counted: its operations cannot be computed from "
                "its configuration."
                for part in parts
                if part.operations is None
            ),
            *([f"Measure it: tollgate try {subject.name}."] if _is_tried(subject, parts) else []),
        ],
    }


def _is_tried(subject: Subject, parts: Sequence[NetworkPart]) -> bool:
    """Whether nothing can be computed of a model that could be measured."""
    makes_from_text = subject.task.startswith("text-to-")
    return makes_from_text and all(part.operations is None for part in parts)


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
