"""Plans of language models and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from gateway.catalog.picking.typical import typical_orders
from gateway.catalog.schema import CatalogEntry
from gateway.ledger.expenses import ExpenseRates
from gateway.plan.hardware import Device
from gateway.plan.measured import Measured
from gateway.plan.question import PlanQuestion
from gateway.plan.roofline import (
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
from gateway.plan.terms import (
    PlanTerms,
    common_assumptions,
    device_row,
    measured_rows,
    read_terms,
    usd_text,
)
from gateway.plan.views import MillionView, PlannedDeviceView, PlanView, TextSpeedView

CONTEXT: Final = 8192
"""Default sequence length in tokens, if neither the entry nor the question sets it."""
BATCH: Final = 8


def plan_text(
    subject: Subject,
    shape: Shape,
    question: PlanQuestion,
    devices: Sequence[Device],
    rates: ExpenseRates,
    measured: Sequence[Measured],
) -> PlanView:
    load = _load(subject, shape, question)
    usage = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
    terms = read_terms(subject.entry, question, rates, usage)
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
        "measured": measured_rows(measured, terms),
        "assumptions": [
            *common_assumptions(devices, terms, load.precision),
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


def _text_row(
    entry: CatalogEntry | None, made: CapacityPlan, terms: PlanTerms
) -> PlannedDeviceView:
    device, fit, speed, hour = made.device, made.fit, made.speed, terms.hour_of(made.device)

    def of(tokens_per_second: Fraction | None, unit: str) -> MillionView | None:
        if hour is None or tokens_per_second is None:
            return None
        sold = None if entry is None else price_of_million(entry.selling_price, unit)
        found = cost(
            tokens_per_second, hour_nanos=hour, efficiency=terms.efficiency, price_nanos=sold
        )
        return {
            "roofline": usd_text(Fraction(found.roofline_nanos)),
            "expected": usd_text(Fraction(found.expected_nanos)),
            "catalog": None if sold is None else usd_text(sold),
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
    return device_row(device, fit.devices, hour, text, result)


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
