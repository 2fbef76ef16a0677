"""``tollgate plan``: memory, maximum speed and cost of a language model on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gateway.catalog.loader import load_catalog
from gateway.catalog.schema import CatalogEntry
from gateway.commands.terminal import Usd, example, json_option, print_rows, read_settings
from gateway.plan.hardware import GIGA, GPUS, PRECISIONS, Device, find_gpu
from gateway.plan.roofline import (
    EFFICIENCY,
    MEMORY_SHARE,
    CapacityPlan,
    Cost,
    Load,
    cost,
    plan,
    price_of_million,
    token_bytes,
    weight_bytes,
)
from gateway.plan.shapes import SHAPES, Shape, find_shape, read_checkpoint
from gateway.plan.this_machine import devices_here
from gateway.pricing import NANOS_PER_USD, format_usd, parse_usd

CONTEXT: Final = 8192
"""Default sequence length in tokens, if neither the entry nor the command sets it."""
BATCH: Final = 8
_DIMENSIONS: Final = ("params", "layers", "kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class Subject:
    """Model to be planned: its shape, and its catalog entry if it has one."""

    name: str
    shape: Shape
    entry: CatalogEntry | None


@dataclass(frozen=True, slots=True)
class Row:
    """A plan with the costs of a million tokens; None if the price of a GPU hour is unknown."""

    plan: CapacityPlan
    output: Cost | None
    input: Cost | None


class Count(click.ParamType[int]):
    """Whole number; ``70e9`` and ``70B`` are accepted for seventy billion."""

    name = "NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        scale = {"b": 10**9, "m": 10**6}.get(text[-1:], 1)
        try:
            number = Fraction(text.rstrip("bm")) * scale
        except (ValueError, ZeroDivisionError):
            number = Fraction(1, 2)
        if number.denominator != 1 or number < 1:
            self.fail(f"{value!r} is not a whole number, such as 70e9 or 70B", param, ctx)
        return int(number)


@click.command(
    "plan",
    epilog=example(
        "tollgate plan pocket-chat",
        "tollgate plan llama-3.3-70b --gpu h200 --dtype fp8 --gpu-hour-usd 3.2 --batch 64",
        "tollgate plan ours --params 70e9 --layers 80 --kv-heads 8 --head-dim 128 --dtype fp8",
    ),
)
@click.argument("model")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    help="Device, such as H200; may be repeated.  [default: all known, and this machine's]",
)
@click.option(
    "--gpu-hour-usd",
    type=Usd(),
    help="Price of a GPU hour in USD.  [default: TOLLGATE_GPU_HOUR_USD]",
)
@click.option("--dtype", type=click.Choice(list(PRECISIONS)), help="Precision of the weights.")
@click.option("--kv-dtype", type=click.Choice(list(PRECISIONS)), help="Precision of the KV cache.")
@click.option("--context", type=click.IntRange(1), help="Length of each sequence in tokens.")
@click.option("--batch", type=click.IntRange(1), help="Number of sequences decoded together.")
@click.option(
    "--efficiency",
    type=click.FloatRange(0, 1, min_open=True),
    default=float(EFFICIENCY),
    show_default=True,
    help="Assumed fraction of the roofline that is reached.",
)
@click.option("--params", type=Count(), help="Number of weights, such as 70e9.")
@click.option("--layers", type=click.IntRange(1), help="Number of layers.")
@click.option("--kv-heads", type=click.IntRange(1), help="Number of KV heads.")
@click.option("--head-dim", type=click.IntRange(1), help="Dimension of an attention head.")
@json_option
def plan_command(
    model: str,
    gpus: tuple[str, ...],
    gpu_hour_usd: str | None,
    dtype: str | None,
    kv_dtype: str | None,
    context: int | None,
    batch: int | None,
    efficiency: float,
    as_json: bool,
    **dimensions: int | None,
) -> None:
    """Estimate whether a language model fits, its maximum speed, and the cost of a token.

    MODEL is an entry of the catalog, a directory with config.json and *.safetensors, or the name of
    a known model. Any other is described by --params, --layers, --kv-heads and --head-dim.
    """
    settings = read_settings()
    price = gpu_hour_usd or settings.gpu_hour_usd
    hour = None if price is None else parse_usd(price)
    subject = find_subject(model, settings.catalog, dimensions)
    load = _load(subject, dtype=dtype, kv_dtype=kv_dtype, context=context, batch=batch)
    devices = [find_gpu(name) for name in gpus] or [*GPUS, *devices_here()]
    share = Fraction(str(efficiency))
    rows = [
        _row(subject, plan(subject.shape, load, device), hour_nanos=hour, efficiency=share)
        for device in devices
    ]
    assumptions = _assumptions(subject, load, devices, efficiency=efficiency, hour=hour)
    if as_json:
        document = _document(subject, load, rows, hour, assumptions)
        click.echo(msgspec.json.encode(document).decode())
    else:
        _print(subject, load, rows, assumptions)


def find_subject(name: str, catalog: Path, dimensions: dict[str, int | None]) -> Subject:
    """Find a model by name, or build it from its dimensions, which take precedence.

    Raise ``LookupError`` if the model is unknown, ``ValueError`` if a dimension is missing.
    """
    entry = _find_entry(name, catalog)
    given = {key: value for key, value in dimensions.items() if value is not None}
    if given:
        if missing := [key for key in _DIMENSIONS if key not in given]:
            options = ", ".join("--" + key.replace("_", "-") for key in missing)
            raise ValueError(f"to describe a model, {options} is required as well")
        parameters, layers, kv_heads, head_dim = (given[key] for key in _DIMENSIONS)
        shape = Shape(parameters, layers, kv_heads, head_dim)
    elif entry is not None and entry.checkpoint is not None:
        shape = read_checkpoint(catalog.resolve().parent / entry.checkpoint)
    elif known := find_shape(name) or _known_upstream(entry):
        shape = known
    elif entry is None and Path(name).is_dir():
        shape = read_checkpoint(Path(name))
    else:
        what = "a model of unknown size" if entry else "neither in the catalog nor a directory"
        raise LookupError(
            f"{name!r} is {what}; known models are {', '.join(SHAPES)}; describe any other with "
            "--params, --layers, --kv-heads and --head-dim"
        )
    return Subject(name, shape, entry)


def _find_entry(name: str, catalog: Path) -> CatalogEntry | None:
    try:
        entries = load_catalog(catalog).models
    except FileNotFoundError:
        return None
    entry = next((entry for entry in entries if entry.name == name), None)
    if entry is not None and entry.task != "text-generation":
        raise ValueError(f"{name} is a model for {entry.task}; plans are for text-generation")
    return entry


def _known_upstream(entry: CatalogEntry | None) -> Shape | None:
    named = entry.upstream.model if entry is not None and entry.upstream is not None else None
    return None if named is None else find_shape(named)


def _load(
    subject: Subject,
    *,
    dtype: str | None,
    kv_dtype: str | None,
    context: int | None,
    batch: int | None,
) -> Load:
    """Fill in omitted options from the entry, then from the model."""
    shape, entry = subject.shape, subject.entry
    options = {} if entry is None else entry.options
    precision = dtype or options.get("dtype") or shape.precision or "bfloat16"
    return Load(
        precision=precision,
        # With 8-bit weights, keys and values are computed and cached in bfloat16.
        kv_precision=kv_dtype or (precision if precision == "float32" else "bfloat16"),
        context=(
            context
            or (entry and entry.limits.context_tokens)
            or min(CONTEXT, shape.context or CONTEXT)
        ),
        batch=batch or options.get("slots") or BATCH,
    )


def _row(
    subject: Subject, made: CapacityPlan, *, hour_nanos: int | None, efficiency: Fraction
) -> Row:
    price = None if subject.entry is None else subject.entry.selling_price

    def of(tokens_per_second: Fraction | None, unit: str) -> Cost | None:
        # The price of an hour is a GPU's; a CPU has none.
        if hour_nanos is None or tokens_per_second is None or not made.device.peaks:
            return None
        sold = None if price is None else price_of_million(price, unit)
        return cost(
            tokens_per_second, hour_nanos=hour_nanos, efficiency=efficiency, price_nanos=sold
        )

    return Row(made, of(made.speed.decode, "output_token"), of(made.speed.prefill, "input_token"))


def _assumptions(
    subject: Subject, load: Load, devices: Sequence[Device], *, efficiency: float, hour: int | None
) -> list[str]:
    percent = float(100 * MEMORY_SHARE)
    assumptions = [
        "Rooflines are upper bounds: real engines are slower.",
        f"{percent:g} % of the memory is for weights and KV cache; sequences have full length.",
        "Tokens per second are those of one device; several devices share the work perfectly.",
    ]
    if hour is not None:
        assumptions.append(
            f"Expected costs assume {100 * efficiency:g} % of the roofline, full use of every "
            f"hour, and ${format_usd(hour)} per hour for each GPU listed."
        )
    if subject.shape.experts:
        assumptions.append(
            f"The model has {subject.shape.experts} experts, all of which count as read and "
            "computed; with few sequences it is faster."
        )
    if load.precision == "fp8" and any(gpu.peaks and "fp8" not in gpu.peaks for gpu in devices):
        assumptions.append("A device without fp8 computes such weights in bfloat16.")
    return assumptions + [f"{device.name}: {device.note}." for device in devices if device.note]


def _print(subject: Subject, load: Load, rows: Sequence[Row], assumptions: Sequence[str]) -> None:
    shape = subject.shape
    click.echo(
        f"{subject.name}: {shape.parameters:,} weights, {shape.layers} layers, {shape.kv_heads} "
        f"KV heads of {shape.head_dim} ({shape.source})"
    )
    click.echo(
        f"{load.precision}: {_gb(weight_bytes(shape, load.precision))} of weights, all read "
        f"in every step; {token_bytes(shape, load.kv_precision):,} bytes of KV cache "
        f"per token ({load.kv_precision})"
    )
    if shape.context is not None and load.context > shape.context:
        click.echo(f"the model supports {shape.context:,} positions, not {load.context:,}")
    click.echo("")
    print_rows(rows, lambda row: _memory_cells(row, load), False)
    click.echo("\nmaximum tokens per second:")
    print_rows(rows, lambda row: _speed_cells(row, load), False)
    costs = [
        (row, kind, part)
        for row in rows
        for kind, part in (("output", row.output), ("input", row.input))
        if part is not None
    ]
    if costs:
        click.echo("\nUSD per million tokens:")
        print_rows(costs, lambda item: _cost_cells(*item), False)
    else:
        click.echo("\nSet the price of a GPU hour (--gpu-hour-usd) to see the cost of tokens.")
    click.echo("")
    for assumption in assumptions:
        click.echo(assumption)


def _memory_cells(row: Row, load: Load) -> dict[str, Any]:
    fit = row.plan.fit
    return {
        "device": row.plan.device.name,
        "memory": _gb(row.plan.device.memory),
        "fits": "yes" if fit.devices == 1 else f"no, needs {fit.devices}",
        "kv room": _gb(fit.kv_room_bytes),
        "kv tokens": f"{fit.kv_room_tokens:,}",
        f"sequences of {load.context:,}": f"{fit.sequences:,}",
    }


def _speed_cells(row: Row, load: Load) -> dict[str, Any]:
    speed = row.plan.speed
    ridge = None
    if speed.ridge is not None:
        ridge = f"{float(speed.ridge):.0f} operations/byte, {speed.ridge_tokens} tokens"
    return {
        "device": row.plan.device.name,
        "decode, batch 1": _rate(speed.decode_one),
        "decode": f"{_rate(speed.decode)} at batch {speed.batch}",
        f"prefill of {load.context:,}": _rate(speed.prefill),
        "compute-bound from": ridge,
    }


def _cost_cells(row: Row, kind: str, part: Cost) -> dict[str, Any]:
    margin = part.margin_percent
    return {
        "device": row.plan.device.name,
        "tokens": kind,
        "roofline": _usd(Fraction(part.roofline_nanos)),
        "expected": _usd(Fraction(part.expected_nanos)),
        "catalog": _usd(part.price_nanos),
        "margin": None if margin is None else f"{margin:.1f} %",
    }


def _document(
    subject: Subject,
    load: Load,
    rows: Sequence[Row],
    hour_nanos: int | None,
    assumptions: Sequence[str],
) -> dict[str, Any]:
    shape = subject.shape
    return {
        "model": subject.name,
        "shape": dataclasses.asdict(shape),
        "load": dataclasses.asdict(load),
        "weight_bytes": weight_bytes(shape, load.precision),
        "kv_bytes_per_token": token_bytes(shape, load.kv_precision),
        "gpu_hour_usd": None if hour_nanos is None else _usd(Fraction(hour_nanos)),
        "devices": [_device_document(row) for row in rows],
        "assumptions": list(assumptions),
    }


def _device_document(row: Row) -> dict[str, Any]:
    device, fit, speed = row.plan.device, row.plan.fit, row.plan.speed
    return {
        "name": device.name,
        "memory_bytes": device.memory,
        "bandwidth_bytes_per_s": device.bandwidth,
        "fits": fit.devices == 1,
        "devices_needed": fit.devices,
        "kv_room_bytes": fit.kv_room_bytes,
        "kv_room_tokens": fit.kv_room_tokens,
        "sequences": fit.sequences,
        "decode_tokens_per_s_batch_1": float(speed.decode_one),
        "decode_batch": speed.batch,
        "decode_tokens_per_s": float(speed.decode),
        "prefill_tokens_per_s": None if speed.prefill is None else float(speed.prefill),
        "ridge_operations_per_byte": None if speed.ridge is None else float(speed.ridge),
        "ridge_tokens": speed.ridge_tokens,
        "usd_per_million_output_tokens": _cost_document(row.output),
        "usd_per_million_input_tokens": _cost_document(row.input),
    }


def _cost_document(part: Cost | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {
        "roofline": _usd(Fraction(part.roofline_nanos)),
        "expected": _usd(Fraction(part.expected_nanos)),
        "catalog": _usd(part.price_nanos),
        "margin_percent": part.margin_percent,
    }


def _gb(size: int) -> str:
    return f"{size / GIGA:.4g} GB"


def _rate(tokens_per_second: Fraction | None) -> str | None:
    if tokens_per_second is None:
        return None
    value = float(tokens_per_second)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _usd(nanos: Fraction | None) -> str | None:
    """Format with four decimals; an amount below $0.001 with nine."""
    if nanos is None:
        return None
    usd = float(nanos / NANOS_PER_USD)
    return f"{usd:.4f}" if usd >= 0.001 else f"{usd:.9f}".rstrip("0")
